// Which layers know it: a probe on every layer of every model.

import { add, el, fmt, num, put, signed } from "./dom.js";
import { setState } from "./state.js";
import { heat } from "./heat.js";
import { lines } from "./lines.js";
import { figure } from "./frame.js";
import { caveats, choice, crossLink, overRuns, rowFacts, rowText, scoresOf } from "./parts.js";
import { capital, layerName, metricName, metricTitle } from "./words.js";

const MEASURES = { score: "score", selectivity: "selectivity (score minus control task)", compression: "compression (bits saved, MDL)", difference: "difference to the first model" };

const layersOf = (d) => [...new Set(d.models.flatMap((m) => m.layers.map((l) => l.layer)))].sort((a, b) => a - b);
const at = (m, layer) => m.layers.find((l) => l.layer === layer);

function valueOf(d, what, m, layer) {
  const cell = at(d.models[m], layer);
  if (!cell) return null;
  if (what !== "difference") return cell[what] ?? null;
  const first = at(d.models[0], layer);
  return first && typeof cell.score === "number" ? cell.score - first.score : null;
}

function mapSpec(d, run, what, picked, pick) {
  const layers = layersOf(d);
  const rows = what === "difference" ? d.models.map((_, i) => i).slice(1) : d.models.map((_, i) => i);
  const all = rows.flatMap((m) => layers.map((l) => valueOf(d, what, m, l))).filter((v) => typeof v === "number");
  const most = Math.max(...all.map(Math.abs), 1e-9);
  const diverges = what === "difference" || (what === "selectivity" && Math.min(...all) < 0);
  const tell = (r, c) => {
    const cell = at(d.models[rows[r]], layers[c]) || {};
    const range = typeof cell.low === "number" ? ` (${fmt(cell.low)} to ${fmt(cell.high)})` : "";
    return `${d.models[rows[r]].model}, layer ${layerName(layers[c])}: ${what} ${fmt(valueOf(d, what, rows[r], layers[c]))}${what === "score" ? range : ""}${typeof cell.n === "number" ? `, n = ${fmt(cell.n)}` : ""}`;
  };
  return {
    name: `${run.name}-${what}`, title: capital(what === "score" ? `${metricTitle(d.metric)} by model and layer` : `${MEASURES[what]} by model and layer`), height: 60 + 34 * rows.length,
    hint: "Choose a cell for the rows that this layer is the first to solve. A dot marks the layer that stands for the model.",
    draw: (w, say) => heat(w, {
      rows: rows.map((m) => d.models[m].model), columns: layers.map(layerName), columnTitle: "layer", value: (r, c) => valueOf(d, what, rows[r], layers[c]),
      text: diverges ? (v) => signed(Number(v.toFixed(2))) : (v) => (Math.abs(v) < 10 ? v.toFixed(2) : fmt(v)), tell, tone: diverges ? "diverging" : "sequential",
      range: diverges ? [-most, most] : [Math.min(...all), Math.max(...all)], star: (r, c) => d.models[rows[r]].best_layer === layers[c],
      picked: picked && { r: rows.indexOf(picked.m), c: layers.indexOf(picked.layer) }, pick: (r, c) => pick(rows[r], layers[c]), name: `${what} by model and layer`,
    }, say),
    table: { columns: [{ key: "model", label: "model" }, { key: "layer", label: "layer" }, { key: "value", label: what }, { key: "low", label: "low" }, { key: "high", label: "high" }],
      rows: rows.flatMap((m) => layers.map((l) => ({ model: d.models[m].model, layer: layerName(l), value: valueOf(d, what, m, l), low: at(d.models[m], l)?.low, high: at(d.models[m], l)?.high }))) },
  };
}

