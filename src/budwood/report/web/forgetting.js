// What a new skill costs the old ones: every way of holding them, and the front that none beats.

import { add, el, fmt, num, put } from "./dom.js";
import { setState } from "./state.js";
import { bars } from "./bars.js";
import { points } from "./points.js";
import { figure, table } from "./frame.js";
import { caveats, choice, overRuns } from "./parts.js";
import { blockName, capital, metricName, metricTitle } from "./words.js";

const wayName = (d, way) => d.ways[way] || way;
const lower = (d, metric) => d.lower_is_better.includes(metric);
const median = (list) => { const s = list.filter((v) => typeof v === "number").sort((a, b) => a - b); return s.length ? (s[(s.length - 1) >> 1] + s[s.length >> 1]) / 2 : null; };

/** One group per way and strength: median and range over seeds, as scores. */
function grouped(d, kept) {
  const by = new Map();
  for (const c of d.cells) {
    const key = `${c.retain}|${c.strength}`;
    if (!by.has(key)) by.set(key, []);
    by.get(key).push(c);
  }
  return [...by.values()].map((cells) => {
    const x = cells.map((c) => c.new?.score).filter((v) => typeof v === "number");
    const y = cells.map((c) => c.kept[kept]?.score).filter((v) => typeof v === "number");
    const { retain, strength, name } = cells[0];
    return { cells, retain, strength, name, group: wayName(d, retain), x: median(x), y: median(y), xlow: Math.min(...x), xhigh: Math.max(...x), ylow: Math.min(...y), yhigh: Math.max(...y), front: d.front.some((f) => f.retain === retain && f.strength === strength), seeds: cells.length };
  }).filter((g) => g.x !== null && g.y !== null);
}

const titled = (d, metric) => (lower(d, metric) ? metricTitle(metric) : `${metricName(metric)} (higher is better)`);

/** The error of an answer that needs no skill, on the scale of the scores. */
function trivialOf(d) {
  const error = d.reference?.new_error;
  if (typeof error !== "number") return null;
  const most = Math.max(...d.cells.map((c) => c.new?.score ?? 0)) > 1 ? 100 : 1; // some scores are in percent
  return { at: lower(d, d.metric) ? error : most * (1 - error), name: d.reference.is || "the trivial answer" };
}

function frontSpec(d, run, kept, picked) {
  const groups = grouped(d, kept);
  const keptMetric = d.cells.find((c) => c.kept[kept])?.kept[kept].metric;
  const [sx, sy] = [lower(d, d.metric) ? 1 : -1, lower(d, keptMetric) ? 1 : -1];
  const undominated = groups.filter((g) => !groups.some((o) => o !== g && sx * o.x <= sx * g.x && sy * o.y <= sy * g.y && (o.x !== g.x || o.y !== g.y))).sort((a, b) => a.x - b.x);
  const base = d.base.kept[kept]?.score;
  const trivial = trivialOf(d);
  return {
    name: `${run.name}-front`, title: capital(`${run.task} against ${kept}`), height: 360, hint: "Choose a point for what it does to every task.",
    note: [groups.some((g) => g.seeds > 1) ? "Median over seeds; bars from the lowest to the highest seed." : "One seed: no bars.", undominated.length > 1 ? "The line is the front that no other way beats." : "", trivial ? `Upright line: ${trivial.name}.` : ""].filter(Boolean).join(" "),
    draw: (w, say) => points(w, { groups: [...new Set(groups.map((g) => g.group))], points: groups.map((g) => ({ ...g, name: g.strength === null ? "" : `strength ${fmt(g.strength)}`, tell: `${g.name}: ${run.task} ${fmt(g.x)}, ${kept} ${fmt(g.y)} (${g.seeds} seed${g.seeds === 1 ? "" : "s"})${g.front ? ", on the front" : ""}` })),
      rising: sx < 0, front: undominated.map((g) => [g.x, g.y]), yRules: typeof base === "number" ? [{ at: base, name: "before training" }] : [], xRules: trivial ? [trivial] : [], x: `${run.task}: ${titled(d, d.metric)}`, y: `${kept}: ${titled(d, keptMetric)}`, picked: groups.findIndex((g) => g.name === picked), pick: (i) => setState({ cell: groups[i].name }), name: "Skill against forgetting" }, say),
    table: { columns: [["name", "way"], ["x", `${run.task}: ${metricTitle(d.metric)}`], ["xlow", "low"], ["xhigh", "high"], ["y", `${kept}: ${metricTitle(keptMetric)}`], ["ylow", "low "], ["yhigh", "high "], ["seeds", "seeds"]].map(([key, label]) => ({ key, label })), rows: groups },
  };
}

