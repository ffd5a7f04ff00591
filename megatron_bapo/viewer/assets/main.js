// The page: reads the state from the URL, loads what it names, and draws it again when it changes.

import { LEVELS, limitOf, MARKS, MEASURES, number } from "./measures.js";
import { PromptList, shownGroups, SORTS, wholeRows } from "./prompts.js";
import { ResponseView } from "./response.js";
import { openSource, Refused } from "./source.js";
import { DEFAULTS, otherTheme, readState, showTheme, writeState } from "./state.js";
import { appendText, element } from "./text.js";
import { Tooltip } from "./tooltip.js";

const byId = (id) => document.getElementById(id);
const source = openSource();
const tooltip = new Tooltip(byId("tooltip"));
const list = new PromptList(byId("prompts"), byId("runway"), (index) => chooseGroup(index));
const FILTERS = { text: "text", "reward-min": "rmin", "reward-max": "rmax", "stale-min": "smin", "clipped-min": "cmin", finish: "finish" };
const KEYS = [
  ["j / k", "next / previous prompt"], ["] / [", "next / previous step"], ["/", "search the text"],
  ["c", "the same prompt over steps"], ["← / →", "previous / next token, in a response"], ["Esc", "close the numbers"],
];

let state = readState();
let runs = [];
let steps = [];
/** What is loaded of the step; null until its first page has come. */
let data = null;
let groups = [];
let found = null;
let views = [];
let drawing = 0;
let loads = 0;
let searches = 0;

function say(text) {
  byId("message").textContent = text;
}

function guarded(action) {
  return (...given) => Promise.resolve(action(...given)).catch((error) => say(String(error.message ?? error)));
}

function set(changes) {
  Object.assign(state, changes);
  writeState(state);
}

async function loadStep() {
  const load = ++loads;
  data = null;
  found = null;
  for await (const page of source.step(Number(state.step))) {
    if (load !== loads) return;
    if (!data) data = { ...page, loaded: 0, columns: {} };
    for (const [name, values] of Object.entries(page.columns)) (data.columns[name] ??= []).push(...values);
    data.loaded = page.end;
    // A search needs the whole step; everything else is drawn as it comes.
    if (data.isShown || state.text) showList();
    else await showAll();
  }
  if (state.text) await search();
  showList();
}

async function search() {
  const number = ++searches;
  const rows = state.text ? new Set(await source.search(Number(state.step), state.text)) : null;
  if (number !== searches || !data) return;
  found = rows;
  await showAll();
}

function chosenGroup() {
  return groups.findIndex((group) => group.rows.includes(Number(state.row)));
}

function showList() {
  if (!data) return;
  const rows = wholeRows(data);
  groups = shownGroups(data.columns, rows, state, found);
  const responses = groups.reduce((sum, group) => sum + group.passing.length, 0);
  const more = rows < data.total ? `, ${number(data.total - rows)} more loading` : "";
  byId("count").textContent = `${number(groups.length)} prompts, ${number(responses)} responses${more}`;
  const chosen = chosenGroup();
  list.show(data.columns, groups, chosen);
  byId("place").textContent = chosen < 0 ? "" : `prompt ${chosen + 1} of ${groups.length}`;
  byId("previous").disabled = chosen <= 0;
  byId("next").disabled = chosen < 0 || chosen >= groups.length - 1;
}

/** Draw the page, unless what it shows is yet to be loaded. */
async function showAll() {
  if (!data) return;
  showList();
  const { header } = data;
  byId("step-facts").textContent =
    `policy version ${number(header.policy_version)} · ${header.objective} · ` +
    `${number(data.total)} of ${number(header.num_groups * header.n)} responses`;
  const mayCome = data.loaded < data.total && (!groups.length || Number(state.row) >= wholeRows(data));
  data.isShown = chosenGroup() >= 0 || !mayCome;
  if (!data.isShown) return;
  if (groups.length && chosenGroup() < 0) set({ row: String(groups[0].passing[0]), token: "" });
  showList();
  await showGroup();
}

