// A figure as SVG: curves or stacked areas, axes, a crosshair with the numbers, and zoom by dragging.

import { number } from "./measures.js";
import { element, plainText } from "./text.js";

const NS = "http://www.w3.org/2000/svg";
const HEIGHT = 216;
const MARGIN = { left: 52, right: 12, top: 10, bottom: 24 };
const DASHES = ["", "7 4", "2 3", "10 3 2 3", "1 4", "12 5"];
const STRIPE = 9;
const FEW_POINTS = 16;
const SAME_PX = 1.5;

export function svg(tag, attributes = {}, className = "") {
  const created = document.createElementNS(NS, tag);
  for (const [name, value] of Object.entries(attributes)) created.setAttribute(name, value);
  if (className) created.setAttribute("class", className);
  return created;
}

/** At most about `count` round numbers between two numbers. */
export function ticks(low, high, count) {
  const rough = (high - low) / count;
  if (!(rough > 0)) return [low];
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= rough);
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) found.push(Number((i * step).toPrecision(12)));
  return found;
}

/** Draw a line in one of the styles that tell curves of a colour apart: dashes, and the same ones as thin lines. */
function dashed(line, style) {
  const dash = DASHES[style % DASHES.length];
  if (dash) line.setAttribute("stroke-dasharray", dash);
  line.classList.toggle("thin", Math.floor(style / DASHES.length) % 2 === 1);
}

function logTicks(low, high) {
  const found = [];
  const many = high - low > 6;
  for (let power = Math.floor(low); power <= high; power++) {
    for (const factor of many || high - low > 2 ? [1] : [1, 2, 5]) {
      const each = power + Math.log10(factor);
      if (each >= low - 1e-9 && each <= high + 1e-9) found.push(10 ** each);
    }
  }
  return many ? found.filter((_, i) => i % Math.ceil(found.length / 6) === 0) : found;
}

/** The plot of which a part is being chosen. */
let dragged = null;

/** Wait until no part of a plot is being chosen, because a plot that is drawn anew would end that. */
export async function released() {
  while (dragged?.isConnected) await new Promise((resolve) => setTimeout(resolve, 100));
}

/** Drag over a plot to choose a part of its x axis; `value` maps pixels to the axis. */
export function draggable(root, { left, right }, value, choose, reset) {
  let from = null;
  const shade = svg("rect", { y: 0, height: "100%", visibility: "hidden" }, "shade");
  root.append(shade);
  const place = (event) => {
    const box = root.getBoundingClientRect();
    return Math.min(Math.max(event.clientX - box.left, left), box.width - right);
  };
  root.onpointerdown = (event) => {
    if (event.button) return;
    from = place(event);
    dragged = root;
    root.setPointerCapture(event.pointerId);
  };
  root.addEventListener("pointermove", (event) => {
    if (from === null) return;
    const to = place(event);
    shade.setAttribute("x", Math.min(from, to));
    shade.setAttribute("width", Math.abs(to - from));
    shade.setAttribute("visibility", "visible");
  });
  root.onpointerup = (event) => {
    if (from === null) return;
    const [a, b] = [from, place(event)].sort((x, y) => x - y);
    from = null;
    dragged = null;
    shade.setAttribute("visibility", "hidden");
    if (b - a > 5) choose(value(a), value(b));
  };
  root.onpointercancel = () => {
    from = null;
    dragged = null;
    shade.setAttribute("visibility", "hidden");
  };
  root.ondblclick = reset;
}

/** Let the keyboard reach a figure: `act(key)` returns whether the key does something, `leave` is called in the end. */
export function readable(box, label, act, leave) {
  box.tabIndex = 0;
  box.setAttribute("role", "group");
  box.setAttribute("aria-label", label);
  box.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "Escape") leave();
    else if (act(event.key)) event.preventDefault();
  });
  box.addEventListener("blur", leave);
}

/** The half of a range that is around a place. */
export function half(place, low, high) {
  const width = (high - low) / 2;
  const start = Math.min(Math.max(place - width / 2, low), high - width);
  return [start, start + width];
}

