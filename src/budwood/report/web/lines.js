// Lines with bands: hover or walk with the arrow keys to read values out.

import { fmt, svg } from "./dom.js";
import { category, DASHES, inks } from "./colour.js";
import { axes, extent, label, mark, scale } from "./axes.js";
import { board } from "./frame.js";

const QUIET = ["4 3", "9 3", "2 2", "9 3 2 3", "14 4"];
const RULES = ["1 3", "12 5", "5 3 1 3"];

/** `spec`: series [{name, points [{x, y, low, high}], quiet}], x {label, log, text, ticks}, y {label, domain}, rules [{y, name}], at, pick(x), name, height. */
export function lines(width, spec, say) {
  const high = spec.height || 260;
  const rules = (spec.rules || []).filter((r) => typeof r.y === "number");
  const keyed = rules.length > 1 ? rules : []; // one rule is named at its line; several would write over one another
  const legend = legendRows([...spec.series.map((s) => s.name), ...keyed.map(ruleName)], width);
  const page = board(width, high + legend.height, spec.name);
  page.setAttribute("tabindex", "0");
  page.setAttribute("data-mark", "lines");
  const all = spec.series.flatMap((s) => s.points);
  const longest = Math.max(...(spec.y.domain || extent(all.map((p) => p.y))).map((v) => fmt(v).length), 4);
  const box = { left: 14 + longest * 7, right: width - 12, top: 24, bottom: high - 44 };
  const xs = [...new Set(all.map((p) => p.x))].filter((v) => v !== null && (!spec.x.log || v > 0)).sort((a, b) => a - b);
  const reach = xs.length > 1 ? [xs[0], xs[xs.length - 1]] : [(xs[0] ?? 0) - 0.5, (xs[0] ?? 0) + 0.5];
  const x = scale(reach, [box.left + 6, box.right - 6], spec.x.log);
  const y = scale(spec.y.domain || extent(all.flatMap((p) => [p.y, p.low, p.high]).concat(rules.map((r) => r.y))), [box.bottom, box.top]);
  page.append(axes(box, x, y, { x: spec.x.label, y: spec.y.label, xText: spec.x.text, xTicks: spec.x.ticks }));
  spec.series.forEach((s, i) => page.append(drawn(s, i, x, y)));
  rules.forEach((rule, i) => {
    page.append(svg("line", { x1: box.left, x2: box.right, y1: y(rule.y), y2: y(rule.y), stroke: inks().ink, "stroke-opacity": 0.75, "stroke-dasharray": RULES[i % RULES.length], "data-value": rule.y }));
    if (!keyed.length) page.append(label(rule.left ? box.left + 4 : box.right, y(rule.y) - 8, rule.text || ruleName(rule), { "text-anchor": rule.left ? "start" : "end", "font-size": 11 }));
  });
  const cursor = svg("line", { y1: box.top, y2: box.bottom, stroke: inks().ink, "stroke-width": 1, visibility: "hidden" });
  page.append(cursor);
  let place = -1;
  const point = (n) => {
    place = Math.max(0, Math.min(xs.length - 1, n));
    const at = xs[place];
    if (at === undefined) return;
    cursor.setAttribute("x1", x(at));
    cursor.setAttribute("x2", x(at));
    cursor.setAttribute("visibility", "visible");
    const told = spec.series.map((s) => [s, s.points.find((p) => p.x === at)]).filter(([, p]) => p && p.y !== null);
    say(`${spec.x.label || "x"} ${spec.x.text ? spec.x.text(at) : fmt(at)}: ${told.map(([s, p]) => `${s.name} ${fmt(p.y)}${typeof p.low === "number" ? ` (${fmt(p.low)} to ${fmt(p.high)})` : ""}`).join(", ")}`);
  };
  if (spec.at !== undefined && xs.length) {
    const near = xs.reduce((best, v, i) => (Math.abs(v - spec.at) < Math.abs(xs[best] - spec.at) ? i : best), 0);
    cursor.setAttribute("x1", x(xs[near])); cursor.setAttribute("x2", x(xs[near])); cursor.setAttribute("visibility", "visible");
    place = near;
  }
  page.addEventListener("mousemove", (e) => {
    const here = page.getBoundingClientRect();
    const px = ((e.clientX - here.left) / here.width) * width;
    point(xs.reduce((best, v, i) => (Math.abs(x(v) - px) < Math.abs(x(xs[best]) - px) ? i : best), 0));
  });
  page.addEventListener("click", () => spec.pick && place >= 0 && spec.pick(xs[place]));
  page.addEventListener("keydown", (e) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[e.key];
    if (step) { e.preventDefault(); point(place + step); }
    if (e.key === "Enter" && spec.pick && place >= 0) spec.pick(xs[place]);
  });
  page.append(legend.draw([...spec.series.map(styled), ...keyed.map((r, i) => ({ name: ruleName(r), stroke: inks().ink, dash: RULES[i % RULES.length] }))], high));
  return page;
}

