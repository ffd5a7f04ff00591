// The page of runs: asks for what is new every two seconds, and draws what has changed.

import { Chart, released } from "./chart.js";
import { number } from "./measures.js";
import { ask, Refused } from "./source.js";
import { otherTheme, readState, showTheme, writeState } from "./state.js";
import { table } from "./table.js";
import { appendText, element, plainText } from "./text.js";
import { clock, describe, Timeline } from "./timeline.js";

const POLL_MS = 2000;
const NO_METRICS = "No metrics yet: a run writes a row after its first step.";
const NOTHING = { steps: "", warm: "", time: "", hidden: "", timeline: "0", theme: "" };
const AXES = { step: "steps", "warm-start step": "warm" };
const byId = (id) => document.getElementById(id);

const tooltip = {
  show(title, content, event, paragraphs = []) {
    const box = byId("tooltip");
    box.replaceChildren(element("p", "token", title), content);
    for (const [what, reason] of paragraphs) {
      box.append(element("p", "mark", plainText(what)), appendText(element("p", "reason"), reason));
    }
    box.hidden = false;
    const { offsetWidth: width, offsetHeight: height } = box;
    const left = event.clientX + 16 + width < innerWidth ? event.clientX + 16 : event.clientX - width - 16;
    box.style.left = `${Math.max(8, left)}px`;
    box.style.top = `${Math.max(8, Math.min(event.clientY + 14, innerHeight - height - 8))}px`;
  },
  hide() {
    byId("tooltip").hidden = true;
  },
};

let state = readState(NOTHING);
let runs = [];
let palette = [];
const charts = new Map();
const timeline = new Timeline(byId("timeline"), tooltip, (start, stop) => {
  set({ time: start === undefined ? "" : `${start.toFixed(3)}_${stop.toFixed(3)}` });
  shownTime = "";
  soon();
});
let shownTime = "";

function set(changes) {
  Object.assign(state, changes);
  writeState(state, NOTHING);
}

/** The ends of a range in the URL; null without one that the server knows, whose numbers have at most 12 digits. */
function rangeOf(key) {
  const found = state[key].split("_").map(Number);
  return found.length === 2 && found.every((each) => Math.abs(each) < 1e12) && found[0] < found[1] ? found : null;
}

function isHidden(index) {
  return state.hidden.split(",").includes(String(index));
}

function zoom(axis, start, stop) {
  set({ [AXES[axis]]: start === undefined ? "" : `${start.toFixed(2)}_${stop.toFixed(2)}` });
  for (const run of runs) run.version = "";
  soon();
}

async function loadFigures(run, index) {
  const parameters = { version: run.version };
  for (const [key, prefix] of [["steps", ""], ["warm", "warm_"]]) {
    const range = rangeOf(key);
    if (range) Object.assign(parameters, { [`${prefix}start`]: range[0].toFixed(2), [`${prefix}stop`]: range[1].toFixed(2) });
  }
  const asked = JSON.stringify([state.steps, state.warm]);
  const found = await ask(`runs/${index}/figures`, parameters);
  if (asked !== JSON.stringify([state.steps, state.warm])) return false;
  const isNew = found.version !== run.version;
  Object.assign(run, found);
  showState(run);
  return isNew || !found.is_all;
}

/** Whether a file has more rows than were read at once. */
let unread = false;

async function poll() {
  let isNew = false;
  unread = false;
  const problems = [];
  for (const [index, run] of runs.entries()) {
    await reported(problems, run, async () => {
      isNew = (await loadFigures(run, index)) || isNew;
      unread ||= !run.is_all;
      return run.problems;
    });
  }
  await released();
  byId("whole").hidden = !(state.steps || state.warm);
  if (isNew) showFigures();
  const run = runs[Number(state.timeline)];
  await reported(problems, run, loadTimeline);
  say(problems);
}

/** Add what the server says against a run to the problems, so that the rest is shown; nobody there is an error. */
async function reported(problems, run, load) {
  const found = await load().catch((error) => {
    if (!(error instanceof Refused)) throw error;
    return [error.message];
  });
  problems.push(...found.map((problem) => (runs.length > 1 ? `${run.name}: ${problem}` : problem)));
}

let said = "";

function say(lines) {
  const text = [...new Set(lines)].map(plainText).join("\n");
  if (text === said) return; // so that it is not read out again
  said = text;
  byId("message").textContent = text;
}

async function loadTimeline() {
  const index = Number(state.timeline);
  const range = rangeOf("time");
  const wanted = `${index} ${state.time}`;
  const version = shownTime.startsWith(`${wanted} `) ? shownTime.slice(wanted.length + 1) : "";
  const found = await ask(`runs/${index}/timeline`, { version, ...(range && { start: range[0].toFixed(3), stop: range[1].toFixed(3) }) });
  if (wanted !== `${Number(state.timeline)} ${state.time}`) return [];
  unread ||= !found.is_all;
  if (version !== found.version) {
    shownTime = `${wanted} ${found.version}`;
    await released();
    byId("whole-time").hidden = !state.time;
    showTimeline(found);
  }
  return found.problems;
}