export class Chart {
  /** `spec` has the texts of the figure; `zoom(axis, start, stop)` is called with steps, or without to see all. */
  constructor(spec, tooltip, zoom) {
    this.tooltip = tooltip;
    this.zoom = zoom;
    this.spec = spec;
    this.chosen = null;
    this.element = element("figure", "card");
    const title = element("h3", "", spec.title);
    this.unit = element("p", "unit", `${spec.y_label} over ${spec.x_label}`);
    this.box = element("div", "plot");
    readable(this.box, `${spec.title}; arrow keys show the numbers, + zooms in and - shows all`, (key) => this.key(key), () => this.leave());
    this.legend = element("div", "legend");
    this.element.append(title, element("p", "healthy", spec.healthy), this.unit, this.box, this.legend);
  }

  /** Draw curves: `{name, run, x, y, colour, dash}`, in the order in which they lie over each other. */
  draw(spec, curves, range) {
    this.spec = spec;
    this.curves = spec.stacked ? stacked(curves) : curves;
    const width = Math.max(240, Math.floor(this.box.clientWidth));
    const root = svg("svg", { width, height: HEIGHT, role: "img", "aria-label": spec.title, viewBox: `0 0 ${width} ${HEIGHT}` });
    this.scale(width, range);
    this.axes(root, width);
    const plot = svg("svg", {
      x: MARGIN.left, y: 0, width: width - MARGIN.left - MARGIN.right, height: HEIGHT - MARGIN.bottom + 4,
      viewBox: `${MARGIN.left} 0 ${width - MARGIN.left - MARGIN.right} ${HEIGHT - MARGIN.bottom + 4}`,
    });
    root.append(plot);
    if (spec.stacked) this.areas(plot);
    else this.lines(plot);
    if (spec.target !== null) {
      const y = this.y(spec.target);
      plot.append(svg("line", { x1: MARGIN.left, x2: width - MARGIN.right, y1: y, y2: y }, "target"));
    }
    this.cross = svg("line", { y1: MARGIN.top, y2: HEIGHT - MARGIN.bottom, visibility: "hidden" }, "cross");
    this.dots = svg("g");
    root.append(this.cross, this.dots);
    root.addEventListener("pointermove", (event) => this.hover(event));
    root.addEventListener("pointerleave", () => this.leave());
    const sides = { left: MARGIN.left, right: MARGIN.right };
    draggable(root, sides, (px) => this.value(px), (a, b) => this.zoom(spec.x_label, a, b), () => this.zoom(spec.x_label));
    this.box.replaceChildren(root);
    this.showLegend();
    if (this.chosen !== null) this.choose(this.chosen);
  }

  scale(width, range) {
    const xs = this.curves.flatMap((curve) => [curve.x[0], curve.x.at(-1)]);
    let [first, last] = range ?? [Math.min(...xs), Math.max(...xs)];
    if (first === last) [first, last] = [first - 0.5, last + 0.5];
    const left = MARGIN.left + 5;
    const perX = (width - left - MARGIN.right - 5) / (last - first);
    this.x = (x) => left + (x - first) * perX;
    this.value = (px) => first + (px - left) / perX;
    this.range = [first, last];
    this.log = this.spec.log_y && this.curves.some((curve) => curve.y.some((y) => y > 0));
    const finite = (y) => (y === null || Math.abs(y) > 1e300 ? NaN : y);
    const shown = this.log ? (y) => (y > 0 ? Math.log10(finite(y)) : NaN) : finite;
    let low = Infinity;
    let high = -Infinity;
    for (const curve of this.curves) {
      curve.y.forEach((y, i) => {
        const each = shown(y);
        if (Number.isNaN(each) || curve.x[i] < first || curve.x[i] > last) return;
        low = Math.min(low, each);
        high = Math.max(high, each);
      });
    }
    if (this.spec.target !== null) [low, high] = [Math.min(low, this.spec.target), Math.max(high, this.spec.target)];
    if (low > high) [low, high] = [0, 1];
    if (this.spec.stacked) low = 0;
    if (low === high) [low, high] = low === 0 ? [0, 1] : [low - Math.abs(low) / 10, high + Math.abs(high) / 10];
    const pad = (high - low) * 0.06;
    const zero = !this.log && low >= 0 && (low === 0 || this.spec.stacked);
    [low, high] = [zero ? 0 : low - pad, high + pad];
    const perY = (HEIGHT - MARGIN.top - MARGIN.bottom) / (high - low);
    this.y = (y) => HEIGHT - MARGIN.bottom - (shown(y) - low) * perY;
    this.ends = [low, high];
  }

