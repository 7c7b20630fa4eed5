// Which weights hold it: where a graft lies, how few suffice, what it does to calibration, what grafts share.

import { add, el, fmt, num, pct, put } from "./dom.js";
import { setState } from "./state.js";
import { bars } from "./bars.js";
import { heat } from "./heat.js";
import { lines } from "./lines.js";
import { figure, table } from "./frame.js";
import { caveats, choice, crossLink, facts, overRuns, scoresOf, scoring } from "./parts.js";
import { blockName, metricName } from "./words.js";

const TUNED = 1; // graft learn BASE TUNED
const byNumber = (a, b) => String(a).localeCompare(String(b), "en", { numeric: true });

function mapSpec(d, run, what, mass) {
  const layers = [...new Set(d.map.map((c) => String(c.layer)))].sort(byNumber);
  const modules = [...new Set(d.map.map((c) => String(c.module)))];
  const find = (r, c) => d.map.find((x) => String(x.layer) === layers[r] && String(x.module) === modules[c]);
  const log = what === "density";
  const raw = (r, c) => find(r, c)?.[what] ?? null;
  const value = (r, c) => { const v = raw(r, c); return v === null ? null : log ? (v > 0 ? Math.log10(v) : null) : v; };
  const all = layers.flatMap((_, r) => modules.map((_, c) => value(r, c))).filter((v) => v !== null);
  const low = Math.min(...all);
  const side = mass && { name: "Fisher", value: (r) => mass[layers[r]] ?? mass[`block.${layers[r]}`] ?? mass[Number(layers[r])] ?? null, most: Math.max(...Object.values(mass)) };
  return {
    name: `${run.name}-map`, title: log ? "Share of each tensor that is in the graft" : "Where the graft's weights lie", height: 70 + 34 * layers.length,
    note: log ? "Logarithmic colours." : `Share of the graft in percent.${mass ? " Grey bars: Fisher information by layer." : ""}`,
    draw: (w, say) => heat(w, { rows: layers.map(blockName), columns: modules, value, text: (v) => (log ? pct(10 ** v).replace(" %", "") : fmt(Number((100 * v).toPrecision(2)))),
      tell: (r, c) => { const x = find(r, c); return x ? `${blockName(layers[r])}, ${modules[c]}: ${fmt(x.weights)} weights, ${pct(x.share)} of the graft, ${pct(x.density)} of the tensor` : `${blockName(layers[r])}, ${modules[c]}: none`; },
      range: [log ? low - 0.4 : 0, Math.max(...all)], side, least: 40, name: "Graft by layer and module" }, say),
    table: { columns: [["layer", "layer"], ["module", "module"], ["weights", "weights"], ["share", "share of the graft"], ["of", "weights of the tensor"], ["density", "share of the tensor"]].map(([key, label]) => ({ key, label })), rows: d.map.map((c) => ({ ...c, layer: blockName(c.layer) })) },
  };
}

function curveSpec(d, run, fraction) {
  const rules = [...new Set(d.curve.map((r) => r.select))];
  const series = rules.map((name) => ({ name, quiet: name === "random", points: d.curve.filter((r) => r.select === name).map((r) => ({ x: r.fraction, y: r.recovered })) }));
  return {
    name: `${run.name}-curve`, title: "How few weights suffice", height: 280, note: "Share of the gain from tuning that comes back, by share of the weights and rule of choosing them.",
    draw: (w, say) => lines(w, { series, at: fraction, pick: (x) => setState({ size: String(x) }), rules: [{ y: 0.95, left: true, text: "95 % of the gain" }], x: { label: "share of the weights", log: true, text: pct }, y: { label: "share of the gain" }, height: 280, name: "Recovery by size" }, say),
    table: { columns: ["select", "fraction", "size", "score", "recovered", "ece"].filter((k) => d.curve.some((r) => r[k] !== undefined)).map((key) => ({ key, label: { select: "chosen by", size: "weights", score: metricName(d.metric) }[key] || metricName(key), raw: key })), rows: d.curve },
  };
}

