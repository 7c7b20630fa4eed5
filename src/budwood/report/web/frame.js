// A figure: title, picture, a line that reads out what is pointed at, the table behind it, and downloads.

import { el, fmt, num, put, svg } from "./dom.js";
import { inks, setPrinting } from "./colour.js";

const frames = new Set();

/** Redraw every figure that is on the page: another theme, or paper. */
export function redrawAll() {
  for (const frame of frames) frame.isConnected ? frame.redraw() : frames.delete(frame);
}

addEventListener("beforeprint", () => { setPrinting(true); redrawAll(); });
addEventListener("afterprint", () => { setPrinting(false); redrawAll(); });

/** `spec`: name (of files), title, note, hint, height, draw(width, say) -> svg, table {columns, rows}. */
export function figure(spec) {
  const canvas = el("div", { class: "canvas" });
  const readout = el("p", { class: "readout", "aria-live": "polite" }, spec.hint || "");
  const behind = el("div", { class: "behind", hidden: true });
  const button = (text, about, act, more) => el("button", { type: "button", class: "tool", title: about, click: act, ...more }, text);
  const toggle = button("Table", "The numbers behind this figure", () => {
    behind.hidden = !behind.hidden;
    toggle.setAttribute("aria-expanded", String(!behind.hidden));
    if (!behind.hidden) put(behind, table(frame.spec.table));
  }, { "aria-expanded": "false" });
  const title = el("h3", null, spec.title);
  const note = el("p", { class: "note" }, spec.note || "");
  const frame = el("figure", { class: "chart", "data-name": spec.name },
    el("figcaption", null, title, el("div", { class: "tools" }, toggle,
      button("CSV", "Download the numbers", () => download(`${frame.spec.name}.csv`, "text/csv", csv(frame.spec.table))),
      button("SVG", "Download the picture", () => download(`${frame.spec.name}.svg`, "image/svg+xml", picture(canvas))),
      button("PNG", "Download the picture as pixels", () => png(canvas, `${frame.spec.name}.png`)))),
    note, canvas, readout, behind);
  frame.spec = spec;
  frame.say = (...what) => put(readout, ...what);
  let width = 0;
  frame.redraw = () => {
    const room = Math.floor(canvas.clientWidth) || 640;
    width = room;
    const had = document.activeElement && canvas.contains(document.activeElement) ? document.activeElement.dataset.mark : null;
    put(canvas, frame.spec.draw(room, frame.say));
    canvas.style.minHeight = "";
    if (had) canvas.querySelector(`[data-mark="${CSS.escape(had)}"]`)?.focus();
  };
  frame.update = (next) => {
    frame.spec = { ...frame.spec, ...next };
    title.textContent = frame.spec.title;
    note.textContent = frame.spec.note || "";
    put(readout, frame.spec.hint || "");
    if (!behind.hidden) put(behind, table(frame.spec.table));
    frame.redraw();
  };
  if (spec.height) canvas.style.minHeight = `${spec.height}px`;
  new ResizeObserver(() => { if (Math.abs(canvas.clientWidth - width) > 4) frame.redraw(); }).observe(canvas);
  frames.add(frame);
  return frame;
}

/** An SVG canvas in the page's type. */
export function board(width, height, label) {
  return svg("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": label, "font-family": "inherit", "font-size": 12 });
}

/** A table of {columns: [{key, label}], rows}. */
export function table(spec) {
  const numeric = (key) => spec.rows.some((r) => typeof r[key] === "number");
  return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Table" }, el("table", null,
    el("thead", null, el("tr", null, spec.columns.map((c) => el("th", { scope: "col", class: numeric(c.key) ? "n" : null }, c.label)))),
    el("tbody", null, spec.rows.map((r) => el("tr", null, spec.columns.map((c) =>
      el("td", { class: numeric(c.key) ? "n" : null }, typeof r[c.key] === "number" ? num(r[c.key]) : fmt(r[c.key]))))))));
}

/** Rows as CSV, under the names that files have (`raw`) where a column keeps one; cells that a spreadsheet would take for a formula are quoted away. */
export function csv(spec) {
  const cell = (v) => {
    let text = v === null || v === undefined ? "" : String(v);
    if (typeof v === "string" && /^[=+\-@\t\r]/.test(text)) text = `'${text}`;
    return /[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  };
  return [spec.columns.map((c) => cell(c.raw ?? c.label)), ...spec.rows.map((r) => spec.columns.map((c) => cell(r[c.key])))].map((r) => r.join(",")).join("\n") + "\n";
}

/** Hand a file to the person. */
export function download(name, kind, content) {
  const link = el("a", { href: URL.createObjectURL(content instanceof Blob ? content : new Blob([content], { type: kind })), download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

function picture(canvas) {
  const copy = canvas.querySelector("svg").cloneNode(true);
  copy.setAttribute("xmlns", "http://www.w3.org/2000/svg");
  copy.setAttribute("font-family", "system-ui, sans-serif");
  copy.insertBefore(svg("rect", { width: "100%", height: "100%", fill: inks().paper }), copy.firstChild);
  return new XMLSerializer().serializeToString(copy);
}

function png(canvas, name) {
  const source = canvas.querySelector("svg");
  const image = new Image();
  image.onload = () => {
    const page = el("canvas", { width: source.getAttribute("width") * 2, height: source.getAttribute("height") * 2 });
    page.getContext("2d").drawImage(image, 0, 0, page.width, page.height);
    page.toBlob((blob) => download(name, "image/png", blob));
  };
  image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(picture(canvas))}`;
}
