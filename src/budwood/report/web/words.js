// Names that people read: metrics in words, and one numbering of layers for all views.

let metrics = {};

/** Take in {metric: {name, lower}} as the data tell it. */
export function setWords(words) {
  metrics = words || {};
}

/** A metric in words. */
export function metricName(key) {
  return key ? metrics[key]?.name ?? String(key).replaceAll("_", " ") : "score";
}

/** A metric in words, with its direction where less is better. */
export function metricTitle(key) {
  const name = metricName(key);
  if (!metrics[key]?.lower) return name;
  return name.endsWith(")") ? `${name.slice(0, -1)}, lower is better)` : `${name} (lower is better)`;
}

/** Whose scores, in words: self:ekfac@auto is the influence of rows on themselves by ekfac. */
export function scoresName(key) {
  const own = /^self:([^@]+)/.exec(String(key));
  return own ? `self-influence (${own[1]})` : metricName(key);
}

/** A text that begins with a capital. */
export function capital(text) {
  return text.charAt(0).toUpperCase() + text.slice(1);
}

/** A layer of a probe: the embeddings, then 1 for the first block. */
export function layerName(layer) {
  return layer === 0 ? "emb" : String(layer);
}

/** A block as files call it (0, "block.0", "layer.0") by the number that all views give it: one more. */
export function blockName(key) {
  const found = /^(?:block\.|layer\.)?(\d+)$/.exec(String(key));
  return found ? `layer ${Number(found[1]) + 1}` : key === "embeddings" ? "emb" : String(key);
}