/** A slider over the measured sizes, and what each rule recovers at the chosen one. */
function sizes(d, run, chart) {
  const all = [...new Set(d.curve.map((r) => r.fraction))].sort((a, b) => a - b);
  const told = el("div", { class: "atsize", "aria-live": "polite" });
  const slider = el("input", { type: "range", min: 0, max: all.length - 1, step: 1, "aria-label": "share of the weights", input: () => setState({ size: String(all[slider.value]) }) });
  const update = (state) => {
    const wish = Number(state.size) || d.fraction || all[0];
    const near = all.reduce((best, v, i) => (Math.abs(Math.log(v / wish)) < Math.abs(Math.log(all[best] / wish)) ? i : best), 0);
    slider.value = String(near);
    slider.setAttribute("aria-valuetext", pct(all[near]));
    const rows = d.curve.filter((r) => r.fraction === all[near]).sort((a, b) => (b.recovered ?? -9) - (a.recovered ?? -9));
    put(told, el("p", null, "With ", el("strong", null, pct(all[near])), " of the weights: ", rows.map((r, i) => [i ? ", " : "", `${r.select} `, num(r.recovered, pct(r.recovered)), " (score ", num(r.score), ")"]), "."));
    chart.update(curveSpec(d, run, all[near]));
  };
  return { node: el("div", { class: "sizes" }, el("label", { class: "control wide" }, el("span", null, "Size"), slider), told), update };
}

/** Scores and calibration of base, tuned and graft, raw and at a fitted temperature; all that a graft can carry, where more moved. */
function states(d, run) {
  const rows = ["base", "tuned", "all_graftable", "graft"].filter((k) => d[k]).map((k) => ({ name: k.replace("_", " "), ...d[k] }));
  const columns = [["name", "model"], ["score", metricName(d.metric)], ["ece", "calibration error"], ["temperature", "temperature"], ["ece_scaled", "calibration error at it"]]
    .filter(([k]) => rows.some((r) => typeof r[k] === "number") || k === "name").map(([key, label]) => ({ key, label }));
  const reasons = [...new Set(rows.map((r) => r.temperature_why).filter(Boolean))];
  const why = reasons.map((w) => `${rows.filter((r) => r.temperature_why === w).map((r) => r.name).join(" and ")}: ${w}`);
  const worse = rows.filter((r) => typeof r.ece_scaled === "number" && r.ece_scaled > r.ece).map((r) => r.name);
  const fitted = rows.find((r) => r.temperature_rows)?.temperature_rows;
  return [figure({
    name: `${run.name}-calibration`, title: "Calibration before and after", height: 130, note: "Calibration error (ECE): lower is better.",
    draw: (w, say) => bars(w, { items: rows.map((r, i) => ({ name: r.name, value: r.ece, colour: i })), unit: "calibration error (lower is better)", name: "Calibration error" }, say),
    table: { columns, rows },
  }), table({ columns, rows }),
  fitted ? el("p", { class: "note" }, `Temperatures are fitted on ${fmt(fitted)} rows that are not the reported ones.`) : "",
  why.length ? el("p", { class: "note" }, `No temperature for ${why.join("; ")}.`) : "",
  worse.length ? el("p", { class: "note" }, `Scaling does not help ${worse.join(" and ")}: the rows that the temperature was fitted on may be easier or harder than the reported ones.`) : ""];
}

/** A square matrix with names, e.g. of overlaps. */
export function matrixFigure(m, run) {
  const all = m.values.flat().filter((v) => typeof v === "number");
  const negative = Math.min(...all) < 0;
  const most = Math.max(...all.map(Math.abs));
  return figure({
    name: `${run.name}-${m.name.replaceAll(" ", "-")}`, title: m.name[0].toUpperCase() + m.name.slice(1), height: 60 + 34 * m.names.length,
    draw: (w, say) => heat(Math.min(w, 110 + 92 * m.names.length), { rows: m.names, columns: m.names, value: (r, c) => m.values[r][c], text: (v) => v.toFixed(2), range: negative ? [-most, most] : [0, most], tone: negative ? "diverging" : "sequential", name: m.name }, say),
    table: { columns: [{ key: "name", label: "" }, ...m.names.map((n, i) => ({ key: String(i), label: n }))], rows: m.values.map((row, r) => ({ name: m.names[r], ...Object.fromEntries(row.map((v, i) => [i, v])) })) },
  });
}

