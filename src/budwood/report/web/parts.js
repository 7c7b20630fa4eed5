// Pieces that all views share: claim, caveats, the choice of a run, rows of a data set.

import { el, fmt, num, put, quote } from "./dom.js";
import { address, setState } from "./state.js";
import { textAt } from "./source.js";

const MEANING = {
  done: "finished", running: "still running", stopped: "stopped before its end: the same command carries on",
  failed: "failed", broken: "damaged or half-written",
};

/** The state of a run in a word, with what it means. */
export function badge(run) {
  return [
    run.status === "done" ? null : el("span", { class: `badge ${run.status}`, title: MEANING[run.status] || "" }, run.status),
    run.limited ? el("span", { class: "badge limited", title: sample(run) }, "limited") : null,
  ];
}

/** What "limited" means for a run. */
function sample(run) {
  return `on a sample of the rows${run.sample ? `: ${run.sample}` : ""}`;
}

/** The state of a run with its meaning beside it, for those who cannot point. */
export function explained(run) {
  const told = [run.status === "done" ? null : MEANING[run.status], run.limited ? sample(run) : null].filter(Boolean).join("; ");
  return [badge(run), told ? el("span", { class: "faint meaning" }, told) : null];
}

/** What is wrong, in words. */
export function troubles(list) {
  return list && list.length ? el("div", { class: "trouble", role: "note" }, list.map((t) => el("p", null, t))) : null;
}

/** One sentence that the data say. */
export function claim(text) {
  return text ? el("p", { class: "claim" }, quote(text)) : null;
}

/** How it was measured, and what it does not say. */
export function caveats(...items) {
  return el("details", { class: "method" }, el("summary", null, "Method and caveats"), items.map((t) => el("p", null, t)));
}

/** A select with a label. */
export function choice(name, options, value, act) {
  const box = el("select", { change: () => act(box.value) }, options.map(([v, text]) => el("option", { value: v, selected: v === value }, text)));
  return el("label", { class: "control" }, el("span", null, name), box);
}

/** How a run is called in lists. */
export function title(run) {
  return `${run.name} · ${run.models.join(", ") || "?"} on ${run.task}`;
}

/** A heading with a link that says more. */
export function crossLink(text, state) {
  return el("a", { class: "cross", href: address(state) }, text, " →");
}

/** What a run's models hold, as hashes of their files: from the server's list, or the settings in a file. */
const contents = (run) => run.contents || run.settings?.models || [];

/** Finished runs with influence scores on a run's task, and the first that scored its model number `at`: the same files, where both tell. */
export function scoresOf(ctx, run, at) {
  const all = ctx.runs.filter((r) => r.verb === "influence score" && r.task === run.task && r.status === "done");
  const same = (r) => (contents(r)[0] && contents(run)[at] ? contents(r)[0] === contents(run)[at] : r.models[0] === run.models[at]);
  return { all, found: run.models[at] ? all.find(same) : undefined };
}

/** The command that would score the training rows of a run's model number `at`. */
export async function scoring(ctx, run, at) {
  const settings = (await ctx.source.full(run.key))?.settings || {};
  const model = ctx.runs.find((r) => r.name === run.models[at] && r.place)?.place || run.models[at];
  const rows = ["shots", "limit"].filter((k) => typeof settings[k] === "number").map((k) => ` --${k} ${settings[k]}`).join("");
  return `budwood influence score ${model} --task ${run.task}${rows} --per-layer`;
}

/** A row of a data set: texts, label, what the model said. */
export function rowText(row, marked) {
  return el("div", { class: "rowtext" },
    marked || (row.text === undefined ? el("span", { class: "faint" }, row.id) : quote(textAt(row.text))),
    row.pair === undefined ? null : quote(textAt(row.pair), { class: "text pair" }));
}

/** Label, answer and id of a row in one quiet line. */
export function rowFacts(row) {
  const said = row.predicted === undefined || row.predicted === null ? null
    : el("span", { class: row.correct ? "right" : "wrong" }, row.correct ? "✓ said " : "✗ said ", quote(fmt(row.predicted)));
  return el("div", { class: "rowfacts" }, row.label === undefined || row.label === null ? null : el("span", { class: "tag" }, quote(fmt(row.label))), said, el("span", { class: "faint" }, quote(row.id)));
}

/** Numbers in two columns. */
export function facts(pairs) {
  return el("dl", { class: "facts" }, pairs.filter(([, v]) => v !== null && v !== undefined).map(([k, v]) => el("div", null, el("dt", null, k), el("dd", null, typeof v === "number" ? num(v) : v))));
}

/** A view over the runs of one kind: choose one, read its claim, then `build` draws it and returns what follows the state. */
export function overRuns(main, ctx, spec) {
  const mine = ctx.runs.filter((r) => r.view === spec.id && (!spec.only || spec.only(r)));
  const body = el("div", { class: "body" });
  put(main, el("h2", { tabindex: "-1" }, spec.title), el("p", { class: "lead" }, spec.lead));
  if (!mine.length) {
    main.append(el("p", { class: "empty" }, "No run of this kind is here. Make one: ", el("code", null, spec.make)));
    return () => {};
  }
  const done = mine.filter((r) => r.status === "done").toReversed();
  const candidates = [...new Set([...(spec.prefer ? done.filter(spec.prefer) : []), ...done, ...mine])];
  const asked = async (key) => { try { return await ctx.source.detail(key); } catch (e) { return { problem: String(e.message || e) }; } };
  const head = el("div", { class: "controls" });
  main.append(head, body);
  let [shown, follow, turn] = [null, () => {}, 0];
  return async (state) => {
    const wish = mine.find((r) => r.key === state.run);
    if ((wish ? wish.key : shown) === shown && shown) { follow(state); return; }
    turn += 1;
    const now = turn;
    let run = wish || candidates[0];
    let detail = await asked(run.key);
    for (const next of wish ? [] : candidates.slice(1, 6)) { // a run that cannot be drawn does not hide those that can
      if (!detail.problem) break;
      const other = await asked(next.key);
      if (!other.problem) [run, detail] = [next, other];
    }
    if (now !== turn) return;
    shown = run.key;
    put(head, mine.length > 1 ? choice("Run", mine.map((r) => [r.key, `${r.status === "done" ? "" : `[${r.status}] `}${title(r)}`]), run.key, (key) => setState({ ...spec.reset, run: key })) : el("span", { class: "faint" }, title(run)), el("span", { class: "standing" }, explained(run)));
    put(body, troubles([...run.problems, ...(detail.problem ? [detail.problem] : [])]), claim(detail.claim));
    follow = detail.problem ? () => {} : spec.build(body, detail, run, ctx) || (() => {});
    follow(state);
  };
}
