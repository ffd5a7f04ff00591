// The timeline as SVG: a lane for the trainer and for each engine on one axis, with faults and restarts.

import { draggable, half, readable, svg, ticks } from "./chart.js";
import { number } from "./measures.js";
import { element, plainText } from "./text.js";

const LEFT = 172;
const RIGHT = 32;
const LANE = 46;
const GAP = 12;
const TOP = 8;
const PHASES = { warm_start: "warm start", generate: "waits for rollouts", transfer: "moves the batch", update: "updates", weight_sync: "weight transfer" };
const STEPS_S = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400];

export function clock(seconds, withDate = false) {
  const at = new Date(seconds * 1000);
  const time = at.toLocaleTimeString("en-GB");
  return withDate ? `${at.getFullYear()}-${String(at.getMonth() + 1).padStart(2, "0")}-${String(at.getDate()).padStart(2, "0")} ${time}` : time;
}

const phaseName = (name) => PHASES[name] ?? name;
const phaseClass = (name) => (name in PHASES ? name : "other-phase");
const percent = (share) => `${number(Math.round(1000 * share) / 10)}%`;

export class Timeline {
  /** `zoom(start, stop)` is called with Unix times, or without to see all. */
  constructor(box, tooltip, zoom) {
    Object.assign(this, { box, tooltip, zoom, at: null, lane: 0 });
    const label = "Timeline; arrow keys move through time and lanes, + zooms in and - shows all";
    readable(box, label, (key) => this.key(key), () => this.leave());
  }

  draw(data) {
    this.data = data;
    this.width = Math.max(480, Math.floor(this.box.clientWidth));
    const lanes = 1 + data.engines.length;
    this.height = TOP + lanes * (LANE + GAP) + 22;
    const perS = (this.width - LEFT - RIGHT) / (data.stop - data.start);
    this.x = (s) => LEFT + (s - data.start) * perS;
    this.value = (px) => data.start + (px - LEFT) / perS;
    const root = svg("svg", { width: this.width, height: this.height, role: "img", "aria-label": "Timeline of trainer and engines" });
    this.axis(root);
    const plot = svg("svg", { x: LEFT, y: 0, width: this.width - LEFT - RIGHT, height: this.height, viewBox: `${LEFT} 0 ${this.width - LEFT - RIGHT} ${this.height}` });
    root.append(plot);
    this.trainer(root, plot);
    this.most = Math.max(...data.engines.flatMap((engine) => engine.load), 1e-9);
    this.rows = Math.max(1, ...data.engines.map((engine) => (engine.bars ? packed(engine.bars).count : 1)));
    data.engines.forEach((engine, index) => this.engine(root, plot, engine, this.top(index + 1)));
    this.events(plot);
    this.cross = svg("line", { y1: TOP, y2: this.height - 20, visibility: "hidden" }, "cross");
    root.append(this.cross);
    root.addEventListener("pointermove", (event) => this.hover(event));
    root.addEventListener("pointerleave", () => this.leave());
    const unix = (px) => data.origin + this.value(px);
    draggable(root, { left: LEFT, right: RIGHT }, unix, (a, b) => this.zoom(a, b), () => this.zoom());
    this.box.replaceChildren(root, this.legend());
    if (this.at !== null) this.choose(this.at, this.lane);
  }

  top(lane) {
    return TOP + lane * (LANE + GAP);
  }

  axis(root) {
    const { origin, start, stop } = this.data;
    const count = Math.max(3, Math.floor((this.width - LEFT) / 110));
    const step = STEPS_S.find((each) => (stop - start) / each <= count) ?? 86400 * Math.ceil((stop - start) / 86400 / count);
    const shift = 60 * new Date(origin * 1000).getTimezoneOffset();
    const first = Math.ceil((origin + start - shift) / step) * step + shift;
    const whole = [];
    for (let at = first; at <= origin + stop; at += step) whole.push(at - origin);
    const few = whole.length < 2;
    for (const at of few ? ticks(start, stop, count) : whole) {
      const x = this.x(at);
      root.append(svg("line", { x1: x, x2: x, y1: TOP, y2: this.height - 20 }, "grid"));
      const label = svg("text", { x, y: this.height - 5, "text-anchor": "middle" });
      label.textContent = few ? `${number(at)} s` : clock(origin + at, step >= 43200);
      root.append(label);
    }
  }

  label(root, top, name, detail) {
    const title = svg("text", { x: 14, y: top + 19 }, "lane");
    const shown = plainText(name);
    title.textContent = shown.length > 22 ? `${shown.slice(0, 21)}…` : shown;
    const text = svg("text", { x: 14, y: top + 35 });
    text.textContent = detail;
    root.append(title, text, svg("line", { x1: 14, x2: this.width - RIGHT, y1: top + LANE, y2: top + LANE }, "lane-line"));
  }