function massFigure(d, run) {
  const items = Object.entries(d.by_layer).map(([k, v]) => ({ name: blockName(k), value: v, tell: `${blockName(k)}: ${fmt(v)}` }));
  return figure({
    name: `${run.name}-fisher`, title: "Fisher information by layer", height: 50 + 28 * items.length,
    draw: (w, say) => bars(w, { items, unit: "sum over the layer's weights", name: "Fisher information by layer" }, say),
    table: { columns: [{ key: "name", label: "layer" }, { key: "value", label: "mass" }], rows: items },
  });
}

/** Shares by layer of several tasks side by side. */
function massesFigure(d, run) {
  const names = Object.keys(d.masses);
  const layers = [...new Set(names.flatMap((n) => Object.keys(d.masses[n])))];
  const value = (r, c) => d.masses[names[c]][layers[r]] ?? null;
  const all = layers.flatMap((_, r) => names.map((_, c) => value(r, c))).filter((v) => v !== null);
  return figure({
    name: `${run.name}-masses`, title: "Share of the Fisher information by layer", height: 60 + 34 * layers.length,
    draw: (w, say) => heat(Math.min(w, 140 + 92 * names.length), { rows: layers.map(blockName), columns: names, value, text: (v) => v.toFixed(3), range: [0, Math.max(...all)], name: "Fisher information by layer and task" }, say),
    table: { columns: [{ key: "layer", label: "layer" }, ...names.map((n) => ({ key: n, label: n }))], rows: layers.map((l, r) => ({ layer: blockName(l), ...Object.fromEntries(names.map((n, c) => [n, value(r, c)])) })) },
  });
}

/** Layers that together hold most of a graft. */
function heavyLayers(map, share = 0.8) {
  const by = {};
  for (const c of map) if (/^\d+$/.test(String(c.layer))) by[c.layer] = (by[c.layer] || 0) + c.share;
  const total = Object.values(by).reduce((a, b) => a + b, 0);
  const out = [];
  let sum = 0;
  for (const [layer, s] of Object.entries(by).sort((a, b) => b[1] - a[1])) { if (sum >= share * total) break; out.push(Number(layer) + 1); sum += s; }
  return out.sort((a, b) => a - b);
}

/** The main picture, for the story. */
export function graftPicture(d, run) {
  if (d.curve && d.curve.length) return figure(curveSpec(d, run, d.fraction));
  if (d.map && d.map.length) return figure(mapSpec(d, run, "share", null));
  return d.by_layer ? massFigure(d, run) : null;
}

/** The share of the gain, or that the gain is too small to have shares. */
function recoveredText(d) {
  if (d.recovery && !d.recovery.clear) return "gain too small to split";
  const range = d.recovery && typeof d.recovery.low === "number" ? ` (${pct(Number(d.recovery.low.toFixed(2)))} to ${pct(Number(d.recovery.high.toFixed(2)))})` : "";
  return el("span", null, num(d.recovered, pct(d.recovered)), range);
}

/** The way to the rows behind a graft: scores of the model that it was cut from, or why there are none. */
function behind(d, run, ctx) {
  const { found, all } = scoresOf(ctx, run, TUNED);
  const heavy = heavyLayers(d.map);
  if (!found) {
    const told = el("p", { class: "note" });
    const other = all.length ? ` (${all[0].name} scored ${all[0].models[0] || "another model"})` : "";
    scoring(ctx, run, TUNED).then((command) => put(told, `Which rows wrote these weights? No run here has scored ${run.models[TUNED] || "the tuned model"}, the model that this graft was cut from${other}. Make one: `, el("code", null, command)));
    return told;
  }
  if (ctx.source.live) return el("p", null, crossLink("Influence counted in this graft's weights alone", { view: "influence", run: found.key, graft: run.key }));
  return el("p", null, crossLink(`Influence counted in the layers that hold most of it (${heavy.join(", ")})`, { view: "influence", run: found.key, layers: heavy.join(",") }), el("br"), el("span", { class: "note" }, "The link counts whole layers. In this graft's weights alone: ", el("code", null, `budwood influence show ${found.place} --query 0 --graft ${run.place}/${d.file || "NAME.graft"}`)));
}

