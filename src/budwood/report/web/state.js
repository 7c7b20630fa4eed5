// What is being looked at stands in the address, so that it can be passed on.

/** The address's hash as an object of strings. */
export function readState() {
  return Object.fromEntries(new URLSearchParams(location.hash.replace(/^#/, "")));
}

/** A link to a state. */
export function address(state) {
  const kept = Object.entries(state).filter(([, v]) => v !== null && v !== undefined && v !== "");
  return `#${new URLSearchParams(kept)}`;
}

/** Change parts of the state; `step` makes a new entry in the history. */
export function setState(patch, step = false) {
  const next = address({ ...readState(), ...patch });
  if (next === location.hash) return;
  if (step) location.hash = next;
  else {
    history.replaceState(null, "", next);
    dispatchEvent(new HashChangeEvent("hashchange"));
  }
}