  /** The phases of each step, or, of many steps, their shares in each part of the time, on top of each other. */
  trainer(root, plot) {
    const { phases, num_steps: steps } = this.data.trainer;
    const waiting = phases.find((phase) => phase.name === "generate");
    const detail = steps ? `waits for rollouts ${percent(waiting?.share ?? 0)}` : "no step with a time";
    this.label(root, TOP, "trainer", detail);
    const listed = this.data.trainer.steps;
    for (const step of listed) {
      let from = step.start;
      for (const [name, seconds] of Object.entries(step.seconds)) {
        const width = Math.max(0.5, this.x(from + seconds) - this.x(from));
        plot.append(svg("rect", { x: this.x(from), y: TOP, width, height: LANE }, phaseClass(name)));
        from += seconds;
      }
    }
    if (listed.length) return;
    const below = new Float64Array(phases[0]?.load.length ?? 0);
    for (const { name, load } of phases) {
      plot.append(this.columns(load, below, LANE, TOP, phaseClass(name)));
      load.forEach((share, i) => { below[i] += share; });
    }
  }

  columns(load, below, height, top, className) {
    const { start, stop } = this.data;
    const width = (stop - start) / load.length;
    let path = "";
    load.forEach((share, i) => {
      if (share <= 0) return;
      const [x0, x1] = [this.x(start + i * width), this.x(start + (i + 1) * width)];
      const bottom = top + LANE - (below ? below[i] : 0) * height;
      path += `M${x0.toFixed(2)},${bottom.toFixed(1)}V${(bottom - share * height).toFixed(1)}H${x1.toFixed(2)}V${bottom.toFixed(1)}Z`;
    });
    return svg("path", { d: path }, className);
  }

  engine(root, plot, engine, top) {
    this.label(root, top, engine.name, `idle ${percent(1 - engine.busy)} · ${number(engine.num)} requests`);
    for (const [from, to] of engine.down) {
      plot.append(svg("rect", { x: this.x(from), y: top, width: Math.max(1, this.x(to) - this.x(from)), height: LANE }, "down"));
    }
    if (!engine.bars) {
      plot.append(this.columns(engine.load.map((each) => each / this.most), null, LANE - 4, top, "load"));
      return;
    }
    const [sent, answered, step, serial] = engine.bars;
    const { rows } = packed(engine.bars);
    const height = (LANE - 2) / this.rows;
    sent?.forEach((from, i) => {
      const className = serial[i] < 0 ? "request held-out" : `request ${step[i] % 2 ? "odd" : "even"}`;
      const [x, y] = [this.x(from), top + LANE - (rows[i] + 1) * height];
      const width = Math.max(1, this.x(answered[i]) - x - 0.5);
      plot.append(svg("rect", { x, y, width, height: Math.max(0.7, height - (height > 3 ? 1 : 0)) }, className));
    });
  }

  events(plot) {
    for (const event of this.data.events) {
      const x = this.x(event.time_s);
      const lane = this.data.engines.findIndex((engine) => engine.name === event.engine);
      const whole = { restart: [TOP, this.height - 22], start: [TOP, TOP + LANE] }[event.kind];
      const [y1, y2] = whole ?? [this.top(lane + 1), this.top(lane + 1) + LANE];
      const kind = whole ? event.kind : event.text === "serves" ? "serves" : "lost";
      plot.append(svg("line", { x1: x, x2: x, y1, y2 }, `event ${kind}`));
    }
  }

  /** Do what a key says; return whether it says something. */
  key(name) {
    if (!this.data) return false;
    const { origin, start, stop } = this.data;
    const [along, down] = { ArrowRight: [1, 0], ArrowLeft: [-1, 0], ArrowDown: [0, 1], ArrowUp: [0, -1] }[name] ?? [];
    if (name === "+") this.zoom(...half(this.at ?? (start + stop) / 2, start, stop).map((s) => origin + s));
    else if (name === "-") this.zoom();
    else if (along === undefined) return false;
    else this.choose(this.at === null ? start : this.at + (along * (stop - start)) / 100, this.lane + down);
    return true;
  }

  /** Show what the lane has at a time. */
  choose(at, lane) {
    const { start, stop, engines } = this.data;
    const [time, place] = [Math.min(Math.max(at, start), stop), Math.min(Math.max(lane, 0), engines.length)];
    const box = this.box.querySelector("svg").getBoundingClientRect();
    // Half a pixel more, so that rounding does not lead out of the lane's ends.
    const x = Math.min(Math.max(this.x(time), LEFT + 0.5), this.width - RIGHT - 0.5);
    this.hover({ clientX: box.left + x, clientY: box.top + this.top(place) + LANE / 2 });
    Object.assign(this, { at: time, lane: place });
  }