function linesSpec(d, run) {
  const series = d.models.map((m) => ({ name: m.model, points: m.layers.map((l) => ({ x: l.layer, y: l.score, low: l.low, high: l.high })) }));
  const sameScale = (l) => typeof l.selectivity === "number" && (l.score <= 1 || (l.control ?? 0) > 1); // spans are scored in percent
  const controls = d.models.filter((m) => m.layers.some(sameScale));
  for (const m of controls.slice(0, 2)) series.push({ name: `${m.model}: control task`, quiet: true, points: m.layers.map((l) => ({ x: l.layer, y: l.control ?? (typeof l.selectivity === "number" ? l.score - l.selectivity : null) })) });
  if (Array.isArray(d.baselines.random_encoder)) series.push({ name: "random encoder", quiet: true, points: d.baselines.random_encoder.map((y, i) => ({ x: d.models[0]?.layers[i]?.layer ?? i, y: typeof y === "object" && y ? y.score : y })) });
  const rules = ["majority", "never_answering", "bag_of_words"].map((k) => ({ name: metricName(k), y: d.baselines[k] }));
  return {
    name: `${run.name}-lines`, title: capital(`${metricName(d.metric)} from the embeddings to the last layer`), height: 300, note: "Bands are intervals over seeds or rows. Flat lines and the random encoder: what needs no knowledge of the language.",
    draw: (w, say) => lines(w, { series, rules, height: 300, x: { label: "layer", text: layerName, ticks: layersOf(d) }, y: { label: metricTitle(d.metric) }, name: "Score by layer" }, say),
    table: { columns: [{ key: "name", label: "line" }, { key: "x", label: "layer" }, { key: "y", label: metricName(d.metric) }, { key: "low", label: "low" }, { key: "high", label: "high" }], rows: series.flatMap((s) => s.points.map((p) => ({ name: s.name, ...p, x: layerName(p.x) }))) },
  };
}

function cellPanel(box, d, run, ctx, m, layer) {
  const model = d.models[m];
  const cell = at(model, layer) || {};
  const solved = ((d.solved || {})[String(m)] || {})[String(layer)];
  const parts = ["score", "low", "high", "selectivity", "compression"].filter((k) => typeof cell[k] === "number").map((k) => [`${k} `, num(cell[k]), " "]);
  const has = scoresOf(ctx, run, m).found;
  put(box, el("h3", null, `${model.model}, layer ${layerName(layer)}`), el("p", null, parts),
    has && layer > 0 ? el("p", null, crossLink("Influence counted in this layer alone", { view: "influence", run: has.key, layers: String(layer) })) : null,
    solved ? [el("p", null, num(solved.new), ` rows are solved here and not a layer earlier; ${fmt(solved.lost)} were solved there and not here.`), el("ol", { class: "rows" }, solved.items.map((r) => el("li", null, rowText(r), rowFacts(r))))]
      : el("p", { class: "faint" }, layer === 0 ? "There is no layer below the embeddings." : "This run kept no answers by layer, so rows cannot be listed."));
}

/** The main picture, for the story. */
export function probePicture(d, run) {
  return figure(d.models.length > 1 ? mapSpec(d, run, "score", null, () => {}) : linesSpec(d, run));
}

/** The view. */
export const probeView = {
  id: "probe",
  title: "Probe map",
  mount: (main, ctx) => overRuns(main, ctx, {
    id: "probe", title: "Probe map", lead: "Which layers know it?", make: "budwood probe tiny-bert --task tiny-tags", reset: { m: "", layer: "" },
    build(body, d, run, ctx) {
      const known = Object.entries(MEASURES).filter(([k]) => (k === "difference" ? d.models.length > 1 : d.models.some((m) => m.layers.some((l) => typeof l[k] === "number"))));
      const holder = el("div", { class: "controls" });
      const panel = el("section", { class: "panel", "aria-live": "polite" });
      const pick = (m, layer) => setState({ m: String(m), layer: String(layer) });
      const map = figure(mapSpec(d, run, "score", null, pick));
      add(body, holder, map, panel, figure(linesSpec(d, run)), caveats(
        "A probe is a small classifier on frozen states. That it succeeds says the information is there, not that the model uses it.",
        "Selectivity is the score minus that of a control task with random labels per word type or row; compression is from description length (MDL): both guard against a probe that memorises.",
        "Layers are numbered as in all views: emb is the embeddings, 1 the first block (block 0 in files and options)."));
      let was = "";
      return (state) => {
        const what = known.some(([k]) => k === state.what) ? state.what : "score";
        const now = [what, state.m, state.layer].join();
        if (now === was) return;
        was = now;
        const picked = state.layer !== undefined && state.layer !== "" ? { m: Number(state.m || 0), layer: Number(state.layer) } : null;
        put(holder, known.length > 1 ? choice("Show", known, what, (v) => setState({ what: v })) : null);
        map.update(mapSpec(d, run, what, picked, pick));
        if (picked && d.models[picked.m]) cellPanel(panel, d, run, ctx, picked.m, picked.layer);
        else put(panel);
      };
    },
  }),
};
