// The page: which views there are, which one is shown, and what keeps it fresh.

import { el, put } from "./dom.js";
import { address, readState } from "./state.js";
import { theme } from "./colour.js";
import { openSource } from "./source.js";
import { setWords } from "./words.js";
import { redrawAll } from "./frame.js";
import { runsView } from "./runs.js";
import { skillView } from "./skill.js";
import { probeView } from "./probe.js";
import { featuresView } from "./features.js";
import { graftView } from "./graft.js";
import { influenceView } from "./influence.js";
import { forgettingView } from "./forgetting.js";
import { qualityView } from "./quality.js";
import { storyView } from "./story.js";

const ALL = [storyView, runsView, skillView, probeView, featuresView, graftView, influenceView, forgettingView, qualityView];
const EVERY = 2000; // milliseconds between looks at running jobs

function themeButton() {
  const button = el("button", { type: "button", class: "tool", click: () => {
    document.documentElement.dataset.theme = theme() === "dark" ? "light" : "dark";
    name();
    redrawAll();
    dispatchEvent(new HashChangeEvent("hashchange"));
  } });
  const name = () => { button.textContent = theme() === "dark" ? "Light" : "Dark"; button.setAttribute("aria-label", `Switch to ${theme() === "dark" ? "light" : "dark"} colours`); };
  name();
  return button;
}

function keepFresh(ctx, refresh) {
  const look = async () => {
    if (document.visibilityState === "visible" && readState().view !== "story") {
      try {
        const { runs, stamp } = await ctx.source.progress();
        const busy = ctx.runs.some((r) => r.status === "running");
        if (stamp !== ctx.stamp) {
          const next = await ctx.source.index();
          ctx.source.forget();
          ctx.runs = next.runs;
          ctx.stamp = stamp;
        }
        for (const r of ctx.runs) r.progress = runs[r.key];
        if (busy || Object.keys(runs).length) refresh();
      } catch { /* the server is gone: what is shown stays */ }
    }
    setTimeout(look, EVERY);
  };
  setTimeout(look, EVERY);
}

async function start() {
  const app = document.getElementById("app");
  const source = openSource();
  let data;
  try { data = await source.index(); } catch (e) { put(app, el("p", { class: "trouble" }, `The runs cannot be read: ${e.message}`)); return; }
  setWords(data.words);
  const ctx = { source, runs: data.runs, story: data.story, stamp: data.stamp };
  const views = ALL.filter((v) => v.id !== "story" || ctx.story);
  const used = new Set(["story", "runs", ...ctx.runs.map((r) => r.view)]);
  const main = el("main", { id: "main" });
  const links = views.map((v) => el("a", { href: address({ view: v.id }), class: used.has(v.id) ? null : "unused" }, v.title));
  put(app, el("header", null, el("a", { class: "brand", href: address({ view: views[0].id }) }, "budwood"), el("nav", { "aria-label": "Views" }, links), themeButton()), main,
    el("footer", null, data.left_out && data.left_out.length ? el("p", null, `Left out to keep this file small: ${data.left_out.join("; ")}. \`budwood view\` shows everything.`) : null, el("p", null, `budwood ${data.budwood}`)));
  if (!ctx.runs.length) { put(main, el("h2", null, "No runs yet"), el("p", null, "Make one: ", el("code", null, "budwood finetune tiny-bert --task tiny-sentiment"), " or ", el("code", null, "budwood demo"), ".")); }
  let [shown, follow] = [null, () => {}];
  const route = () => {
    if (!ctx.runs.length) return;
    const state = readState();
    const view = views.find((v) => v.id === state.view) || views[0];
    if (view.id !== shown) {
      shown = view.id;
      links.forEach((a, i) => (views[i].id === view.id ? a.setAttribute("aria-current", "page") : a.removeAttribute("aria-current")));
      document.title = `${view.title} · budwood`;
      follow = view.mount(main, ctx);
      if (document.activeElement?.closest("header, main")) main.querySelector("h2")?.focus({ preventScroll: true });
      scrollTo(0, 0);
    }
    follow(state);
  };
  addEventListener("hashchange", route);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redrawAll);
  route();
  document.documentElement.dataset.ready = "yes";
  if (source.live) keepFresh(ctx, () => follow(readState()));
}

start();