  axes(root, width) {
    const [low, high] = this.ends;
    for (const value of this.log ? logTicks(low, high) : ticks(low, high, 5)) {
      const y = this.y(value);
      root.append(svg("line", { x1: MARGIN.left, x2: width - MARGIN.right, y1: y, y2: y }, "grid"));
      const label = svg("text", { x: MARGIN.left - 6, y: y + 4, "text-anchor": "end" });
      label.textContent = short(value);
      root.append(label);
    }
    for (const value of ticks(...this.range, Math.max(3, Math.floor(width / 50))).filter(Number.isInteger)) {
      const label = svg("text", { x: this.x(value), y: HEIGHT - 6, "text-anchor": "middle" });
      label.textContent = String(value);
      root.append(label);
    }
  }

  lines(plot) {
    const drawn = [];
    for (const curve of this.curves) {
      const points = curve.x.map((x, i) => [this.x(x), this.y(curve.y[i])]);
      // How many earlier curves have this point, too: they would be hidden.
      const under = curve.x.map((x, i) => drawn.filter((at) => Math.abs(at.get(x) - points[i][1]) <= SAME_PX).length);
      const seen = new Map(curve.x.map((x, i) => [x, points[i][1]]));
      for (const [m, path] of pieces(points, under)) {
        const line = svg("path", { d: path, stroke: curve.colour }, m ? "curve shared" : "curve");
        if (m) line.setAttribute("stroke-dasharray", `${STRIPE} ${STRIPE * m}`);
        else dashed(line, curve.dash);
        plot.append(line);
      }
      const lonely = points.filter(([, y], i) => !Number.isNaN(y) && !(points[i - 1]?.[1] >= -1e9) && !(points[i + 1]?.[1] >= -1e9));
      points.forEach(([x, y], i) => {
        if (Number.isNaN(y) || !(curve.x.length <= FEW_POINTS || lonely.includes(points[i]))) return;
        plot.append(svg("circle", { cx: x, cy: y, r: 2.6 + 2.2 * Math.min(under[i], 2), stroke: curve.colour, fill: under[i] ? "none" : curve.colour }, "point"));
      });
      drawn.push(seen);
    }
  }

  areas(plot) {
    for (const curve of this.curves) {
      const upper = curve.x.map((x, i) => `${this.x(x).toFixed(1)},${this.y(curve.y[i]).toFixed(1)}`);
      const lower = curve.x.map((x, i) => `${this.x(x).toFixed(1)},${this.y(curve.y[i] - curve.part[i]).toFixed(1)}`);
      plot.append(svg("path", { d: `M${upper.join("L")}L${lower.reverse().join("L")}Z`, fill: curve.colour }, "area"));
    }
  }

  hover(event) {
    this.showNumbers(this.value(event.clientX - this.box.getBoundingClientRect().left), event);
  }

  /** Do what a key says; return whether it says something. */
  key(name) {
    const xs = [...new Set(this.curves.flatMap((curve) => curve.x))].sort((a, b) => a - b);
    const [low, high] = this.range;
    const shown = xs.filter((x) => x >= low && x <= high);
    const place = shown.length ? nearest(shown, this.chosen ?? low) : -1;
    const moved = { ArrowLeft: place - 1, ArrowRight: place + (this.chosen !== null), Home: 0, End: shown.length - 1 }[name];
    if (name === "+") this.zoom(this.spec.x_label, ...half(this.chosen ?? (low + high) / 2, low, high));
    else if (name === "-") this.zoom(this.spec.x_label);
    else if (moved === undefined) return false;
    else if (shown.length) this.choose(shown[Math.min(Math.max(moved, 0), shown.length - 1)]);
    return true;
  }

  /** Show the numbers of a step that the keys have chosen. */
  choose(x) {
    const box = this.box.getBoundingClientRect();
    this.showNumbers(x, { clientX: box.left + this.x(x), clientY: box.top + HEIGHT / 2 });
    this.chosen = x;
  }