  hover(event) {
    const box = this.box.querySelector("svg").getBoundingClientRect();
    const px = event.clientX - box.left;
    const lane = Math.floor((event.clientY - box.top - TOP) / (LANE + GAP));
    if (px < LEFT || px > this.width - RIGHT) return this.leave();
    const at = this.value(px);
    for (const end of ["x1", "x2"]) this.cross.setAttribute(end, px);
    this.cross.setAttribute("visibility", "visible");
    const list = element("dl");
    const row = (name, value) => list.append(element("dt", "", plainText(name)), element("dd", "", plainText(value)));
    const near = this.data.events.filter((each) => Math.abs(this.x(each.time_s) - px) < 4);
    if (lane === 0) this.aboutStep(at, row);
    const engine = this.data.engines[lane - 1];
    if (engine) this.aboutEngine(engine, at, event.clientY - box.top - this.top(lane), row);
    this.tooltip.show(`${clock(this.data.origin + at)} · ${number(at)} s after the start`, list, event, near.map(describe));
  }

  aboutStep(at, row) {
    const step = this.data.trainer.steps.find((each) => each.start <= at && at <= each.stop);
    if (step) {
      if (step.step) row("step", String(step.step));
      for (const [name, seconds] of Object.entries(step.seconds)) row(phaseName(name), `${number(seconds)} s`);
      if (step.last) row("last request of its batch", `${step.last.engine}, prompt ${step.last.serial}`);
      return;
    }
    const { start, stop } = this.data;
    for (const { name, load } of this.data.trainer.phases) {
      const share = load[Math.min(load.length - 1, Math.floor(((at - start) / (stop - start)) * load.length))];
      if (share > 0) row(phaseName(name), percent(share));
    }
  }

  aboutEngine(engine, at, y, row) {
    row("engine", engine.name);
    const { start, stop } = this.data;
    if (engine.down.some(([from, to]) => from <= at && at <= to)) row("state", "lost");
    if (!engine.bars) {
      const place = Math.min(engine.load.length - 1, Math.floor(((at - start) / (stop - start)) * engine.load.length));
      row("requests in flight", number(engine.load[place]));
      return;
    }
    const [sent = [], answered, step, serial, tokens, responses] = engine.bars;
    const open = sent.map((_, i) => i).filter((i) => sent[i] <= at && at <= answered[i]);
    row("requests in flight", String(open.length));
    const { rows } = packed(engine.bars);
    const wanted = Math.floor((LANE - y) / ((LANE - 2) / this.rows));
    const i = open.find((each) => rows[each] === wanted);
    if (i === undefined) return;
    row("prompt", serial[i] < 0 ? "held out" : String(serial[i]));
    row("batch of step", String(step[i]));
    row("responses", String(responses[i]));
    row("tokens", String(tokens[i]));
    row("took", `${number(answered[i] - sent[i])} s`);
  }

  leave() {
    this.at = null;
    this.cross?.setAttribute("visibility", "hidden");
    this.tooltip.hide();
  }

  legend() {
    const legend = element("div", "legend");
    const entries = this.data.trainer.phases.map(({ name, share }) => [phaseClass(name), `${phaseName(name)} ${percent(share)}`]);
    const { engines } = this.data;
    if (engines.length) entries.push(["request", engines[0].bars ? "request" : `requests in flight, up to ${number(this.most)} at a time`]);
    if (engines.some((engine) => engine.down.length)) entries.push(["down", "engine lost"]);
    for (const [className, text] of entries) {
      const item = element("span", "key-item");
      const sample = svg("svg", { width: 14, height: 11, "aria-hidden": true });
      sample.append(svg("rect", { width: 14, height: 11, rx: 2 }, className));
      item.append(sample, plainText(text));
      legend.append(item);
    }
    return legend;
  }
}

export function describe(event) {
  return [event.kind === "engine" ? `${event.engine}: ${event.text}` : event.text, event.reason];
}

/** A row for each request, so that requests in flight at the same time are above each other. */
function packed(bars) {
  if (bars.packed) return bars.packed;
  const ends = [];
  const rows = (bars[0] ?? []).map((sent, i) => {
    let row = ends.findIndex((end) => end <= sent);
    if (row < 0) row = ends.length;
    ends[row] = bars[1][i];
    return row;
  });
  bars.packed = { rows, count: ends.length };
  return bars.packed;
}
