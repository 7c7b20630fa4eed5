// Can the scores be trusted: what retraining without rows says of them.

import { add, el, fmt } from "./dom.js";
import { bars } from "./bars.js";
import { lines } from "./lines.js";
import { points } from "./points.js";
import { figure, table } from "./frame.js";
import { caveats, overRuns } from "./parts.js";
import { capital, metricName, metricTitle, scoresName } from "./words.js";

const MEASURES = [["lds", "rank correlation with retraining (LDS)"], ["auc", "area under the curve (AUC) of finding planted labels"], ["recall", "recall"], ["found_in_top_20", "share of the planted labels found in the most suspicious 20 % of the rows"]];

const named = (r) => (r.scores === undefined ? r : { ...r, scores: scoresName(r.scores) });

function barSpec(d, run, key, about) {
  const items = d.results.filter((r) => typeof r[key] === "number").map((r) => ({ name: scoresName(r.scores ?? r.name ?? "?"), value: r[key], low: key === "lds" || key === "auc" ? r.low ?? null : null, high: key === "lds" || key === "auc" ? r.high ?? null : null, soft: /bf16|fp16|half/.test(String(r.scores)) }));
  const rules = [["ceiling", "ceiling"], ["random", "chance"]].map(([k, name]) => ({ name, x: typeof d[k] === "number" ? d[k] : d[k]?.[key] ?? d[k]?.lds })).filter((r) => key === "lds" || r.name === "chance");
  return {
    name: `${run.name}-${key}`, title: capital(about), height: 70 + 28 * items.length, note: [items.some((i) => typeof i.low === "number") ? "Lines are 95 % intervals over resampled queries." : "", items.some((i) => i.soft) ? "Paler: half precision." : ""].join(" ").trim(),
    draw: (w, say) => bars(w, { items, rules, unit: metricTitle(key), name: about }, say),
    table: { columns: Object.keys(d.results[0]).filter((k) => typeof d.results[0][k] !== "object").map((k) => ({ key: k, label: metricName(k), raw: k })), rows: d.results.map(named) },
  };
}

/** Flipped answers against rows removed, a line per kind of scores. */
function flipSpec(d, run) {
  const names = [...new Set(d.results.map((r) => String(r.scores)))];
  const series = names.map((name) => ({ name: scoresName(name), quiet: /random/.test(name), points: d.results.filter((r) => String(r.scores) === name).map((r) => ({ x: r.k, y: r.flipped / (r.targets || 1), low: r.low, high: r.high })) }));
  return {
    name: `${run.name}-flips`, title: "Answers that change when rows are removed", height: 280, note: "Share of the targets whose answer flips after retraining without the rows that are named.",
    draw: (w, say) => lines(w, { series, x: { label: "rows removed", ticks: [...new Set(d.results.map((r) => r.k))] }, y: { label: "share of targets flipped" }, height: 280, name: "Counterfactual removal" }, say),
    table: { columns: [["scores", "scores"], ["k", "rows removed"], ["flipped", "answers flipped"], ["targets", "targets"]].map(([key, label]) => ({ key, label })), rows: d.results },
  };
}

