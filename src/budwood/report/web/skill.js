// A fine-tuned or evaluated model: score beside trivial answers, loss, calibration, the rows it gets most wrong.

import { add, el, fmt, num } from "./dom.js";
import { bars } from "./bars.js";
import { lines } from "./lines.js";
import { figure } from "./frame.js";
import { caveats, overRuns, rowFacts, rowText } from "./parts.js";
import { capital, metricName, metricTitle } from "./words.js";

/** Score and baselines. */
function scores(d, run) {
  const [low, high] = d.interval || [];
  const items = [{ name: run.models.join(" ") || run.name, value: d.score, low, high }, ...Object.entries(d.baselines).map(([k, v]) => ({ name: metricName(k), value: v, quiet: true }))];
  return figure({
    name: `${run.name}-score`, title: capital(`${metricName(d.metric)} on ${run.task}`), height: 40 + 28 * items.length,
    draw: (w, say) => bars(w, { items, unit: metricTitle(d.metric), domain: Math.max(...items.map((i) => i.value || 0)) <= 1 ? [0, 1] : undefined, name: `Score of ${run.name}` }, say),
    table: { columns: [{ key: "name", label: "what" }, { key: "value", label: metricName(d.metric) }, { key: "low", label: "low" }, { key: "high", label: "high" }], rows: items },
  });
}

function curve(d, run) {
  const series = [{ name: "loss", points: d.loss.map((p) => ({ x: p.step, y: p.loss })) }];
  return figure({
    name: `${run.name}-loss`, title: "Loss while training", height: 260, note: "Mean loss of the updates since the point before.",
    draw: (w, say) => lines(w, { series, x: { label: "update" }, y: { label: "loss" }, name: `Loss of ${run.name}` }, say),
    table: { columns: Object.keys(d.loss[0]).map((key) => ({ key, label: key.replaceAll("_", " ") })), rows: d.loss },
  });
}

function calibration(d, run) {
  const held = d.calibration.filter((b) => b.n > 0);
  const series = [
    { name: "accuracy", points: held.map((b) => ({ x: b.confidence, y: b.accuracy })) },
    { name: "perfectly calibrated", quiet: true, points: [{ x: Math.min(...held.map((b) => b.confidence)), y: Math.min(...held.map((b) => b.confidence)) }, { x: 1, y: 1 }] },
  ];
  return figure({
    name: `${run.name}-calibration`, title: `Calibration: error ${fmt(d.ece)}`, height: 260, note: "When the model is this sure, how often is it right? Fifteen bins of confidence.",
    draw: (w, say) => lines(w, { series, x: { label: "confidence" }, y: { label: "accuracy", domain: [0, 1] }, name: `Calibration of ${run.name}` }, say),
    table: { columns: Object.keys(d.calibration[0]).map((key) => ({ key, label: key })), rows: d.calibration },
  });
}

/** The main picture, for the story. */
export function skillPicture(d, run) {
  return scores(d, run);
}

/** The view. */
export const skillView = {
  id: "skill",
  title: "Skill",
  mount: (main, ctx) => overRuns(main, ctx, {
    id: "skill", title: "Skill", lead: "How well is it done, next to what needs no learning?", make: "budwood finetune tiny-bert --task tiny-sentiment", reset: {},
    build(body, d, run) {
      add(body, scores(d, run), el("div", { class: "pair-of" }, d.loss.length ? curve(d, run) : null, d.calibration.length ? calibration(d, run) : null));
      if (d.rows.items.length) add(body, el("h3", null, `The ${d.rows.items.length} rows with the highest loss, of ${fmt(d.rows.of)}`), d.rows.missing ? el("p", { class: "faint" }, `Texts are not at hand: ${d.rows.missing}`) : null,
        el("ol", { class: "rows" }, d.rows.items.map((r) => el("li", null, rowText(r), rowFacts(r), el("span", { class: "faint" }, "loss ", num(r.loss))))));
      add(body, caveats("The interval is a 95 % Wilson interval over rows; it does not speak of other seeds. Use --seeds for those.", "Calibration error is the mean gap between confidence and accuracy, weighted by rows."));
    },
  }),
};
