// What is shown, as part of the URL: a copied URL shows the same.

export const DEFAULTS = {
  step: "", row: "0", token: "", colour: "ratio", sort: "order", view: "step",
  text: "", rmin: "", rmax: "", smin: "", cmin: "", finish: "", theme: "",
};

export function readState() {
  const given = new URLSearchParams(location.hash.slice(1));
  const state = { ...DEFAULTS };
  for (const key of Object.keys(DEFAULTS)) if (given.has(key)) state[key] = given.get(key);
  return state;
}

export function writeState(state) {
  const changed = Object.entries(state).filter(([key, value]) => value !== DEFAULTS[key]);
  const hash = `#${new URLSearchParams(changed)}`;
  if (hash !== location.hash) history.replaceState(null, "", hash);
}