let timer = 0;
let isPolling = false;
let isWanted = false;

/** Ask at once, or after what is asked now. */
async function soon() {
  isWanted = true;
  if (isPolling) return;
  isPolling = true;
  clearTimeout(timer);
  try {
    while (isWanted || unread) {
      isWanted = false;
      await poll();
    }
  } catch (error) {
    unread = false;
    say([String(error.message)]);
  }
  isPolling = false;
  timer = setTimeout(soon, POLL_MS);
}

function showState(run) {
  const { state: is } = run;
  const row = is.row.step === undefined ? "no step yet" : is.row.phase === "warm_start" ? `warm-start step ${is.row.step}` : `step ${is.row.step}${is.total_steps ? ` of ${is.total_steps}` : ""}`;
  const minutes = is.row.time_s === undefined ? "" : ` · ${number(Math.round(is.row.time_s / 6) / 10)} min`;
  const written = is.written_s && !is.is_finished ? ` · last row ${clock(is.written_s, Date.now() / 1000 - is.written_s > 43200)}` : "";
  run.about.textContent = plainText(`${row}${minutes}${is.phase ? ` · ${is.phase}` : ""}${written}`);
}

/** The curves of a figure in all runs that are shown; `run` is empty if there is only one. */
function curvesOf(key) {
  const found = [];
  const many = runs.length > 1;
  runs.forEach((run, index) => {
    if (isHidden(index)) return;
    const figure = run.figures.get(key);
    if (!figure) return;
    const name = many ? run.name : "";
    const own = figure.curves.map((curve, i) => ({ ...curve, run: name, colour: palette[(many ? index : i) % palette.length], dash: many ? i : Math.floor(i / palette.length) }));
    found.push(...(many && figure.stacked ? [total(own)] : own));
  });
  return found;
}

/** The parts of several runs cannot be stacked in one figure; their sums can be compared. */
function total(curves) {
  const y = curves[0].x.map((_, i) => curves.reduce((sum, curve) => sum + (curve.y[i] ?? 0), 0));
  return { ...curves[0], name: "total", y, dash: 0 };
}

/** The titles of the figures on the page. */
let laidOut = null;

function showFigures() {
  const sections = new Map();
  for (const run of runs) {
    run.figures = new Map();
    for (const section of run.sections ?? []) {
      if (!sections.has(section.title)) sections.set(section.title, new Map());
      for (const figure of section.figures) {
        run.figures.set(figure.title, figure);
        sections.get(section.title).set(figure.title, figure);
      }
    }
  }
  const wanted = [...sections.values()].flatMap((figures) => [...figures.keys()]);
  if (wanted.join("\n") !== laidOut) layOut(sections);
  laidOut = wanted.join("\n");
  for (const figures of sections.values()) {
    for (const [key, figure] of figures) {
      const curves = curvesOf(key);
      const chart = charts.get(key);
      chart.element.hidden = !curves.length;
      const spec = { ...figure, stacked: figure.stacked && runs.length === 1 };
      if (curves.length) chart.draw(spec, curves, rangeOf(AXES[figure.x_label]));
    }
  }
  showPrompts();
}

function layOut(sections) {
  const box = byId("figures");
  const known = new Map(charts);
  charts.clear();
  box.replaceChildren();
  for (const [title, figures] of sections) {
    if (!figures.size) continue;
    const grid = element("div", "grid");
    for (const [key, figure] of figures) {
      charts.set(key, known.get(key) ?? new Chart(figure, tooltip, zoom));
      grid.append(charts.get(key).element);
    }
    box.append(element("h2", "", title), grid);
  }
  if (!charts.size) box.append(element("p", "hint", NO_METRICS));
}

function showPrompts() {
  const box = byId("prompt-bars");
  box.replaceChildren();
  runs.forEach((run, index) => {
    const { counts, quarantined, num_quarantined: skipped } = run.prompts ?? { counts: [], quarantined: [] };
    const shown = counts.filter(([, count]) => count > 0);
    if (isHidden(index) || !(shown.length || quarantined.length)) return;
    const taken = counts.reduce((sum, [, count]) => sum + count, 0);
    const card = element("div", "card bar-row");
    const title = element("div", "bar-title");
    title.append(element("b", "", plainText(run.name)), element("span", "", `${number(taken)} prompts taken so far`));
    const bar = element("div", "counts");
    const legend = element("div", "legend");
    shown.forEach(([name, count]) => {
      const colour = [...palette, "var(--wrong)", "var(--soft)"][counts.findIndex(([each]) => each === name)];
      const part = element("i");
      part.style.flexGrow = count;
      part.style.background = colour;
      part.title = `${name}: ${count}`;
      bar.append(part);
      const item = element("span", "key-item");
      const chip = element("i", "chip");
      chip.style.background = colour;
      item.append(chip, `${name} ${number(count)}`);
      legend.append(item);
    });
    card.append(title, bar, legend);
    if (quarantined.length) card.append(quarantine(quarantined, skipped));
    box.append(card);
  });
  byId("prompt-section").hidden = !box.children.length;
}