async function showGroup() {
  if (!data) return;
  const draw = ++drawing;
  tooltip.hide();
  for (const view of views) view.close();
  views = [];
  const group = groups[chosenGroup()];
  byId("responses").replaceChildren();
  byId("prompt-text").replaceChildren();
  byId("prompt").hidden = !group;
  say(group ? "" : "No response passes the filters.");
  if (!group) return;
  const step = Number(state.step);
  const prompt = source.response(step, group.rows[0]);
  if (state.view === "history") await showHistory(step, group, draw);
  else byId("responses").append(lane(data.columns, step, group.passing, (row) => row));
  const shown = await prompt;
  if (draw !== drawing) return;
  showPrompt(shown);
  await showToken();
}

/** Responses side by side; `index` gives the place of a row in the columns. */
function lane(columns, step, rows, index) {
  const box = element("div", "lane");
  for (const row of rows) {
    const view = new ResponseView(source, columns, { step, row, index: index(row) }, recoloured);
    views.push(view);
    box.append(view.element);
  }
  return box;
}

async function showHistory(step, group, draw) {
  const { columns: own, loaded } = data;
  const { steps: seen, problems } = await source.history(step, group.rows[0]);
  for (const { step: each, rows } of seen) {
    let columns = own;
    let start = 0;
    if (each !== step || rows.at(-1) >= loaded) {
      start = rows[0];
      try {
        ({ columns } = await source.rows(each, start, rows.at(-1) - start + 1));
      } catch (error) {
        if (!(error instanceof Refused)) throw error;
        problems.push(error.message);
        continue;
      }
    }
    if (draw !== drawing) return;
    const rewards = rows.map((row) => columns.reward[row - start]);
    const mean = rewards.reduce((sum, reward) => sum + reward, 0) / rewards.length;
    const title = element("h2", "step-title", `Step ${each}`);
    title.append(element("span", "", ` mean reward ${number(mean)} · ${rows.length} responses`));
    byId("responses").append(title, lane(columns, each, rows, (row) => row - start));
  }
  if (draw === drawing) say(problems.join("\n"));
}

function showPrompt(prompt) {
  const box = byId("prompt-text");
  for (const message of prompt.messages) {
    const content = appendText(element("div", "content"), message.content);
    if (message.num_cut) content.append(element("span", "code", `${message.num_cut} more characters`));
    const whole = element("div", "message");
    whole.append(appendText(element("span", "role"), message.role), content);
    box.append(whole);
  }
  const truth = element("div", "message truth");
  truth.append(element("span", "role", "ground truth"), appendText(element("div", "content"), prompt.ground_truth));
  const id = element("p", "id");
  box.append(truth, appendText(id, `${prompt.prompt_id} · ${prompt.data_source}`));
}

const recoloured = (() => {
  let waiting = false;
  return () => {
    if (waiting) return;
    waiting = true;
    queueMicrotask(() => {
      waiting = false;
      recolour();
    });
  };
})();

function recolour() {
  const measure = state.colour;
  const { diverging, least, show, label } = MEASURES[measure];
  const limit = limitOf(views.flatMap((view) => view.values(measure)), least);
  for (const view of views) view.colour(measure, limit);
  const legend = byId("legend");
  legend.replaceChildren();
  if (limit > 0) {
    const ends = diverging ? [show(-limit), show(limit)] : [show(0), show(limit)];
    const names = [...(diverging ? [...Array(LEVELS).keys()].reverse().map((i) => `n${i + 1}`) : []), "p0"];
    for (let i = 1; i <= LEVELS; i++) names.push(`p${i}`);
    const scale = element("span", "scale");
    scale.append(...names.map((name) => element("i", name)));
    legend.append(element("span", "", ends[0]), scale, element("span", "", ends[1]));
  } else if (measure !== "none") legend.append(element("span", "", `${label} is ${show(0)} everywhere`));
  const seen = views.reduce((bits, view) => bits | view.marks(), 0);
  for (const mark of MARKS.filter(({ bit }, i) => i < 4 || seen & bit)) legend.append(element("span", `key ${mark.name}`, mark.name));
}

