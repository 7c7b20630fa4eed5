// A heat map: rows x columns, value as colour and as text; cells are walked with the arrow keys.

import { fmt, roving, svg } from "./dom.js";
import { diverging, inkOn, inks, sequential } from "./colour.js";
import { label } from "./axes.js";
import { board } from "./frame.js";

/** `spec`: rows, columns (names), value(r, c), text(value), tell(r, c), range, tone, pick(r, c), picked {r, c}, side, name, rowTitle, columnTitle. */
export function heat(width, spec, say) {
  const long = Math.max(...spec.rows.map((r) => String(r).length), String(spec.rowTitle || "").length, 3);
  const left = Math.min(Math.max(long * 7 + 14, 40), Math.max(90, width * 0.34));
  const sideRoom = spec.side ? 74 : 0;
  const cell = Math.max(spec.least || 34, Math.min(92, (width - left - sideRoom - 2) / spec.columns.length));
  const tall = Math.max(26, Math.min(34, cell));
  const slant = spec.columns.some((c) => String(c).length * 6.6 > cell);
  const top = slant ? 20 + Math.max(...spec.columns.map((c) => String(c).length)) * 4.4 : 24;
  const across = left + cell * spec.columns.length + sideRoom + (slant ? 34 : 2);
  const high = top + tall * spec.rows.length + (spec.columnTitle ? 26 : 8);
  const page = board(across, high, spec.name);
  page.setAttribute("role", "grid");
  const { quiet, ink } = inks();
  const [low, most] = spec.range;
  const cells = [];
  spec.columns.forEach((c, x) => {
    const at = left + (x + 0.5) * cell;
    page.append(label(at - (slant ? 6 : 0), top - 10, String(c), slant ? { transform: `rotate(-38 ${at - 6} ${top - 10})`, "text-anchor": "start" } : { "text-anchor": "middle" }));
  });
  if (spec.columnTitle) page.append(label(left + (cell * spec.columns.length) / 2, high - 9, spec.columnTitle, { "text-anchor": "middle" }));
  spec.rows.forEach((r, y) => {
    const line = svg("g", { role: "row" });
    const name = label(left - 8, top + (y + 0.5) * tall, clip(String(r), Math.floor((left - 12) / 6.6)), { "text-anchor": "end", fill: ink, role: "rowheader" });
    name.append(svg("title", null, String(r)));
    line.append(name);
    spec.columns.forEach((c, x) => {
      const value = spec.value(y, x);
      const known = typeof value === "number";
      const share = known ? (value - low) / (most - low || 1) : 0;
      const colour = !known ? "none" : spec.tone === "diverging" ? diverging(value / (Math.max(Math.abs(low), Math.abs(most)) || 1)) : sequential(share);
      const chosen = spec.picked && spec.picked.r === y && spec.picked.c === x;
      const told = spec.tell ? spec.tell(y, x) : `${r}, ${c}: ${fmt(value)}`;
      const group = svg("g", { role: "gridcell", class: "cell", "data-mark": `${y}-${x}`, "data-value": known ? value : null, "aria-label": told, "aria-selected": String(!!chosen) },
        svg("rect", { x: left + x * cell + 1, y: top + y * tall + 1, width: cell - 2, height: tall - 2, rx: 3, fill: colour, stroke: known ? "none" : inks().line, class: "tile" }),
        known && cell >= 30 ? svg("text", { x: left + (x + 0.5) * cell, y: top + (y + 0.5) * tall + 0.5, "text-anchor": "middle", "dominant-baseline": "middle", "font-size": cell < 44 ? 10 : 11.5, fill: inkOn(colour) }, spec.text(value)) : null,
        spec.star && spec.star(y, x) ? svg("circle", { cx: left + (x + 1) * cell - 7, cy: top + y * tall + 7, r: 2.6, fill: inkOn(colour) }) : null);
      if (chosen) group.append(svg("rect", { x: left + x * cell + 1.5, y: top + y * tall + 1.5, width: cell - 3, height: tall - 3, rx: 3, fill: "none", stroke: ink, "stroke-width": 2 }));
      const act = () => spec.pick && spec.pick(y, x);
      for (const kind of ["mouseenter", "focus"]) group.addEventListener(kind, () => say(told));
      group.addEventListener("click", act);
      group.addEventListener("keydown", (e) => { if (e.key === "Enter" || e.key === " ") { e.preventDefault(); act(); } });
      if (spec.pick) group.classList.add("pickable");
      line.append(group);
      cells.push(group);
    });
    if (spec.side) {
      const value = spec.side.value(y);
      const room = sideRoom - 22;
      if (typeof value === "number") {
        line.append(svg("rect", { x: left + cell * spec.columns.length + 10, y: top + y * tall + 7, width: Math.max(1, (value / spec.side.most) * room), height: tall - 14, rx: 2, fill: quiet, "fill-opacity": 0.65 },
          svg("title", null, `${spec.side.name}, ${r}: ${fmt(value)}`)));
      }
    }
    page.append(line);
  });
  if (spec.side) page.append(label(left + cell * spec.columns.length + 10, top - 10, spec.side.name, { "font-size": 10 }));
  const wide = spec.columns.length;
  roving(cells, (key, i) => ({ ArrowRight: i % wide < wide - 1 ? i + 1 : i, ArrowLeft: i % wide ? i - 1 : i, ArrowDown: i + wide, ArrowUp: i - wide, Home: i - (i % wide), End: i - (i % wide) + wide - 1 })[key]);
  return page;
}

/** A text shortened in its middle. */
export function clip(text, most) {
  return text.length <= most ? text : `${text.slice(0, Math.ceil(most / 2) - 1)}…${text.slice(text.length - Math.floor(most / 2))}`;
}
