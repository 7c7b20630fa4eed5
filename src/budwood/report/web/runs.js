// Runs: sort, filter, compare two, read how one was made.

import { el, fmt, num, put, signed } from "./dom.js";
import { address, readState, setState } from "./state.js";
import { csv, download } from "./frame.js";
import { badge, choice, explained, facts, troubles } from "./parts.js";
import { metricTitle } from "./words.js";

const COLUMNS = [
  ["name", "run"], ["verb", "verb"], ["models", "model"], ["task", "task"], ["metric", "metric"], ["score", "score"],
  ["n", "n"], ["seed", "seed"], ["seconds", "seconds"], ["peak_rss_mb", "peak MB"], ["started", "started"],
];
const NUMERIC = new Set(["score", "n", "seconds", "peak_rss_mb"]);
const value = (run, key) => (Array.isArray(run[key]) ? run[key].join(" ") : run[key]);

function shown(runs, state) {
  const words = (state.find || "").toLowerCase().split(/\s+/).filter(Boolean);
  const all = runs.filter((r) => (!state.verb || r.verb === state.verb) && (!state.status || r.status === state.status)
    && words.every((w) => [r.name, r.verb, r.task, r.metric, ...r.models].join(" ").toLowerCase().includes(w)));
  const key = state.sort || "started";
  const way = state.way === "up" ? 1 : -1;
  return all.sort((a, b) => {
    const [x, y] = [value(a, key), value(b, key)];
    if (x === y) return 0;
    if (x === null || x === undefined) return 1;
    if (y === null || y === undefined) return -1;
    return way * (typeof x === "number" && typeof y === "number" ? x - y : String(x).localeCompare(String(y), "en", { numeric: true }));
  });
}

function sentence(runs) {
  const of = (s) => runs.filter((r) => r.status === s).length;
  const rest = ["running", "stopped", "failed", "broken"].map((s) => [of(s), s]).filter(([n]) => n).map(([n, s]) => `${n} ${s}`);
  const limited = runs.filter((r) => r.limited).length;
  const tasks = new Set(runs.map((r) => r.task)).size;
  return `${runs.length} run${runs.length === 1 ? "" : "s"} over ${tasks} task${tasks === 1 ? "" : "s"}: ${of("done")} finished${rest.length ? `, ${rest.join(", ")}` : ""}${limited ? `; ${limited} on a sample of the rows` : ""}.`;
}

function cell(run, key) {
  if (key === "name") return el("td", null, el("a", { href: address({ view: "runs", open: run.key }) }, run.name), " ", badge(run), run.problems.length ? el("span", { class: "badge broken", title: run.problems.join("; ") }, "!") : null);
  if (key === "verb" && run.view !== "runs") return el("td", null, el("a", { href: address({ view: run.view, run: run.key }) }, run.verb));
  if (key === "score") {
    const spread = typeof run.sd === "number" ? ` ± ${fmt(run.sd)}` : typeof run.low === "number" ? ` (${fmt(run.low)} to ${fmt(run.high)})` : "";
    return el("td", { class: "n" }, num(run.score), spread ? el("span", { class: "faint spread" }, spread) : null);
  }
  if (key === "metric") return el("td", null, run.metric ? metricTitle(run.metric) : "–");
  if (key === "started") return el("td", { class: "nowrap" }, (run.started || "–").replace("T", " ").slice(0, 16));
  return el("td", { class: NUMERIC.has(key) ? "n" : null }, NUMERIC.has(key) ? num(run[key]) : fmt(value(run, key)));
}

function diffTable(a, b, name) {
  const keys = [...new Set([...Object.keys(a), ...Object.keys(b)])].filter((k) => JSON.stringify(a[k]) !== JSON.stringify(b[k]));
  if (!keys.length) return el("p", { class: "faint" }, `Same ${name}.`);
  const text = (v) => (v === undefined || v === null ? "–" : typeof v === "object" ? JSON.stringify(v) : fmt(v));
  const numeric = name === "metrics";
  return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": `Differing ${name}` }, el("table", { class: "diff" },
    el("thead", null, el("tr", null, ["", "a", "b", numeric ? "b − a" : null].map((t) => (t === null ? null : el("th", { scope: "col", class: numeric && t ? "n" : null }, t))))),
    el("tbody", null, keys.map((k) => el("tr", null, el("th", { scope: "row" }, numeric ? metricTitle(k) : k.replaceAll("_", " ")),
      [a[k], b[k]].map((v) => el("td", { class: numeric ? "n" : null }, typeof v === "number" ? num(v) : text(v))),
      numeric ? el("td", { class: "n" }, typeof a[k] === "number" && typeof b[k] === "number" ? num(b[k] - a[k], signed(b[k] - a[k])) : "") : null)))));
}