function buildGraft(body, d, run, ctx) {
  const follow = [];
  if (d.fraction !== null && d.fraction !== undefined) add(body, facts([["weights", d.size], ["share", num(d.fraction, pct(d.fraction))], ["chosen by", d.select], ["gain recovered", recoveredText(d)], ["agrees with tuned", d.agreement === null || d.agreement === undefined ? null : num(d.agreement, pct(d.agreement))], ["file", d.bytes ? `${fmt(Math.round(d.bytes / 102.4) / 10)} kB` : null]]));
  if (d.map.length) {
    const holder = el("div", { class: "controls" });
    const fishers = ctx.runs.filter((r) => r.verb === "fisher" && r.status === "done");
    const chart = figure(mapSpec(d, run, "share", null));
    add(body, holder, chart, behind(d, run, ctx));
    let was = null;
    follow.push(async (state) => {
      const now = `${state.map}|${state.fisher}`;
      if (now === was) return;
      was = now;
      put(holder, choice("Colours", [["share", "share of the graft"], ["density", "share of each tensor"]], state.map || "share", (v) => setState({ map: v })),
        fishers.length ? choice("Beside it", [["", "nothing"], ...fishers.map((r) => [r.key, `Fisher of ${r.task}: ${r.name}`])], state.fisher || "", (v) => setState({ fisher: v })) : null);
      const mass = state.fisher ? (await ctx.source.detail(state.fisher)).by_layer : null;
      chart.update(mapSpec(d, run, state.map || "share", mass));
    });
  }
  if (d.curve && d.curve.length) {
    const chart = figure(curveSpec(d, run, d.fraction));
    const s = sizes(d, run, chart);
    const small = d.recovery && !d.recovery.clear;
    add(body, small ? el("p", { class: "trouble" }, `The gain is ${fmt(d.recovery.rows)} rows and too small to split: the shares below are mostly chance.`) : d.answer ? el("p", { class: "claim small" }, d.answer) : "", s.node, chart);
    let was = null;
    follow.push((state) => { if (state.size !== was) { was = state.size; s.update(state); } });
  }
  if (d.base && typeof d.base.ece === "number") add(body, ...states(d, run));
  return (state) => follow.forEach((f) => f(state));
}

/** The view. */
export const graftView = {
  id: "graft",
  title: "Graft map",
  mount: (main, ctx) => overRuns(main, ctx, {
    id: "graft", title: "Graft map", lead: "Which weights hold it, and how few suffice?", make: "budwood graft learn tiny-bert RUN --task tiny-sentiment --size 0.1% --curve", prefer: (r) => r.verb === "graft learn", reset: { size: "" },
    build(body, d, run, ctx) {
      const follow = d.by_layer === undefined ? buildGraft(body, d, run, ctx) : () => {};
      if (d.by_layer && Object.keys(d.by_layer).length) add(body, massFigure(d, run));
      if (d.masses && Object.keys(d.masses).length) add(body, massesFigure(d, run));
      if (d.overlap && d.overlap.length) add(body, el("h3", null, "Weights that matter most to both, against chance"), table({ columns: Object.keys(d.overlap[0]).map((key) => ({ key, label: key.replaceAll("_", " ") })), rows: d.overlap.map((r) => ({ ...r, layer: blockName(r.layer) })) }));
      (d.matrices || []).forEach((m) => add(body, matrixFigure(m, run)));
      add(body, caveats("A graft takes the tuned value of a few weights and leaves all others as they were. Recovery is (graft − base) / (tuned − base) on rows that no choice was made on.", "Random weights of the same number are the line to beat; plain movement |Δ| often comes close to a learned mask, and where it wins the curve shows it."));
      return follow;
    },
  }),
};