/** A curve of the run's figures, whatever its columns: names, then x, then y. */
function curveSpec(name, rows, run) {
  const keys = Object.keys(rows[0]);
  const words = keys.filter((k) => typeof rows[0][k] === "string");
  const numbers = keys.filter((k) => typeof rows[0][k] === "number");
  const columns = keys.map((key) => ({ key, label: metricName(key), raw: key }));
  if (numbers.length < 2) return null;
  const group = words[0];
  const [x, y] = /predicted|measured|scatter/.test(keys.join()) && keys.includes("predicted") ? ["predicted", "measured"] : numbers;
  const groups = group ? [...new Set(rows.map((r) => r[group]))] : [name];
  const spec = { name: `${run.name}-${name}`, title: name === "detection" ? "Planted labels found by rows looked at" : capital(name.replaceAll(/[-_]/g, " ")), height: 300, table: { columns, rows } };
  if (x === "predicted") return { ...spec, draw: (w, say) => points(w, { groups, small: true, points: rows.map((r) => ({ x: r[x], y: r[y], group: group ? r[group] : name, tell: columns.map((c) => `${c.label} ${fmt(r[c.key])}`).join(", ") })), x, y, name }, say) };
  const band = keys.includes("low") && keys.includes("high");
  if (!group && numbers.length > 2 && !band) {
    const wide = numbers.slice(1).map((k) => ({ name: scoresName(k), quiet: /random|chance/.test(k), points: rows.filter((r) => typeof r[x] === "number").map((r) => ({ x: r[x], y: r[k] })) }));
    return { ...spec, draw: (w, say) => lines(w, { series: wide, x: { label: metricName(x) }, y: { label: name === "detection" ? "share found" : "" }, height: 300, name }, say) };
  }
  return { ...spec, draw: (w, say) => lines(w, { series: groups.map((g) => ({ name: scoresName(g), quiet: /random|chance/.test(String(g)), points: rows.filter((r) => !group || r[group] === g).map((r) => ({ x: r[x], y: r[y], ...(band ? { low: r.low, high: r.high } : {}) })) })), x: { label: metricName(x) }, y: { label: metricName(y) }, height: 300, name }, say) };
}

function pictures(d, run) {
  const out = [];
  const results = d.results || [];
  for (const [key, about] of MEASURES) if (results.some((r) => typeof r[key] === "number")) out.push(barSpec(d, run, key, about));
  if (results.some((r) => typeof r.flipped === "number")) out.push(flipSpec(d, run));
  return out;
}

/** The main picture, for the story. */
export function qualityPicture(d, run) {
  const [first] = pictures(d, run);
  return first ? figure(first) : null;
}

/** The view. */
export const qualityView = {
  id: "quality",
  title: "Attribution quality",
  mount: (main, ctx) => overRuns(main, ctx, {
    id: "quality", title: "Attribution quality", lead: "Do the scores say what retraining says?", make: "budwood validate lds RUN --scores SCORES", prefer: (r) => r.verb === "validate lds", reset: {},
    build(body, d, run) {
      const p = d.progress || {};
      if (p.stage) add(body, el("p", { class: "live" }, `${p.stage}: ${fmt(p.done)} of ${fmt(p.total)} retrained `, el("progress", { value: p.done, max: p.total || 1 })));
      const counts = [["subsets", "subsets"], ["seeds", "seeds"], ["targets", "targets"], ["planted", "planted wrong labels"]].map(([k, n]) => [n, Array.isArray(d[k]) ? d[k].length : d[k]]).filter(([, v]) => typeof v === "number");
      if (counts.length) add(body, el("p", { class: "note" }, counts.map(([n, v]) => `${fmt(v)} ${n}`).join(", "), "."));
      pictures(d, run).forEach((s) => add(body, figure(s)));
      for (const [name, rows] of Object.entries(d.curves || {}).filter(([k]) => k !== "lds" && k !== "flips")) { const s = rows.length ? curveSpec(name, rows, run) : null; if (s) add(body, figure(s)); }
      if ((d.results || []).length) add(body, el("h3", null, "All results"), table({ columns: [...new Set(d.results.flatMap((r) => Object.keys(r)))].filter((k) => d.results.every((r) => typeof r[k] !== "object" || r[k] === null)).map((key) => ({ key, label: metricName(key) })), rows: d.results.map(named) }));
      add(body, caveats("LDS: models are retrained on random halves of the rows; the sum of a query's scores over a half should rank those halves as the retrained models do. The ceiling is what a second set of retrained models reaches.", "Random rows are the line to beat in removals; the loss and confident learning in finding wrong labels."));
    },
  }),
};
