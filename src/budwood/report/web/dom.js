// Elements without markup: everything a data set says goes in as text.

const SVG = "http://www.w3.org/2000/svg";
const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200b\u200e\u200f\u202a-\u202e\u2060-\u2069\ufeff]/g;

function fill(node, attrs, children) {
  for (const [name, value] of Object.entries(attrs || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function") node.addEventListener(name, value);
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  for (const child of children.flat(3)) {
    if (child === null || child === undefined || child === false) continue;
    node.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
  return node;
}

/** An HTML element; attributes that are functions listen to the event of their name. */
export function el(tag, attrs, ...children) {
  return fill(document.createElement(tag), attrs, children);
}

/** An SVG element. */
export function svg(tag, attrs, ...children) {
  return fill(document.createElementNS(SVG, tag), attrs, children);
}

/** Text in which characters that hide or turn others are spelled out. */
export function legible(text) {
  return String(text).replace(HIDDEN, (c) => `⟨U+${c.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}⟩`);
}

/** Words of a data set, kept to themselves whatever direction they run in. */
export function quote(text, attrs) {
  return el("bdi", { class: "text", dir: "auto", ...attrs }, legible(text));
}

/** Four significant places, whole numbers whole, nothing as a dash. */
export function fmt(value) {
  if (value === null || value === undefined || value === "") return "–";
  if (typeof value === "boolean") return value ? "yes" : "no";
  if (typeof value !== "number") return legible(value);
  if (Number.isInteger(value)) return value.toLocaleString("en").replace("-", "−");
  const size = Math.abs(value);
  if (size >= 1e6 || size < 1e-3) return value.toExponential(2).replace("e+", "e").replace("-", "−").replace("e-", "e−");
  return String(Number(value.toPrecision(4))).replace("-", "−");
}

/** A share in percent. */
export function pct(value) {
  return value === null || value === undefined ? "–" : `${fmt(Number((100 * value).toPrecision(3)))} %`;
}

/** A number with its exact value beside what is shown. */
export function num(value, text) {
  return el("span", { class: "num", "data-value": typeof value === "number" ? value : null }, text ?? fmt(value));
}

/** A number with its sign always said. */
export function signed(value) {
  return value > 0 ? `+${fmt(value)}` : fmt(value);
}

/** Add to what an element holds; nothing is skipped. */
export function add(node, ...children) {
  return fill(node, null, children);
}

/** Replace what an element holds. */
export function put(node, ...children) {
  node.replaceChildren();
  return fill(node, null, children);
}

/** Arrow keys among marks of which one is in the tab order. `step(key, index)` names the next index. */
export function roving(nodes, step) {
  nodes.forEach((node, i) => {
    node.setAttribute("tabindex", i === 0 ? "0" : "-1");
    node.addEventListener("keydown", (event) => {
      const next = step(event.key, i);
      if (next === undefined || !nodes[next]) return;
      event.preventDefault();
      nodes.forEach((n) => n.setAttribute("tabindex", "-1"));
      nodes[next].setAttribute("tabindex", "0");
      nodes[next].focus();
    });
  });
}