async function showToken() {
  if (!state.token) return;
  const [row, index] = state.token.split(".").map(Number);
  const view = views.find((each) => each.place.row === row && String(each.place.step) === state.step);
  if (!view || !(index >= 0)) return;
  await view.loadUntil(index);
  pick(view, index);
}

/** Choose a token: it is part of the URL, and its numbers are shown. */
function pick(view, index) {
  const span = view.spans[index];
  if (!span) return;
  document.querySelector(".t[aria-current]")?.removeAttribute("aria-current");
  span.setAttribute("aria-current", "true");
  span.scrollIntoView({ block: "nearest", inline: "nearest" });
  if (String(view.place.step) === state.step) set({ token: `${view.place.row}.${index}` });
  view.current = index;
  tooltip.show(view, index);
}

const chooseGroup = guarded(async (index) => {
  if (!data || index < 0 || index >= groups.length) return;
  data.isShown = true;
  set({ row: String(groups[index].passing[0]), token: "" });
  showList();
  await showGroup();
});

const chooseStep = guarded(async (step) => {
  if (!steps.includes(step)) return;
  set({ step: String(step), token: "" });
  showControls();
  await loadStep();
});

const applyFilters = guarded(async () => {
  const { text } = state;
  for (const [id, key] of Object.entries(FILTERS)) state[key] = byId(id).value;
  writeState(state);
  if (state.text !== text) await search();
  else await showAll();
});

function showControls() {
  for (const [id, key] of Object.entries(FILTERS)) byId(id).value = state[key];
  for (const id of ["step", "colour", "sort"]) byId(id).value = state[id];
  byId("run-choice").value = state.run;
  const place = steps.indexOf(Number(state.step));
  byId("previous-step").disabled = place <= 0;
  byId("next-step").disabled = place >= steps.length - 1;
  byId("by-response").setAttribute("aria-pressed", String(state.view !== "history"));
  byId("by-step").setAttribute("aria-pressed", String(state.view === "history"));
  showTheme(state.theme);
}

const compare = guarded(async (view) => {
  set({ view, token: "" });
  showControls();
  await showGroup();
});

function viewOf(target) {
  return views.find((view) => view.body.contains(target));
}

function onKey(event) {
  if (byId("help").open) return;
  const typing = event.target.matches?.("input, select");
  if (event.key === "Escape") {
    tooltip.hide();
    if (typing) event.target.blur();
    return;
  }
  if (typing || event.ctrlKey || event.metaKey || event.altKey) return;
  const move = { j: 1, k: -1, ArrowDown: 1, ArrowUp: -1 }[event.key];
  const step = { "]": 1, "[": -1 }[event.key];
  const token = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  const inList = event.target === byId("prompts");
  if (move && (event.key.length === 1 || inList)) chooseGroup(chosenGroup() + move);
  else if (step) chooseStep(steps[steps.indexOf(Number(state.step)) + step]);
  else if (token && viewOf(event.target)) {
    const view = viewOf(event.target);
    pick(view, Math.max(0, (view.current ?? -1) + token));
  } else if (event.key === "/") byId("text").focus();
  else if (event.key === "c") compare(state.view === "history" ? "step" : "history");
  else if (event.key === "?") byId("help").showModal();
  else return;
  event.preventDefault();
}