  /** Show the numbers of the step that is nearest, at a place of the page. */
  showNumbers(wanted, place) {
    const near = this.curves.map((curve) => nearest(curve.x, wanted));
    const xs = near.map((i, k) => this.curves[k].x[i]).filter((x) => x >= this.range[0] && x <= this.range[1]);
    if (!xs.length) return this.leave();
    const x = xs.reduce((best, each) => (Math.abs(each - wanted) < Math.abs(best - wanted) ? each : best));
    this.cross.setAttribute("visibility", "visible");
    for (const end of ["x1", "x2"]) this.cross.setAttribute(end, this.x(x));
    const list = element("dl");
    this.dots.replaceChildren();
    this.curves.forEach((curve, k) => {
      const i = near[k];
      // Thinned curves have their extremes at different steps; another step than that of the line is named.
      if (Math.abs(curve.x[i] - x) > (this.range[1] - this.range[0]) / 60) return;
      const value = (curve.part ?? curve.y)[i];
      const name = element("dt", "");
      const chip = element("i", "chip");
      chip.style.background = curve.colour;
      name.append(chip, plainText([curve.run, curve.name].filter(Boolean).join(" · ")));
      list.append(name, element("dd", "", number(value) + (curve.x[i] === x ? "" : ` (${this.spec.x_label} ${curve.x[i]})`)));
      const y = this.y(curve.y[i]);
      if (!Number.isNaN(y)) this.dots.append(svg("circle", { cx: this.x(curve.x[i]), cy: y, r: 3.5, fill: curve.colour }, "dot"));
    });
    this.tooltip.show(`${this.spec.x_label} ${x}`, list, place);
  }

  leave() {
    this.chosen = null;
    this.cross?.setAttribute("visibility", "hidden");
    this.dots?.replaceChildren();
    this.tooltip.hide();
  }

  showLegend() {
    const names = new Map();
    const several = this.curves.some((curve) => curve.run);
    for (const curve of this.curves) {
      if (!names.has(curve.name)) names.set(curve.name, curve);
    }
    this.legend.replaceChildren();
    if (names.size > 1) {
      for (const [name, curve] of names) {
        const item = element("span", "key-item");
        const sample = svg("svg", { width: 22, height: 10, "aria-hidden": true });
        const line = svg("line", { x1: 0, x2: 22, y1: 5, y2: 5, stroke: several ? "currentColor" : curve.colour, "stroke-width": this.spec.stacked && !several ? 9 : 2 });
        dashed(line, curve.dash);
        sample.append(line);
        item.append(sample, plainText(name));
        this.legend.append(item);
      }
    }
    if (this.spec.target !== null) {
      const item = element("span", "key-item");
      const sample = svg("svg", { width: 22, height: 10, "aria-hidden": true });
      sample.append(svg("line", { x1: 0, x2: 22, y1: 5, y2: 5 }, "target"));
      item.append(sample, `target ${number(this.spec.target)}`);
      this.legend.append(item);
    }
  }
}

/** Add up the curves of each run: `y` is where an area ends, `part` its own height. */
function stacked(curves) {
  const sums = new Map();
  return curves.map((curve) => {
    const part = curve.y.map((y) => y ?? 0);
    const below = sums.get(curve.run) ?? part.map(() => 0);
    const y = part.map((value, i) => value + below[i]);
    sums.set(curve.run, y);
    return { ...curve, part, y };
  });
}

/** Paths of the line, each with the number of curves that all of it would hide; gaps end a path. */
function* pieces(points, under) {
  let path = "";
  let before = 0;
  for (let i = 1; i < points.length; i++) {
    const [[x0, y0], [x1, y1]] = [points[i - 1], points[i]];
    const m = Math.min(under[i - 1], under[i]);
    if (path && (Number.isNaN(y0 + y1) || m !== before)) {
      yield [before, path];
      path = "";
    }
    if (Number.isNaN(y0 + y1)) continue;
    path ||= `M${x0.toFixed(1)},${y0.toFixed(1)}`;
    path += `L${x1.toFixed(1)},${y1.toFixed(1)}`;
    before = m;
  }
  if (path) yield [before, path];
}

/** Index of the number that is nearest, in an ascending list. */
function nearest(xs, wanted) {
  let [low, high] = [0, xs.length - 1];
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (xs[middle] < wanted) low = middle;
    else high = middle;
  }
  return wanted - xs[low] <= xs[high] - wanted ? low : high;
}

export function short(value) {
  const size = Math.abs(value);
  if (size && (size < 1e-3 || size >= 1e6)) return value.toExponential(1).replace(".0e", "e").replace("e+", "e").replace("-", "−");
  return String(Number(value.toPrecision(4))).replace("-", "−");
}
