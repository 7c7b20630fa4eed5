// How much is already in the frozen features: feature x prompt, with the lines it has to be read against.

import { add, el, fmt } from "./dom.js";
import { bars } from "./bars.js";
import { heat } from "./heat.js";
import { figure, table } from "./frame.js";
import { caveats, overRuns } from "./parts.js";
import { metricName, metricTitle } from "./words.js";

const promptName = (p) => (p === true ? "prompt" : !p || p === "none" ? "no prompt" : String(p));

/** A line's name: zero-shot answers here are those of the label words, of a model that is never trained. */
const lineName = (key) => (key === "zero_shot" ? "label words, no training" : metricName(key));

function flatLines(baselines) {
  return Object.entries(baselines).map(([k, v]) => [lineName(k), typeof v === "number" ? v : v && typeof v === "object" ? v.test ?? v.score : null]).filter(([, v]) => typeof v === "number");
}

function barsSpec(d, run) {
  const prompts = [...new Set(d.results.map((r) => promptName(r.prompt)))];
  const items = d.results.map((r) => ({ name: `${r.features} · ${promptName(r.prompt)}`, value: r.test, low: r.low, high: r.high, colour: prompts.indexOf(promptName(r.prompt)), tell: `${r.features}, ${promptName(r.prompt)}: test ${fmt(r.test)}, train ${fmt(r.train)}, ${fmt(r.dims)} dimensions, C ${fmt(r.C)}` }));
  const rules = flatLines(d.baselines).map(([name, x]) => ({ name, x }));
  return {
    name: `${run.name}-features`, title: `Test ${metricName(d.metric)} of a linear classifier on frozen features`, height: 60 + 28 * items.length + 14 * rules.length, hint: "Point at a bar for its training score and size.",
    draw: (w, say) => bars(w, { items, rules, unit: metricTitle(d.metric), domain: [0, 1], name: "Frozen features" }, say),
    table: { columns: ["features", "prompt", "train", "test", "low", "high", "dims", "C"].filter((k) => d.results.some((r) => r[k] !== undefined)).map((key) => ({ key, label: { dims: "dimensions", C: "C (1 / penalty)" }[key] || key })), rows: d.results.map((r) => ({ ...r, prompt: promptName(r.prompt) })) },
  };
}

function gridSpec(d, run) {
  const features = [...new Set(d.results.map((r) => r.features))];
  const prompts = [...new Set(d.results.map((r) => promptName(r.prompt)))];
  const find = (r, c) => d.results.find((x) => x.features === features[r] && promptName(x.prompt) === prompts[c]);
  const all = d.results.map((r) => r.test).filter((v) => typeof v === "number");
  return {
    name: `${run.name}-grid`, title: "Feature by prompt", height: 40 + 34 * features.length,
    draw: (w, say) => heat(Math.min(w, 520), { rows: features, columns: prompts, value: (r, c) => find(r, c)?.test ?? null, text: (v) => v.toFixed(3), range: [Math.min(...all), Math.max(...all)], least: 70, name: "Feature by prompt" }, say),
    table: { columns: [{ key: "features", label: "features" }, ...prompts.map((p) => ({ key: p, label: p }))], rows: features.map((f, r) => ({ features: f, ...Object.fromEntries(prompts.map((p, c) => [p, find(r, c)?.test])) })) },
  };
}

/** The main picture, for the story. */
export function featuresPicture(d, run) {
  return figure(barsSpec(d, run));
}

/** The view. */
export const featuresView = {
  id: "features",
  title: "Frozen features",
  mount: (main, ctx) => overRuns(main, ctx, {
    id: "features", title: "Frozen features", lead: "How much is there before any weight moves?", make: "budwood linear tiny-bert --task tiny-sentiment", reset: {},
    build(body, d, run) {
      if (!d.results.length) return;
      const prompts = new Set(d.results.map((r) => promptName(r.prompt)));
      const lines = flatLines(d.baselines);
      add(body, figure(barsSpec(d, run)), prompts.size > 1 ? figure(gridSpec(d, run)) : null,
        lines.length ? el("h3", null, "Lines to read it against") : "", lines.length ? table({ columns: [{ key: "name", label: "what" }, { key: "value", label: metricName(d.metric) }], rows: lines.map(([name, value]) => ({ name, value })) }) : "",
        caveats("f is the state the model would predict from; Φp and subset are what its words' probabilities say of it; p is the whole distribution. Each is given to the same regularised logistic regression.", "C is chosen on rows of the training split."));
    },
  }),
};
