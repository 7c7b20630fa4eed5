// Where the numbers come from: the page itself, or the server that sent it. Both answer the same questions.

let texts = [];

function embedded(data) {
  texts = data.texts;
  return {
    live: false,
    index: async () => data,
    full: async (key) => data.runs.find((r) => r.key === key),
    detail: async (key) => data.details[key] || { claim: "" },
    query: async (key, query, strategy, layers) => {
      const all = data.details[key];
      const top = (all.tops[strategy] || [])[query];
      return { top, train: all.train, inner: (all.inner || [])[query] || {}, partial: layers.length > 0 };
    },
  };
}

async function ask(path, signal) {
  const reply = await fetch(path, { headers: { accept: "application/json" }, signal });
  const value = await reply.json();
  if (!reply.ok) throw Object.assign(new Error(value.error || `the server answered ${reply.status}`), { busy: reply.status === 503 });
  return value;
}

function remote() {
  const kept = new Map();
  const once = (path, signal) => {
    if (!kept.has(path)) {
      const asked = ask(path, signal);
      const forget = () => { if (kept.get(path) === asked) kept.delete(path); };
      kept.set(path, asked);
      signal?.addEventListener("abort", forget);
      asked.catch(forget);
      if (kept.size > 200) kept.delete(kept.keys().next().value);
    }
    return kept.get(path);
  };
  const name = encodeURIComponent;
  return {
    live: true,
    index: () => ask("api/runs"),
    full: async (key) => (await once(`api/run?key=${name(key)}`)).full,
    detail: async (key) => {
      const reply = await once(`api/run?key=${name(key)}`);
      return withTexts(reply.detail, reply.texts);
    },
    query: async (key, query, strategy, layers, graft, signal) => {
      const part = graft ? `&graft=${name(graft)}` : `&layers=${name(layers.join(","))}`;
      const reply = await once(`api/query?key=${name(key)}&q=${query}&strategy=${name(strategy)}${part}`, signal);
      return withTexts(reply.answer, reply.texts);
    },
    progress: () => ask("api/progress"),
    asking: (key, text) => once(`api/ask?key=${name(key)}&text=${name(text)}`).then((r) => withTexts(r.answer, r.texts)),
    forget: () => kept.clear(),
  };
}

/** Replies number their texts from zero; the page numbers them on. Done once per reply. */
function withTexts(value, own) {
  if (!own || value.numbered) return value;
  const first = texts.length;
  texts = texts.concat(own);
  const shift = (node) => {
    if (Array.isArray(node)) node.forEach(shift);
    else if (node && typeof node === "object") {
      for (const key of ["text", "pair"]) if (typeof node[key] === "number") node[key] += first;
      Object.values(node).forEach(shift);
    }
  };
  shift(value);
  value.numbered = true;
  return value;
}

/** A text by its number. */
export function textAt(number) {
  return texts[number] ?? "";
}

/** The page's data, or the server's. */
export function openSource() {
  const node = document.getElementById("data");
  return node ? embedded(JSON.parse(node.textContent)) : remote();
}