const ruleName = (rule) => `${rule.name} ${fmt(rule.y)}`;

/** Colour, dash and mark of a line; quiet ones are grey and still differ in the other two. */
function styled(s, i) {
  return { name: s.name, stroke: s.quiet ? inks().quiet : category(i), dash: s.quiet ? QUIET[i % QUIET.length] : DASHES[i % DASHES.length], kind: i };
}

function drawn(s, i, x, y) {
  const { stroke: colour, dash } = styled(s, i);
  const g = svg("g", { "data-series": s.name });
  const known = s.points.filter((p) => typeof p.y === "number" && (!x.log || p.x > 0)).sort((a, b) => a.x - b.x);
  const band = known.filter((p) => typeof p.low === "number" && typeof p.high === "number");
  if (band.length > 1) {
    const there = band.map((p) => `${x(p.x)} ${y(p.high)}`);
    const back = band.toReversed().map((p) => `${x(p.x)} ${y(p.low)}`);
    g.append(svg("path", { d: `M${there.concat(back).join("L")}Z`, fill: colour, "fill-opacity": 0.14 }));
  }
  if (known.length > 1) g.append(svg("path", { d: `M${known.map((p) => `${x(p.x)} ${y(p.y)}`).join("L")}`, fill: "none", stroke: colour, "stroke-width": 1.8, "stroke-dasharray": dash, "stroke-linejoin": "round" }));
  if (known.length < 60) for (const p of known) g.append(mark(i, x(p.x), y(p.y), 3, { fill: colour, "data-value": p.y }));
  return g;
}

/** Names with their marks, in as many rows as they need; entries to draw are {name, stroke, dash, kind}, without a line or a mark where the chart has none. */
export function legendRows(names, width) {
  const places = [];
  let [x, row] = [8, 0];
  for (const name of names) {
    const need = Math.min(name.length, 40) * 7.3 + 50;
    if (x + need > width && x > 8) { x = 8; row += 1; }
    places.push([x, row]);
    x += need;
  }
  const shown = names.length > 1;
  return {
    height: shown ? (row + 1) * 20 + 4 : 0,
    draw: (series, top) => svg("g", null, shown ? series.map((s, i) => {
      const [left, line] = places[i];
      const y = top + line * 20 + 10;
      return svg("g", { "data-key": s.name, "data-dash": s.dash },
        s.dash === undefined ? null : svg("line", { x1: left, x2: left + 26, y1: y, y2: y, stroke: s.stroke, "stroke-width": 1.8, "stroke-dasharray": s.dash }),
        s.kind === undefined ? null : mark(s.kind, left + 13, y, 3, { fill: s.stroke }), label(left + 32, y, s.name.length > 40 ? `${s.name.slice(0, 39)}…` : s.name));
    }) : null),
  };
}