/** The difference of two accuracies with a 95 % interval, from the intervals of both. */
function gap(a, b) {
  if (typeof a.score !== "number" || typeof b.score !== "number" || a.metric !== b.metric) return null;
  const d = b.score - a.score;
  const half = (r) => (typeof r.low === "number" ? (r.high - r.low) / 2 : typeof r.sd === "number" ? 1.96 * r.sd : null);
  const [ha, hb] = [half(a), half(b)];
  const wide = ha === null || hb === null ? null : Math.hypot(ha, hb);
  const range = wide === null ? "" : `, 95 % interval ${fmt(d - wide)} to ${fmt(d + wide)}${Math.abs(d) <= wide ? ": not told apart from no difference" : ""}`;
  return el("p", { class: "claim small" }, `b − a in ${metricTitle(a.metric)}: `, num(d, signed(d)), range, ".");
}

async function compared(box, ctx, a, b) {
  const [x, y] = await Promise.all([ctx.source.full(a), ctx.source.full(b)]);
  if (!x || !y) return;
  put(box, el("h3", null, "Two runs"), el("p", null, "a ", el("code", null, x.name), "  b ", el("code", null, y.name), " ", el("button", { type: "button", class: "tool", click: () => setState({ a: "", b: "" }) }, "Close")),
    gap(x, y), el("h4", null, "Settings that differ"), diffTable(x.settings, y.settings, "settings"), el("h4", null, "Numbers"), diffTable(x.numbers, y.numbers, "metrics"));
}

function quoteWord(word) {
  return /^[\w@%+=:,./-]+$/.test(word) ? word : `'${word.replaceAll("'", "'\\''")}'`;
}

async function opened(box, ctx, key) {
  const run = await ctx.source.full(key);
  if (!run) return;
  const command = run.command.map(quoteWord).join(" ");
  const copy = el("button", { type: "button", class: "tool", click: () => navigator.clipboard?.writeText(command).then(() => { copy.textContent = "Copied"; }) }, "Copy");
  const phases = Object.entries(run.phases).map(([k, v]) => `${k} ${fmt(v)} s`).join(", ");
  put(box, el("h3", { tabindex: "-1" }, run.name), el("p", null, explained(run)), troubles(run.problems),
    facts([["score", run.score], ["metric", run.metric ? metricTitle(run.metric) : null], ["n", run.n], ["seconds", run.seconds], ["peak MB", run.peak_rss_mb], ["phases", phases || null], ["finished", run.finished], ["made with", Object.entries(run.versions).map(([k, v]) => `${k} ${v}`).join(", ") || null]]),
    el("h4", null, "To make it again"), command ? el("p", { class: "command" }, el("code", null, command), " ", copy) : el("p", { class: "faint" }, "The command was not kept."),
    Object.entries(run.notes).map(([k, v]) => el("p", { class: "faint" }, `${k}: ${fmt(v)}`)),
    el("h4", null, "Settings"), facts(Object.entries(run.settings).map(([k, v]) => [k.replaceAll("_", " "), v === null ? null : typeof v === "object" ? JSON.stringify(v) : fmt(v)])),
    el("h4", null, "Every number"), facts(Object.entries(run.numbers).map(([k, v]) => [metricTitle(k), typeof v === "number" ? v : fmt(v)])),
    el("p", null, run.view === "runs" || run.status === "broken" ? null : el("a", { class: "cross", href: address({ view: run.view, run: run.key }) }, "See it drawn →"), " ", el("button", { type: "button", class: "tool", click: () => setState({ open: "" }) }, "Close")));
}