function listen() {
  let timer = 0;
  for (const id of Object.keys(FILTERS)) {
    byId(id).addEventListener("input", () => {
      clearTimeout(timer);
      timer = setTimeout(applyFilters, 200);
    });
  }
  byId("filters").addEventListener("submit", (event) => event.preventDefault());
  byId("reset").addEventListener("click", () => {
    for (const id of Object.keys(FILTERS)) byId(id).value = "";
    applyFilters();
  });
  byId("sort").addEventListener("change", guarded(async () => { set({ sort: byId("sort").value }); showList(); }));
  byId("colour").addEventListener("change", () => { set({ colour: byId("colour").value }); recolour(); });
  byId("run-choice").addEventListener("change", () => {
    location.hash = new URLSearchParams({ ...(state.theme && { theme: state.theme }), run: byId("run-choice").value });
  });
  byId("step").addEventListener("change", () => chooseStep(Number(byId("step").value)));
  for (const [id, by] of [["previous-step", -1], ["next-step", 1]]) {
    byId(id).addEventListener("click", () => chooseStep(steps[steps.indexOf(Number(state.step)) + by]));
  }
  byId("previous").addEventListener("click", () => chooseGroup(chosenGroup() - 1));
  byId("next").addEventListener("click", () => chooseGroup(chosenGroup() + 1));
  byId("by-response").addEventListener("click", () => compare("step"));
  byId("by-step").addEventListener("click", () => compare("history"));
  byId("theme").addEventListener("click", () => {
    set({ theme: otherTheme(state.theme) });
    showControls();
  });
  byId("help-button").addEventListener("click", () => byId("help").showModal());
  byId("help").addEventListener("click", () => byId("help").close());
  const responses = byId("responses");
  responses.addEventListener("pointerover", (event) => {
    const span = event.target.closest?.(".t");
    if (span) tooltip.show(viewOf(span), span.index);
  });
  responses.addEventListener("pointerleave", () => tooltip.hide());
  responses.addEventListener("click", (event) => {
    const span = event.target.closest?.(".t");
    if (span) pick(viewOf(span), span.index);
  });
  document.addEventListener("keydown", onKey);
  addEventListener("hashchange", guarded(open));
}

async function openRun() {
  source.run = Number(state.run);
  const { name, steps: found, message } = await source.rollouts();
  steps = found;
  data = null;
  document.title = `${name} · rollouts`;
  byId("run").textContent = name;
  byId("step").replaceChildren(...steps.map((step) => new Option(step, step)));
  document.body.classList.toggle("no-rollouts", !steps.length);
  say(message ?? "");
}

/** The state in the URL, without values that nothing has. */
function knownState() {
  const given = readState();
  const choices = { run: [...runs.keys()].map(String), colour: Object.keys(MEASURES), sort: Object.keys(SORTS) };
  for (const [key, known] of Object.entries(choices)) if (!known.includes(given[key])) given[key] = DEFAULTS[key];
  return given;
}

async function open() {
  const before = state.step;
  const { run } = state;
  state = knownState();
  if (state.run !== run || !byId("run").textContent) await openRun();
  if (!steps.length) return;
  if (!steps.includes(Number(state.step)) || !state.step) state.step = String(steps.at(-1));
  showControls();
  if (data && before === state.step) {
    await (state.text ? search() : ((found = null), showAll()));
  } else await loadStep();
}

const start = guarded(async () => {
  runs = await source.runs();
  byId("run").textContent = "";
  byId("pages").hidden = !source.isLive;
  byId("run-choice").hidden = runs.length < 2;
  byId("run").hidden = runs.length > 1;
  byId("run-choice").append(...runs.map(({ name }, index) => new Option(name, index)));
  byId("colour").append(...Object.entries(MEASURES).map(([name, { label }]) => new Option(label, name)));
  byId("sort").append(...Object.entries(SORTS).map(([name, { label }]) => new Option(label, name)));
  const keys = element("dl");
  for (const [key, text] of KEYS) keys.append(element("dt", "", key), element("dd", "", text));
  byId("help").append(element("h2", "", "Keys"), keys);
  listen();
  await open();
});

start();
