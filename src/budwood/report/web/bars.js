// Horizontal bars with intervals: names stay readable on a narrow page.

import { fmt, roving, svg } from "./dom.js";
import { category, inks } from "./colour.js";
import { label, scale, ticks } from "./axes.js";
import { clip } from "./heat.js";
import { board } from "./frame.js";

const ROW = 14; // pixels that a rule's name takes

/** `spec`: items [{name, value, low, high, colour, soft, tell}], rules [{x, name}], unit, domain, pick(i), name. */
export function bars(width, spec, say) {
  const tall = 28;
  const rules = (spec.rules || []).filter((r) => typeof r.x === "number");
  const top = rules.length ? 12 + ROW * rules.length : 10;
  const high = top + tall * spec.items.length + 40;
  const page = board(width, high, spec.name);
  const long = Math.max(4, ...spec.items.map((i) => i.name.length));
  const left = Math.min(long * 7 + 16, width * 0.42);
  const known = spec.items.flatMap((i) => [i.value, i.low, i.high]).concat(rules.map((r) => r.x)).filter((v) => typeof v === "number");
  const domain = spec.domain || [Math.min(0, ...known), Math.max(0, ...known) * 1.02 || 1];
  const x = scale(domain, [left, width - 64]);
  const { quiet, line, ink } = inks();
  for (const t of ticks(domain[0], domain[1], Math.max(2, Math.floor((width - left) / 80)))) {
    page.append(svg("line", { x1: x(t), x2: x(t), y1: top, y2: high - 36, stroke: line }));
    page.append(label(x(t), high - 26, fmt(t), { "text-anchor": "middle" }));
  }
  if (spec.unit) page.append(label((left + width - 64) / 2, high - 9, spec.unit, { "text-anchor": "middle" }));
  const nodes = spec.items.map((item, i) => {
    const y = top + i * tall;
    const told = item.tell || `${item.name}: ${fmt(item.value)}${typeof item.low === "number" ? ` (${fmt(item.low)} to ${fmt(item.high)})` : ""}`;
    const g = svg("g", { class: spec.pick ? "cell pickable" : "cell", role: spec.pick ? "button" : "img", "aria-label": told, "data-mark": `bar-${i}`, "data-value": item.value });
    g.append(svg("rect", { x: 0, y, width, height: tall, fill: "transparent", class: "tile" }));
    g.append(label(left - 8, y + tall / 2, clip(item.name, Math.floor((left - 12) / 6.7)), { "text-anchor": "end", fill: ink }));
    if (typeof item.value === "number") {
      const [a, b] = [x(Math.min(0, item.value)), x(Math.max(0, item.value))];
      g.append(svg("rect", { x: a, y: y + 5, width: Math.max(1, b - a), height: tall - 10, rx: 2, fill: item.quiet ? quiet : category(item.colour ?? 0), "fill-opacity": item.soft ? 0.45 : 0.9 }));
      if (typeof item.low === "number" && typeof item.high === "number") g.append(svg("path", { d: `M${x(item.low)} ${y + tall / 2}H${x(item.high)}M${x(item.low)} ${y + 9}V${y + tall - 9}M${x(item.high)} ${y + 9}V${y + tall - 9}`, stroke: ink, "stroke-width": 1.3 }));
      g.append(label(Math.max(b, typeof item.high === "number" ? x(item.high) : 0, x(0)) + 6, y + tall / 2 + 0.5, fmt(item.value), { fill: ink }));
    }
    for (const kind of ["mouseenter", "focus"]) g.addEventListener(kind, () => say(told));
    const act = () => spec.pick && spec.pick(i);
    g.addEventListener("click", act);
    g.addEventListener("keydown", (e) => { if (e.key === "Enter" || e.key === " ") { e.preventDefault(); act(); } });
    page.append(g);
    return g;
  });
  for (const { rule, row, text, end } of ruleRows(rules, x, width)) {
    const y = top - 8 - ROW * row;
    page.append(svg("line", { x1: x(rule.x), x2: x(rule.x), y1: y - 5, y2: high - 36, stroke: ink, "stroke-dasharray": "4 3", "data-value": rule.x }));
    page.append(label(x(rule.x) + (end ? -5 : 5), y, text, { "text-anchor": end ? "end" : "start", "font-size": 11, "data-rule": rule.x }));
  }
  roving(nodes, (key, i) => ({ ArrowDown: i + 1, ArrowUp: i - 1, Home: 0, End: nodes.length - 1 })[key]);
  return page;
}

/** A row of its own for every rule's name, counted up from the bars, so that each stands at the end of its line and none is crossed by another's. */
function ruleRows(rules, x, width) {
  const left = rules.map((rule) => {
    const text = `${rule.name} ${fmt(rule.x)}`;
    const [at, long] = [x(rule.x), 6.4 * text.length + 8];
    const end = at + long > width && at > width / 2;
    return { rule, text, end, at, from: end ? at - long : at, to: end ? at : at + long };
  });
  const crossed = (one) => left.filter((o) => o !== one && o.at >= one.from && o.at <= one.to).length;
  return rules.map((_, row) => {
    const next = left.reduce((best, one) => (crossed(one) < crossed(best) ? one : best));
    left.splice(left.indexOf(next), 1);
    return { ...next, row };
  });
}
