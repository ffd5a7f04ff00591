// What is shown, as part of the URL: a copied URL shows the same.

export const DEFAULTS = {
  run: "0", step: "", row: "0", token: "", colour: "ratio", sort: "order", view: "step",
  text: "", rmin: "", rmax: "", smin: "", cmin: "", finish: "", theme: "",
};

const WRITE_MS = 150;
let writing = 0;
let written = -WRITE_MS;

export function readState(defaults = DEFAULTS) {
  clearTimeout(writing);
  const given = new URLSearchParams(location.hash.slice(1));
  const state = { ...defaults };
  for (const key of Object.keys(defaults)) if (given.has(key)) state[key] = given.get(key);
  return state;
}

/** Put the state into the URL, not too often: a key that is held would make more changes than WebKit takes. */
export function writeState(state, defaults = DEFAULTS) {
  clearTimeout(writing);
  const wait = written + WRITE_MS - performance.now();
  if (wait > 0) {
    writing = setTimeout(writeState, wait, state, defaults);
    return;
  }
  const changed = Object.entries(state).filter(([key, value]) => value !== defaults[key]);
  const hash = `#${new URLSearchParams(changed)}`;
  if (hash === location.hash) return;
  history.replaceState(null, "", hash);
  written = performance.now();
}

/** Show the theme on this page, and on the other one if it is opened next. */
export function showTheme(theme) {
  if (!theme) return;
  document.documentElement.dataset.theme = theme;
  for (const link of document.querySelectorAll(".pages a")) link.hash = new URLSearchParams({ theme });
}

/** The theme that is not shown now. */
export function otherTheme(theme) {
  const dark = (theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
  return dark ? "light" : "dark";
}
