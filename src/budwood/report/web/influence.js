// Which training rows made it: choose a query, read the rows that helped and harmed.

import { add, el, fmt, legible, num, put, quote, signed } from "./dom.js";
import { readState, setState } from "./state.js";
import { diverging, inkOn, theme } from "./colour.js";
import { textAt } from "./source.js";
import { csv, download, table } from "./frame.js";
import { caveats, choice, overRuns, rowFacts, rowText } from "./parts.js";
import { blockName, scoresName } from "./words.js";

const MOST_LISTED = 1000;

function matches(d, state) {
  const words = (state.find || "").toLowerCase().split(/\s+/).filter(Boolean);
  const out = [];
  d.queries.forEach((q, i) => {
    if (state.said === "right" && q.correct !== true) return;
    if (state.said === "wrong" && q.correct !== false) return;
    if (state.label && String(q.label) !== state.label) return;
    const text = `${q.id} ${q.text === undefined ? "" : textAt(q.text)} ${q.pair === undefined ? "" : textAt(q.pair)}`.toLowerCase();
    if (words.every((w) => text.includes(w))) out.push(i);
  });
  return out;
}

/** The list of queries: one in the tab order, arrows walk, search and filters narrow. */
function queryList(d, pick) {
  const list = el("div", { class: "queries", role: "listbox", "aria-label": "Queries", tabindex: "0" });
  const count = el("p", { class: "faint", "aria-live": "polite" });
  let [found, was, chosen] = [[], null, null];
  const node = (i) => list.querySelector(`[data-q="${i}"]`);
  const mark = (i) => {
    chosen?.setAttribute("aria-selected", "false");
    chosen = node(i);
    if (!chosen) return;
    chosen.setAttribute("aria-selected", "true");
    list.setAttribute("aria-activedescendant", chosen.id);
    const [top, bottom] = [chosen.offsetTop - list.offsetTop, chosen.offsetTop - list.offsetTop + chosen.offsetHeight];
    if (top < list.scrollTop) list.scrollTop = top;
    else if (bottom > list.scrollTop + list.clientHeight) list.scrollTop = bottom - list.clientHeight;
  };
  list.addEventListener("click", (e) => { const at = e.target.closest("[data-q]"); if (at) pick(Number(at.dataset.q)); });
  list.addEventListener("keydown", (e) => {
    const here = found.indexOf(Number(readState().q || 0));
    const next = { ArrowDown: here + 1, ArrowUp: here - 1, Home: 0, End: found.length - 1, PageDown: here + 10, PageUp: here - 10 }[e.key];
    if (next === undefined) return;
    e.preventDefault();
    pick(found[Math.max(0, Math.min(found.length - 1, next))]);
  });
  return { node: el("div", null, count, list), first: () => found[0], update(state, q) {
    const now = [state.find, state.said, state.label].join("|");
    if (now !== was) {
      was = now;
      found = matches(d, state).slice(0, MOST_LISTED);
      count.textContent = `${fmt(found.length)} of ${fmt(d.of.queries)} queries`;
      put(list, found.map((i) => el("div", { role: "option", id: `query-${i}`, "data-q": i, "aria-selected": "false" },
        d.queries[i].correct === undefined ? null : el("span", { class: d.queries[i].correct ? "right" : "wrong", title: d.queries[i].correct ? "answered right" : "answered wrong" }, d.queries[i].correct ? "✓" : "✗"), " ",
        el("bdi", { dir: "auto" }, d.queries[i].text === undefined ? d.queries[i].id : legible(textAt(d.queries[i].text).slice(0, 90))))));
    }
    mark(q);
  } };
}