function quarantine(rows, total) {
  const more = element("details", "more");
  const which = total > rows.length ? `, the last ${rows.length} of them` : "";
  more.append(element("summary", "", `${total} quarantined${which}`));
  more.append(table(["prompt", "failures"], rows.map(({ prompt_id: id, failures }) => [["key", id], ["pre", failures.join("\n")]])));
  return more;
}

function showTimeline(found) {
  const hint = byId("timeline-hint");
  const events = byId("events");
  events.replaceChildren();
  byId("timeline").hidden = found.origin === undefined;
  const undated = found.num_undated ? ` ${number(found.num_undated)} requests are left out: their times are not Unix times, as an earlier version wrote them.` : "";
  if (found.origin === undefined) {
    hint.textContent = `Nothing with a time yet: requests.jsonl has a row for each request that an engine served.${undated}`;
    return;
  }
  hint.textContent =
    "Drag to zoom. The trainer waits for engines where it “waits for rollouts”; an engine waits for the trainer, or for " +
    `requests, where its lane is empty.${undated}`;
  timeline.draw(found);
  if (!found.events.length) return;
  const rows = found.events.map((event) => {
    const [what, reason] = describe(event);
    return [["when", clock(found.origin + event.time_s, true)], ["what", what], ["pre", reason]];
  });
  events.append(table(["time", "event", "reason"], rows.reverse()));
}

async function showConfigs() {
  const box = byId("configs");
  if (runs.length < 2) {
    box.append(element("p", "hint", "There is one run. megatron-bapo view RUN_DIR RUN_DIR compares several."));
    return;
  }
  let found;
  try {
    found = await ask("configs");
  } catch (error) {
    box.append(element("p", "hint", plainText(String(error.message))));
    return;
  }
  const { rows, total } = found;
  const about = total ? `${total} keys differ${rows.length < total ? `; the first ${rows.length} are shown` : ""}.` : "The runs have the same configuration.";
  box.append(element("p", "hint", about));
  if (!total) return;
  box.append(table(["key", ...runs.map((run) => run.name)], rows.map(([key, values]) => [["key", key], ...values.map((value) => ["", value])])));
}

async function redraw() {
  await released();
  showFigures();
  shownTime = "";
  soon();
}

function showControls() {
  if (!runs[Number(state.timeline)]) set({ timeline: NOTHING.timeline });
  showTheme(state.theme);
  if (runs.length > 1) runs.forEach((run, index) => run.button.setAttribute("aria-pressed", String(!isHidden(index))));
  byId("timeline-run").value = state.timeline;
}

function toggle(index) {
  const hidden = new Set(state.hidden.split(",").filter(Boolean));
  if (!hidden.delete(String(index))) hidden.add(String(index));
  set({ hidden: [...hidden].join(",") });
  showControls();
  showFigures();
}

function listen() {
  byId("theme").addEventListener("click", () => {
    set({ theme: otherTheme(state.theme) });
    showControls();
  });
  byId("whole").addEventListener("click", () => {
    set({ warm: "" });
    zoom("step");
  });
  byId("whole-time").addEventListener("click", () => timeline.zoom());
  byId("timeline-run").addEventListener("change", () => {
    set({ timeline: byId("timeline-run").value, time: "" });
    soon();
  });
  let resizing = 0;
  addEventListener("resize", () => {
    clearTimeout(resizing);
    resizing = setTimeout(redraw, 150);
  });
  addEventListener("hashchange", () => {
    state = readState(NOTHING);
    for (const run of runs) run.version = "";
    shownTime = "";
    showControls();
    soon();
  });
}

async function start() {
  const found = await ask("runs");
  ({ palette } = found);
  runs = found.runs.map(({ name }, index) => {
    const isOnly = found.runs.length === 1;
    const button = element(isOnly ? "span" : "button", "run");
    const chip = element("i", "chip");
    chip.style.background = palette[index];
    const about = element("span", "about");
    button.append(...(isOnly ? [] : [chip]), element("span", "name", plainText(name)), about);
    if (!isOnly) {
      button.title = "Show or hide the run";
      button.addEventListener("click", () => toggle(index));
    }
    byId("runs").append(button);
    return { name, button, about, version: "", figures: new Map(), problems: [] };
  });
  document.title = `${runs.map((run) => run.name).join(", ")} · run`;
  const choice = byId("timeline-run");
  choice.hidden = runs.length < 2;
  choice.append(...runs.map((run, index) => new Option(run.name, index)));
  listen();
  showControls();
  soon();
  await showConfigs();
}

start().catch((error) => {
  say([String(error.message ?? error)]);
});
