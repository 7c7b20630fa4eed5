// The story of one skill, read from top to bottom, before people play.

import { el, put, quote } from "./dom.js";
import { address } from "./state.js";
import { claim, explained, troubles } from "./parts.js";
import { skillPicture } from "./skill.js";
import { probePicture } from "./probe.js";
import { featuresPicture } from "./features.js";
import { graftPicture } from "./graft.js";
import { forgettingPicture } from "./forgetting.js";
import { qualityPicture } from "./quality.js";
import { textAt } from "./source.js";

const PICTURES = { skill: skillPicture, probe: probePicture, features: featuresPicture, graft: graftPicture, forgetting: forgettingPicture, quality: qualityPicture, influence: influencePicture };

/** The first query with its best and worst row. */
function influencePicture(d) {
  const text = (row) => quote(row.text === undefined ? row.id : textAt(row.text));
  if (d.suspects.items.length && !d.queries.length) return el("ol", { class: "rows" }, d.suspects.items.slice(0, 3).map((r) => el("li", null, text(r))));
  const top = d.queries.length ? Object.values(d.tops)[0][0] : null;
  if (!top || !top.rows.length) return null;
  return el("div", { class: "mini" }, el("p", null, el("strong", null, "Query: "), text(d.queries[0])), el("p", null, el("strong", null, "Helped most: "), text(d.train[top.rows[0]])), el("p", null, el("strong", null, top.scores[top.scores.length - 1] < 0 ? "Harmed most: " : "Helped least: "), text(d.train[top.rows[top.rows.length - 1]])));
}

/** The view. */
export const storyView = {
  id: "story",
  title: "Story",
  mount(main, ctx) {
    const { story } = ctx;
    put(main, el("h2", { class: "big", tabindex: "-1" }, story.title), el("p", { class: "lead" }, story.about));
    const chapters = story.steps.map((step, i) => {
      const run = ctx.runs.find((r) => r.key === step.run);
      const body = el("div", { class: "chapter-body" });
      main.append(el("section", { class: "chapter", "aria-label": step.id }, el("p", { class: "number", "aria-hidden": "true" }, String(i + 1)), el("h3", null, step.says || step.id), body));
      return [run, body, step];
    });
    main.append(el("p", { class: "end" }, "Now play: every figure above has a view of its own, where it can be turned, opened and downloaded. ", el("a", { class: "cross", href: address({ view: "runs" }) }, "All runs →")));
    Promise.all(chapters.map(async ([run, body, step]) => {
      if (!run) { put(body, el("p", { class: "faint" }, `The step '${step.id}' has no run yet.`)); return; }
      const d = await ctx.source.detail(run.key);
      const picture = d.problem || !PICTURES[d.view] ? null : PICTURES[d.view](d, run);
      put(body, el("p", null, explained(run)), troubles([...run.problems, ...(d.problem ? [d.problem] : [])]), claim(d.claim), picture, el("p", null, el("a", { class: "cross", href: address({ view: run.view, run: run.key }) }, "Look closer →"), " ", el("code", { class: "faint" }, run.verb)));
    }));
    return () => {};
  },
};
