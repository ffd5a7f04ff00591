// What is shown, as part of the URL: a copied URL shows the same.

export const DEFAULTS = {
  run: "0", step: "", row: "0", token: "", colour: "ratio", sort: "order", view: "step",
  text: "", rmin: "", rmax: "", smin: "", cmin: "", finish: "", theme: "",
};

export function readState(defaults = DEFAULTS) {
  const given = new URLSearchParams(location.hash.slice(1));
  const state = { ...defaults };
  for (const key of Object.keys(defaults)) if (given.has(key)) state[key] = given.get(key);
  return state;
}

export function writeState(state, defaults = DEFAULTS) {
  const changed = Object.entries(state).filter(([key, value]) => value !== defaults[key]);
  const hash = `#${new URLSearchParams(changed)}`;
  if (hash !== location.hash) history.replaceState(null, "", hash);
}

export function showTheme(theme) {
  if (theme) document.documentElement.dataset.theme = theme;
}

/** The theme that is not shown now. */
export function otherTheme(theme) {
  const dark = (theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
  return dark ? "light" : "dark";
}
