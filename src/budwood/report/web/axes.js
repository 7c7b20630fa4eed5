// Scales, ticks and axes.

import { fmt, svg } from "./dom.js";
import { inks } from "./colour.js";

/** From values to pixels; `log` needs a domain above zero. */
export function scale([a, b], [from, to], log = false) {
  const f = log ? Math.log10 : (x) => x;
  const span = f(b) - f(a) || 1;
  const map = (v) => from + ((f(v) - f(a)) / span) * (to - from);
  map.ticks = log ? decades(a, b) : ticks(a, b);
  map.log = log;
  return map;
}

function decades(a, b) {
  const out = [];
  for (let p = Math.ceil(Math.log10(a) - 1e-9); p <= Math.floor(Math.log10(b) + 1e-9); p += 1) out.push(10 ** p);
  return out.length > 1 ? out : [a, b];
}

/** About five round numbers in a range. */
export function ticks(a, b, most = 5) {
  if (!(b > a)) return [a];
  const raw = (b - a) / most;
  const unit = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((k) => k * unit).find((s) => s >= raw - 1e-12);
  const out = [];
  for (let i = Math.ceil(a / step - 1e-9); i * step <= b + 1e-9 * step; i += 1) out.push(Number((i * step).toPrecision(12)));
  return out;
}

/** Smallest and largest of the numbers in a list, widened by a share; nothing gives 0 to 1. */
export function extent(values, pad = 0.05) {
  const known = values.filter((v) => typeof v === "number" && Number.isFinite(v));
  if (!known.length) return [0, 1];
  let [low, high] = [Math.min(...known), Math.max(...known)];
  if (low === high) [low, high] = [low - (Math.abs(low) * 0.1 || 0.5), high + (Math.abs(high) * 0.1 || 0.5)];
  return [low - (high - low) * pad, high + (high - low) * pad];
}

/** Words on a canvas. */
export function label(x, y, text, more) {
  return svg("text", { x, y, fill: inks().quiet, "dominant-baseline": "middle", stroke: inks().paper, "stroke-width": 3, "paint-order": "stroke", "stroke-linejoin": "round", ...more }, text);
}

/** A size of type in which a text fits into a width. */
const fit = (text, wide) => Math.max(8, Math.min(12, wide / (0.55 * text.length)));
/** By how much half of a text is wider than half of the place for it. */
const over = (text, wide) => Math.max(0, (6.6 * text.length - wide) / 2);

/** Both axes of a plot with quiet grid lines; `box` is {left, top, right, bottom} in pixels. */
export function axes(box, x, y, names) {
  const { line, quiet } = inks();
  const g = svg("g", { "aria-hidden": "true" });
  for (const t of y.ticks) {
    g.append(svg("line", { x1: box.left, x2: box.right, y1: y(t), y2: y(t), stroke: line, "stroke-width": 1 }));
    g.append(label(box.left - 8, y(t), fmt(t), { "text-anchor": "end" }));
  }
  const room = Math.max(1, Math.floor((box.right - box.left) / 46));
  const some = names.xTicks || x.ticks;
  const every = Math.ceil(some.length / room);
  some.forEach((t, i) => {
    if (i % every) return;
    g.append(svg("line", { x1: x(t), x2: x(t), y1: box.bottom, y2: box.bottom + 4, stroke: quiet }));
    g.append(label(x(t), box.bottom + 15, names.xText ? names.xText(t) : fmt(t), { "text-anchor": "middle" }));
  });
  g.append(svg("line", { x1: box.left, x2: box.right, y1: box.bottom, y2: box.bottom, stroke: quiet }));
  const wide = box.right + 8;
  if (names.x) g.append(label(Math.max((box.left + box.right) / 2 - over(names.x, box.right - box.left), wide / 2), box.bottom + 34, names.x, { "text-anchor": "middle", "font-size": fit(names.x, wide) }));
  if (names.y) g.append(label(4, 9, names.y, { "text-anchor": "start", "font-size": fit(names.y, wide) }));
  return g;
}

/** A mark by number: circle, square, diamond, triangle, cross, star. */
export function mark(kind, x, y, size, attrs) {
  const s = size;
  const paths = [
    null,
    `M${x - s} ${y - s}h${2 * s}v${2 * s}h${-2 * s}z`,
    `M${x} ${y - s * 1.3}l${s * 1.3} ${s * 1.3}l${-s * 1.3} ${s * 1.3}l${-s * 1.3} ${-s * 1.3}z`,
    `M${x} ${y - s * 1.2}l${s * 1.2} ${s * 2.1}h${-s * 2.4}z`,
    `M${x - s} ${y - s * 0.35}h${s * 0.65}v${-s * 0.65}h${s * 0.7}v${s * 0.65}h${s * 0.65}v${s * 0.7}h${-s * 0.65}v${s * 0.65}h${-s * 0.7}v${-s * 0.65}h${-s * 0.65}z`,
    `M${x} ${y + s * 1.2}l${s * 1.2} ${-s * 2.1}h${-s * 2.4}z`,
  ];
  const d = paths[kind % paths.length];
  return d ? svg("path", { d, ...attrs }) : svg("circle", { cx: x, cy: y, r: s, ...attrs });
}