/** The view of all runs. */
export const runsView = {
  id: "runs",
  title: "Runs",
  mount(main, ctx) {
    const line = el("p", { class: "claim" });
    const controls = el("div", { class: "controls" });
    const live = el("div", { class: "live", "aria-live": "polite" });
    const panel = el("section", { class: "panel", "aria-label": "Chosen runs" });
    const aside = el("p", { class: "faint aside", hidden: true }, "The table goes on to the right: scroll it, or use the arrow keys.");
    const key = el("p", { class: "note" }, ctx.runs.some((r) => r.limited) ? "limited: made on a sample of the rows (--limit, --limit-eval)." : "");
    const box = el("div", { class: ctx.runs.length > 40 ? "scroll tall" : "scroll", tabindex: "0", role: "region", "aria-label": "Runs" });
    put(main, el("h2", { tabindex: "-1" }, "Runs"), line, controls, live, panel, aside, box, key);
    new ResizeObserver(() => { aside.hidden = box.scrollWidth <= box.clientWidth; }).observe(box);
    const kinds = [["", "all verbs"], ...[...new Set(ctx.runs.map((r) => r.verb))].sort().map((v) => [v, v])];
    const states = [["", "any state"], ...[...new Set(ctx.runs.map((r) => r.status))].sort().map((v) => [v, v])];
    const first = readState();
    const find = el("input", { type: "search", placeholder: "name, model, task …", value: first.find || "", input: () => setState({ find: find.value }) });
    put(controls, el("label", { class: "control" }, el("span", null, "Find"), find), choice("Verb", kinds, first.verb || "", (v) => setState({ verb: v })), choice("State", states, first.status || "", (v) => setState({ status: v })),
      el("button", { type: "button", class: "tool", click: () => download("runs.csv", "text/csv", csv({ columns: [...COLUMNS, ["status", "status"]].map(([key, label]) => ({ key, label })), rows: shown([...ctx.runs], readState()).map((r) => ({ ...r, models: r.models.join(" "), seed: fmt(value(r, "seed")) })) })) }, "CSV"));
    let was = "";
    return (state) => {
      line.textContent = sentence(ctx.runs);
      put(live, ctx.runs.filter((r) => r.progress && r.status === "running").map((r) => el("p", null, el("code", null, r.name), ` ${r.progress.stage || ""} ${fmt(r.progress.done)} of ${fmt(r.progress.total)}${r.progress.left ? `, ${fmt(r.progress.left)} s left` : ""} `, el("progress", { value: r.progress.done, max: r.progress.total || 1 }))));
      const rows = shown([...ctx.runs], state);
      const pick = (key) => setState(state.a && state.a !== key ? { b: key } : { a: key, b: "" });
      put(box, el("table", { class: "runs" }, el("thead", null, el("tr", null, el("th", { scope: "col" }, el("span", { class: "hide" }, "compare")),
        COLUMNS.map(([key, name]) => el("th", { scope: "col", class: NUMERIC.has(key) ? "n" : null, "aria-sort": (state.sort || "started") === key ? (state.way === "up" ? "ascending" : "descending") : "none" },
          el("button", { type: "button", class: "sort", click: () => setState({ sort: key, way: state.sort === key && state.way !== "up" ? "up" : "down" }) }, name, (state.sort || "started") === key ? (state.way === "up" ? " ↑" : " ↓") : ""))))),
      el("tbody", null, rows.slice(0, 2000).map((r) => el("tr", { "data-run": r.key }, el("td", null, el("button", { type: "button", class: "tool", "aria-pressed": String(state.a === r.key || state.b === r.key), "aria-label": `compare ${r.name}`, click: () => pick(r.key) }, state.a === r.key ? "a" : state.b === r.key ? "b" : "⇄")), COLUMNS.map(([key]) => cell(r, key)))))));
      const now = [state.a, state.b, state.open].join("|");
      if (now === was) return;
      was = now;
      put(panel);
      if (state.a && state.b) compared(panel, ctx, state.a, state.b);
      else if (state.open) opened(panel, ctx, state.open);
      else if (state.a) put(panel, el("p", { class: "faint" }, "Choose a second run to compare with the first."));
    };
  },
};
