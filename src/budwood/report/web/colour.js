// One sequential and one diverging scale, told apart by colour-blind eyes; categories also differ in mark and dash.

const STOPS = {
  light: { sequential: ["#f3f6f9", "#a9c7de", "#4a86b4", "#0f4c7d", "#08294a"], diverging: ["#1b5e96", "#8cb8d9", "#f2f0ec", "#eab27c", "#a8530a"] },
  dark: { sequential: ["#1c232b", "#20465f", "#2f7aa6", "#7ab8dd", "#dcf0ff"], diverging: ["#7fc4ff", "#2f6f9f", "#262a30", "#97561c", "#ffb066"] },
};
const CATEGORY = {
  light: ["#2f6690", "#c8553d", "#3a7d44", "#8f5aa8", "#a87400", "#4d7f8c"],
  dark: ["#7fb7e0", "#f08a70", "#7cc48a", "#c79be0", "#e0b34a", "#8cc5d2"],
};
export const DASHES = ["", "6 3", "2 3", "8 3 2 3", "4 2", "1 2"];
let printing = false;

/** The page as it is being looked at: "light" or "dark"; paper is light. */
export function theme() {
  if (printing) return "light";
  const wish = document.documentElement.dataset.theme;
  return wish || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
}

/** Paper is coming, or gone. */
export function setPrinting(value) {
  printing = value;
}

const channels = (hex) => [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));

function mix(stops, share) {
  const at = Math.min(Math.max(share, 0), 1) * (stops.length - 1);
  const first = Math.min(Math.floor(at), stops.length - 2);
  const [a, b] = [channels(stops[first]), channels(stops[first + 1])];
  return `#${a.map((x, i) => Math.round(x + (b[i] - x) * (at - first)).toString(16).padStart(2, "0")).join("")}`;
}

/** A colour of the sequential scale for a share of 0 to 1. */
export function sequential(share) {
  return mix(STOPS[theme()].sequential, share);
}

/** A colour of the diverging scale for -1 to 1: blue below, orange above. */
export function diverging(value) {
  return mix(STOPS[theme()].diverging, (value + 1) / 2);
}

/** The ink that reads best on a colour. */
export function inkOn(hex) {
  const [r, g, b] = channels(hex).map((x) => (x / 255) ** 2.2);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.19 ? "#14181f" : "#ffffff";
}

/** The colour of a category. */
export function category(index) {
  return CATEGORY[theme()][index % CATEGORY.light.length];
}

/** Ink, quiet ink, line and paper of the page. */
export function inks() {
  return theme() === "dark"
    ? { ink: "#e8eaee", quiet: "#a3abb8", line: "#3a414c", paper: "#14171c", soft: "#20252d" }
    : { ink: "#1f2430", quiet: "#5b6472", line: "#d9dde3", paper: "#ffffff", soft: "#f4f6f8" };
}