function cellPanel(box, d, run, group) {
  const tasks = Object.keys(d.cells[0].kept);
  const rows = tasks.map((t) => {
    const metric = group.cells[0].kept[t]?.metric;
    return { task: t, metric: titled(d, metric), before: d.base.kept[t]?.score ?? null, after: median(group.cells.map((c) => c.kept[t]?.score)) };
  });
  put(box, el("h3", null, group.name), el("p", null, `${run.task}: ${titled(d, d.metric)} `, num(group.x)),
    table({ columns: [["task", "kept task"], ["metric", "metric"], ["before", "before"], ["after", "after"]].map(([key, label]) => ({ key, label })), rows }));
}

function massFigure(d, run) {
  const [name, mass] = Object.entries(d.fisher).find(([, m]) => Object.keys(m).length) || [];
  if (!name) return "";
  const items = Object.entries(mass).map(([k, v]) => ({ name: blockName(k), value: v }));
  return figure({ name: `${run.name}-fisher`, title: `Fisher information of ${name} by layer: what EWC holds`, height: 50 + 28 * items.length, draw: (w, say) => bars(w, { items, unit: "sum over the layer's weights", name: "Fisher by layer" }, say), table: { columns: [{ key: "name", label: "layer" }, { key: "value", label: "mass" }], rows: items } });
}

/** The main picture, for the story. */
export function forgettingPicture(d, run) {
  return d.cells.length ? figure(frontSpec(d, run, d.main_kept, null)) : null;
}

/** The view. */
export const forgettingView = {
  id: "forgetting",
  title: "Forgetting",
  mount: (main, ctx) => overRuns(main, ctx, {
    id: "forgetting", title: "Skill against forgetting", lead: "Can a new skill be added without losing the old?", make: "budwood inject tiny-bert --task arithmetic --keep tiny-text --retain none,ewc,l2,replay", reset: { cell: "", kept: "" },
    build(body, d, run) {
      if (!d.cells.length) return undefined;
      const tasks = Object.keys(d.cells[0].kept);
      const holder = el("div", { class: "controls" });
      const panel = el("section", { class: "panel", "aria-live": "polite" });
      const chart = figure(frontSpec(d, run, d.main_kept, null));
      const area = d.hypervolume ? Object.entries(d.hypervolume).map(([k, v]) => ({ name: wayName(d, k), value: typeof v === "number" ? v : median(Object.values(v)) })) : [];
      add(body, holder, chart, panel, massFigure(d, run), area.some((a) => a.value > 0) ? figure({ name: `${run.name}-area`, title: "Area that each way covers (hypervolume)", height: 60 + 28 * area.length, note: "The larger, the more of both skills a way can have at once. Median over seeds.", draw: (w, say) => bars(w, { items: area, name: "Hypervolume" }, say), table: { columns: [{ key: "name", label: "way" }, { key: "value", label: "area" }], rows: area } }) : area.length ? el("p", { class: "note" }, `No area to draw (hypervolume 0 for all): no way is better than ${trivialOf(d)?.name || "the trivial answer"} at ${run.task} and than plain training at ${d.main_kept} at once.`) : "",
        caveats("Every cell starts from the same weights and sees the same rows of the new task. Replay sees rows of the kept text as well; where it wins, it wins with more data at hand.", "Kept tasks with labels are measured by a fresh head on frozen weights unless the study says otherwise."));
      let was = null;
      return (state) => {
        const kept = tasks.includes(state.kept) ? state.kept : d.main_kept;
        const now = `${kept}|${state.cell}`;
        if (now === was) return;
        was = now;
        put(holder, tasks.length > 1 ? choice("Kept task", tasks.map((t) => [t, t]), kept, (v) => setState({ kept: v })) : null);
        chart.update(frontSpec(d, run, kept, state.cell));
        const group = grouped(d, kept).find((g) => g.name === state.cell);
        if (group) cellPanel(panel, d, run, group);
        else put(panel);
      };
    },
  }),
};
