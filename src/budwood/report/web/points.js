// Points with bars: two costs against one another, or predicted against measured.

import { fmt, roving, svg } from "./dom.js";
import { category, inks } from "./colour.js";
import { axes, extent, label, mark, scale } from "./axes.js";
import { legendRows } from "./lines.js";
import { board } from "./frame.js";

/** `spec`: groups [name], points [{x, y, group, xlow, xhigh, ylow, yhigh, name, tell}], front [[x, y]], rules, x, y, pick(i), picked, name. */
export function points(width, spec, say) {
  const high = spec.height || 340;
  const legend = legendRows(spec.groups, width);
  const page = board(width, high + legend.height, spec.name);
  const xs = spec.points.flatMap((p) => [p.x, p.xlow, p.xhigh]).concat((spec.xRules || []).map((r) => r.at));
  const ys = spec.points.flatMap((p) => [p.y, p.ylow, p.yhigh]).concat((spec.yRules || []).map((r) => r.at));
  const yDomain = extent(ys, 0.08);
  const box = { left: 16 + 7 * Math.max(...yDomain.map((v) => fmt(v).length), 4), right: width - 14, top: 26, bottom: high - 46 };
  const x = scale(extent(xs, 0.08), [box.left, box.right]);
  const y = scale(yDomain, [box.bottom, box.top]);
  const { quiet, ink } = inks();
  page.append(axes(box, x, y, { x: spec.x, y: spec.y }));
  for (const r of spec.yRules || []) if (typeof r.at === "number") {
    page.append(svg("line", { x1: box.left, x2: box.right, y1: y(r.at), y2: y(r.at), stroke: quiet, "stroke-dasharray": "3 3", "data-value": r.at }));
    const text = `${r.name} ${fmt(r.at)}`;
    const busy = spec.points.some((p) => Math.abs(y(p.y) - y(r.at)) < 26 && x(p.x) > box.right - 6.4 * text.length - 12); // a point is where the name would stand
    const across = (spec.xRules || []).map((o) => x(o.at)).filter((at) => at < box.left + 6.4 * text.length + 8); // begin behind upright lines
    page.append(label(busy ? Math.max(box.left + 4, ...across.map((at) => at + 5)) : box.right, y(r.at) + 10, text, { "text-anchor": busy ? "start" : "end", "font-size": 11, "data-rule": r.at }));
  }
  for (const r of spec.xRules || []) if (typeof r.at === "number") {
    page.append(svg("line", { y1: box.top, y2: box.bottom, x1: x(r.at), x2: x(r.at), stroke: quiet, "stroke-dasharray": "3 3", "data-value": r.at }));
    const end = x(r.at) > width * 0.6;
    page.append(label(x(r.at) + (end ? -5 : 5), box.top + 6, `${r.name} ${fmt(r.at)}`, { "text-anchor": end ? "end" : "start", "font-size": 11, "data-rule": r.at }));
  }
  if (spec.front && spec.front.length > 1) {
    const steps = spec.front.map(([a, b], i) => (i ? (spec.rising ? `V${y(b)}H${x(a)}` : `H${x(a)}V${y(b)}`) : `M${x(a)} ${y(b)}`)).join("");
    page.append(svg("path", { d: steps, fill: "none", stroke: quiet, "stroke-width": 1.2 }));
  }
  const nodes = spec.points.map((p, i) => {
    const kind = spec.groups.indexOf(p.group);
    const chosen = spec.picked === i;
    const g = svg("g", { class: spec.pick ? "cell pickable" : "cell", role: spec.pick ? "button" : "img", "aria-label": p.tell, "data-mark": `point-${i}`, "data-x": p.x, "data-y": p.y, "aria-pressed": spec.pick ? String(chosen) : null });
    const bar = `${p.xhigh > p.xlow ? `M${x(p.xlow)} ${y(p.y)}H${x(p.xhigh)}` : ""}${p.yhigh > p.ylow ? `M${x(p.x)} ${y(p.ylow)}V${y(p.yhigh)}` : ""}`;
    if (bar) g.append(svg("path", { d: bar, stroke: category(kind), "stroke-width": 1.2, "stroke-opacity": 0.6 }));
    g.append(svg("circle", { cx: x(p.x), cy: y(p.y), r: 12, fill: "transparent", class: "tile" }));
    g.append(mark(kind, x(p.x), y(p.y), spec.small ? 2.6 : 5, { fill: category(kind), "fill-opacity": spec.small ? 0.6 : 1, stroke: chosen ? ink : "none", "stroke-width": 2 }));
    const end = x(p.x) + 9 + 6.4 * String(p.name || "").length > width;
    if (p.name) g.append(label(x(p.x) + (end ? -9 : 9), y(p.y) - 11, p.name, { "font-size": 11, fill: ink, "text-anchor": end ? "end" : "start" }));
    for (const event of ["mouseenter", "focus"]) g.addEventListener(event, () => say(p.tell));
    const act = () => spec.pick && spec.pick(i);
    g.addEventListener("click", act);
    g.addEventListener("keydown", (e) => { if (e.key === "Enter" || e.key === " ") { e.preventDefault(); act(); } });
    page.append(g);
    return g;
  });
  roving(nodes, (key, i) => ({ ArrowRight: i + 1, ArrowDown: i + 1, ArrowLeft: i - 1, ArrowUp: i - 1 })[key]);
  page.append(legend.draw(spec.groups.map((name, kind) => ({ name, stroke: category(kind), kind })), high));
  return page;
}