/** Words of a text as they are compared: lower case, letters and digits. */
const wordsOf = (text) => text.toLowerCase().match(/[\p{L}\p{N}']+/gu) || [];

/** The query's words, shaded by how much more the helpful rows share them than the harmful ones. */
function shaded(query, sides, train) {
  if (query.text === undefined) return null;
  const bags = sides.map((side) => side.map(([n]) => new Set(train[n]?.text === undefined ? [] : wordsOf(`${textAt(train[n].text)} ${train[n].pair === undefined ? "" : textAt(train[n].pair)}`))));
  const count = (word) => bags.map((list) => list.filter((bag) => bag.has(word)).length);
  const parts = legible(textAt(query.text)).split(/([\p{L}\p{N}']+)/u);
  if (parts.length > 800) return null;
  return el("bdi", { class: "text", dir: "auto" }, parts.map((part, i) => {
    if (i % 2 === 0) return part;
    const [a, b] = count(part.toLowerCase());
    const value = a / (bags[0].length || 1) - b / (bags[1].length || 1);
    if (Math.abs(value) < 0.1) return part;
    const span = el("span", { class: "token", title: `in ${a} of ${bags[0].length} helpful and ${b} of ${bags[1].length} harmful rows`, "data-value": value }, part);
    span.style.backgroundColor = diverging(0.8 * value);
    span.style.color = inkOn(diverging(0.8 * value));
    return span;
  }));
}

/** A training row's tokens, each shaded by its share. */
function tokens([words, values]) {
  const most = Math.max(...values.map(Math.abs), 1e-30);
  return el("bdi", { class: "text tokens", dir: "auto" }, words.map((w, i) => {
    if (!w && i === 0) return null;
    const colour = diverging((0.9 * values[i]) / most);
    const span = el("span", { class: "token", title: signed(values[i]), "data-value": values[i] }, legible(w.replace(/^##/, "").replace(/^[Ġ▁]/, " ")));
    span.style.backgroundColor = colour;
    span.style.color = inkOn(colour);
    return [/^(##)/.test(w) || i === 0 ? "" : " ", span];
  }));
}

/** Shares by layer as a strip: up helps, down harms. */
function strip(names, values) {
  const most = Math.max(...values.map(Math.abs), 1e-30);
  return el("div", { class: "strip", role: "img", "aria-label": names.map((n, i) => `${n} ${signed(values[i])}`).join(", ") }, names.map((n, i) => {
    const bar = el("i", { title: `${n}: ${signed(values[i])}`, "data-value": values[i], class: values[i] < 0 ? "down" : "up" });
    bar.style.height = `${Math.max(1, (14 * Math.abs(values[i])) / most)}px`;
    bar.style.backgroundColor = diverging(values[i] < 0 ? -0.9 : 0.9);
    return el("span", null, bar);
  }));
}

function card(row, n, rank, score, most, query, inner, layers) {
  const bar = el("span", { class: score < 0 ? "scorebar neg" : "scorebar pos" });
  bar.style.width = `${(100 * Math.abs(score)) / most}%`;
  bar.style.backgroundColor = diverging(score < 0 ? -0.85 : 0.85);
  const tok = inner.tokens && inner.tokens[n];
  const lay = inner.layers && inner.layers[n];
  const same = row.label === undefined || query.label === undefined ? null : row.label === query.label ? "same label" : "other label";
  return el("li", { class: "card", "data-n": n }, el("div", { class: "cardhead" }, el("span", { class: "rank" }, `${rank}`), el("span", { class: "scorebox" }, bar), num(score, signed(score))),
    rowText(row, tok ? tokens(tok) : null), el("div", { class: "cardfoot" }, rowFacts(row), same ? el("span", { class: "faint" }, same) : null), lay ? el("div", { class: "striped" }, strip(layers.map(blockName), lay), el("span", { class: "faint" }, "by layer")) : null);
}

/** Whether a part of the model lies in the layer of this number: blocks are counted from 0 in files, layers from 1. */
function isBlock(part, layer) {
  return /^\d+$/.test(layer) && new RegExp(`(^|\\.)${Number(layer) - 1}(\\.|$)`).test(part);
}

const PAUSE = 250; // milliseconds on a query before its pass over the rows is asked for

/** A graft's query that could not be answered: one is counted at a time, so try again; all else is trouble. */
function unanswered(box, error, again) {
  if (error.busy) put(box, el("p", { class: "note", role: "status" }, error.message, " ", el("button", { type: "button", class: "tool", click: again }, "Try again")));
  else put(box, el("p", { class: "trouble" }, String(error.message || error)));
}

async function showQuery(box, d, run, ctx, state, q, strategy, signal) {
  const query = d.queries[q];
  const layers = (state.layers || "").split(",").filter(Boolean);
  const known = d.strategies.find((s) => s.name === strategy)?.layers || [];
  const names = layers.flatMap((l) => known.filter((k) => k === l || isBlock(k, l)));
  const counted = names.map(blockName).join(", ");
  let answer;
  const graft = ctx.source.live && state.graft ? ctx.runs.find((r) => r.key === state.graft) : null;
  if (graft) {
    put(box, el("p", { class: "note" }, `Counting the weights of ${graft.name} alone: a pass over the training rows, the first takes longest …`));
    await new Promise((go) => { setTimeout(go, PAUSE); });
    if (signal.aborted) return;
  }
  try { answer = await ctx.source.query(run.key, q, strategy, names, graft?.key, graft ? signal : undefined); } catch (e) {
    if (!signal.aborted) unanswered(box, e, () => showQuery(box, d, run, ctx, state, q, strategy, signal));
    return;
  }
  if (signal.aborted) return;
  if ((readState().q !== undefined && Number(readState().q) !== q) || (readState().graft || "") !== (state.graft || "")) return;
  let { rows, scores } = answer.top || { rows: [], scores: [] };
  const inner = answer.inner || {};
  let told = null;
  if (graft) told = [`Counted in the weights of ${graft.name} alone.`, answer.note ? el("strong", null, ` ${answer.note}`) : ""];
  else if (layers.length && !known.length) told = "This run has no scores by layer (score with --per-layer), so all layers are counted.";
  else if (layers.length && answer.partial) {
    const places = names.map((n) => known.indexOf(n));
    const inside = rows.map((n, i) => [n, inner.layers?.[n] ? places.reduce((sum, p) => sum + inner.layers[n][p], 0) : null, i]).filter((x) => x[1] !== null).sort((a, b) => b[1] - a[1]);
    rows = inside.map((x) => x[0]);
    scores = inside.map((x) => x[1]);
    told = `Counted in ${counted} alone; in this file only among the ${rows.length} rows shown with their layers. \`budwood view\` ranks all rows.`;
  } else if (layers.length) told = `Counted in ${counted} alone.`;
  const most = Math.max(...scores.map(Math.abs), 1e-30);
  const at = rows.map((n, i) => [n, scores[i]]);
  const half = Math.floor(at.length / 2);
  const [upper, lower] = layers.length && answer.partial ? [at, at] : [at.slice(0, half), at.slice(half)];
  const sides = [upper.filter((x) => x[1] >= 0), lower.filter((x) => x[1] < 0).toReversed()]; // the least helpful rows do no harm
  const side = (name, list, about) => el("section", { class: "side", "aria-label": name }, el("h4", null, name, el("span", { class: "faint" }, ` ${about}`)), list.length ? "" : el("p", { class: "note" }, "None of the rows at this end."), el("ol", { class: "cards" }, list.map(([n, s], i) => card(answer.train[n] || { id: n }, n, i + 1, s, most, query, inner, known))));
  const file = () => download(`${run.name}-query-${q}.csv`, "text/csv", csv({ columns: ["rank", "id", "score", "label", "text"].map((key) => ({ key, label: key })), rows: at.map(([n, s], i) => ({ rank: i + 1, id: answer.train[n]?.id, score: s, label: answer.train[n]?.label, text: answer.train[n]?.text === undefined ? "" : textAt(answer.train[n].text) })) }));
  put(box, el("article", { class: "query", "data-q": q }, el("h3", null, `Query ${q + 1}`), rowText(query, shaded(query, sides, answer.train)), rowFacts(query)), told ? el("p", { class: "note" }, told, " ", el("button", { type: "button", class: "tool", click: () => setState({ layers: "", graft: "" }) }, graft ? "Count all weights" : "Count all layers")) : null,
    el("p", null, el("button", { type: "button", class: "tool", click: file }, "CSV")),
    el("div", { class: "sides" }, side("Helped", sides[0], "more weight on these would raise the answer"), side("Harmed", sides[1], "more weight on these would lower it")));
}

/** Strategies side by side for one query: ranks of the same rows. */
async function sideBySide(box, d, run, ctx, q) {
  const answers = await Promise.all(d.strategies.map((s) => ctx.source.query(run.key, q, s.name, [])));
  const top = answers.map((a) => a.top.rows.slice(0, 10));
  const shared = (a, b) => top[a].filter((n) => top[b].includes(n)).length;
  put(box, el("h3", null, "Strategies side by side"), el("p", { class: "note" }, d.strategies.slice(1).map((s, i) => `${s.name} names ${shared(0, i + 1)} of ${d.strategies[0].name}'s ten most helpful rows`).join("; "), "."),
    el("div", { class: "columns" }, d.strategies.map((s, i) => el("div", null, el("h4", null, s.name, el("span", { class: "faint" }, s.damping ? ` damping ${s.damping}` : "")),
      el("ol", { class: "brief" }, top[i].map((n, k) => { const row = answers[i].train[n] || { id: n }; return el("li", { class: i && top[0].includes(n) ? "shared" : null }, num(answers[i].top.scores[k], signed(answers[i].top.scores[k])), " ", quote((row.text === undefined ? row.id : textAt(row.text)).slice(0, 110))); }))))),
    d.correlations ? correlationTable(d.correlations) : null);
}

function correlationTable(c) {
  const rows = Array.isArray(c) ? c : Object.entries(c).map(([k, v]) => ({ pair: k, value: typeof v === "number" ? v : v?.mean ?? v?.median }));
  return rows.length ? table({ columns: Object.keys(rows[0]).map((key) => ({ key, label: key })), rows }) : null;
}

function suspectList(d) {
  const s = d.suspects;
  return [el("h3", null, "Mislabel suspects"), el("p", { class: "note" }, `The ${s.items.length} of ${fmt(s.of)} training rows that explain themselves most (${scoresName(s.by)}): often odd, hard or mislabelled. A suspicion to read, not a verdict.`),
    el("ol", { class: "rows suspects" }, s.items.map((r) => el("li", null, rowText(r), rowFacts(r), el("span", { class: "faint" }, "self-influence ", num(r.value)))))];
}

function askBox(run, ctx, box, d) {
  const field = el("input", { type: "text", name: "ask", placeholder: "Type a text and press Enter" });
  const form = el("form", { class: "controls", submit: async (e) => {
    e.preventDefault();
    put(box, el("p", { class: "faint" }, "Asking the model …"));
    try {
      const a = await ctx.source.asking(run.key, field.value);
      const most = Math.max(...a.rows.map((r) => Math.abs(r.score)), 1e-30);
      put(box, el("p", { class: "note" }, a.said || ""), el("ol", { class: "cards" }, a.rows.map((r, i) => card(r, r.id, i + 1, r.score, most, {}, {}, []))));
    } catch (error) { put(box, el("p", { class: "trouble" }, String(error.message || error))); }
  } }, el("label", { class: "control wide" }, el("span", null, "Ask"), field));
  return d.asks ? form : null;
}

/** What a score says. Imported ones measure what their tool did, and their files do not tell what. */
export function meaning(measurement) {
  const told = measurement === "" ? "A score is the number that another tool gave the row for this query: its scale is as imported, and a positive one is read as help." :
    `A score says how much the ${measurement ?? "margin"} of the query's right answer would ${measurement === "loss" ? "fall" : "rise"} if the row had a little more weight in training; it is an approximation around the trained weights.`;
  return `${told} \`validate\` checks it by retraining.`;
}

/** The view. */
export const influenceView = {
  id: "influence",
  title: "Influence",
  mount: (main, ctx) => overRuns(main, ctx, {
    id: "influence", title: "Influence explorer", lead: "Which training rows made it?", make: "budwood influence score RUN --task tiny-sentiment --strategy ekfac,identity", prefer: (r) => r.verb === "influence score", reset: { q: "", find: "", label: "", said: "", layers: "", graft: "" },
    build(body, d, run, ctx) {
      if (d.suspects.items.length) add(body, ...suspectList(d));
      const asked = el("div", { class: "asked" });
      add(body, askBox(run, ctx, asked, d), asked);
      if (!d.queries.length) return undefined;
      const first = readState();
      const labels = [...new Set(d.queries.map((x) => x.label).filter((x) => x !== undefined && x !== null))].map(String);
      const find = el("input", { type: "search", placeholder: "words of a query", value: first.find || "", input: () => setState({ find: find.value }) });
      const holder = el("div", { class: "controls" }, el("label", { class: "control" }, el("span", null, "Find"), find),
        d.queries.some((x) => x.correct !== undefined) ? choice("Answered", [["", "right or wrong"], ["right", "right"], ["wrong", "wrong"]], first.said || "", (v) => setState({ said: v })) : null,
        labels.length > 1 && labels.length < 40 ? choice("Label", [["", "any label"], ...labels.map((l) => [l, l])], first.label || "", (v) => setState({ label: v })) : null,
        d.strategies.length > 1 ? choice("Strategy", d.strategies.map((s) => [s.name, s.name]), first.strategy || d.strategies[0].name, (v) => setState({ strategy: v })) : el("span", { class: "faint" }, d.strategies[0].name),
        d.strategies.length > 1 ? el("label", { class: "control check" }, el("input", { type: "checkbox", checked: first.beside === "1", change: (e) => setState({ beside: e.target.checked ? "1" : "" }) }), el("span", null, "Side by side")) : null);
      const list = queryList(d, (i) => setState({ q: String(i) }));
      const answer = el("div", { class: "answer" });
      const beside = el("div", { class: "beside" });
      add(body, d.missing ? el("p", { class: "faint" }, `Texts are not at hand: ${d.missing}`) : "", d.left_out ? el("p", { class: "faint" }, `Not in this page: ${d.left_out}.`) : "", holder, el("div", { class: "explorer" }, list.node, answer), beside,
        caveats(meaning(d.measurement), "Words of the query are shaded where the helpful rows shown share them more often (orange) or the harmful ones do (blue): a description, not an attribution.", "Shares by token are of the training row; shares by layer add up to the score where every layer is covered."));
      let was = "";
      let last = new AbortController();
      return (state) => {
        const strategy = d.strategies.some((s) => s.name === state.strategy) ? state.strategy : d.strategies[0].name;
        const q = Math.min(Math.max(0, Number(state.q) || 0), d.queries.length - 1);
        list.update(state, q);
        const now = [q, strategy, state.layers, state.graft, state.beside, theme()].join("|");
        if (now === was) return;
        was = now;
        last.abort(); // of a query that is no longer looked at
        last = new AbortController();
        showQuery(answer, d, run, ctx, state, q, strategy, last.signal);
        if (state.beside === "1" && d.strategies.length > 1) sideBySide(beside, d, run, ctx, q);
        else put(beside);
      };
    },
  }),
};
