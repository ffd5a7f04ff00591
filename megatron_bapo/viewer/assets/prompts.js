// The list of a step's prompts: filters, order, and rows that exist only while they are seen.

import { number } from "./measures.js";
import { appendText, element } from "./text.js";

const HEIGHT = 66;

export const SORTS = {
  order: { label: "batch order" },
  reward: { label: "mean reward ↑", key: (c, r) => c.reward[r] },
  "reward-down": { label: "mean reward ↓", key: (c, r) => -c.reward[r] },
  length: { label: "longest first", key: (c, r) => -c.num_tokens[r] },
  clipped: { label: "most clipped", key: (c, r) => -clippedShare(c, r) },
  staleness: { label: "most stale", key: (c, r) => -c.mean_staleness[r] },
  difference: { label: "largest log-prob difference", key: (c, r) => -c.mean_log_prob_diff[r] },
};

/** Share of the response's tokens that a bound or the dual clip clips. */
export function clippedShare(columns, row) {
  const clipped = columns.num_upper[row] + columns.num_lower[row] + columns.num_dual[row];
  return clipped / Math.max(1, columns.num_sampled[row]);
}

/** Whether the response passes the filters; `found` are the rows with the text, or null. */
export function passes(columns, row, state, found) {
  const isNumber = (limit) => limit !== "" && !Number.isNaN(Number(limit));
  const below = (value, limit) => isNumber(limit) && !(value >= Number(limit));
  const above = (value, limit) => isNumber(limit) && !(value <= Number(limit));
  return !(
    below(columns.reward[row], state.rmin) ||
    above(columns.reward[row], state.rmax) ||
    below(columns.max_staleness[row], state.smin) ||
    below(100 * clippedShare(columns, row), state.cmin) ||
    (state.finish && columns.finish_reason[row] !== state.finish) ||
    (found && !found.has(row))
  );
}

/** The rows from the first one on whose groups are loaded to their ends; a page of rows may end within a group. */
export function wholeRows({ columns, loaded, total }) {
  let rows = loaded;
  if (loaded < total) while (rows > 0 && columns.group[rows - 1] === columns.group[loaded - 1]) rows--;
  return rows;
}

/** The groups of the first `rows` rows with a response that passes, in order: `{rows, passing}` each. */
export function shownGroups(columns, rows, state, found) {
  const groups = [];
  for (let row = 0; row < rows; row++) {
    if (row === 0 || columns.group[row] !== columns.group[row - 1]) groups.push({ rows: [], passing: [] });
    groups.at(-1).rows.push(row);
    if (passes(columns, row, state, found)) groups.at(-1).passing.push(row);
  }
  const shown = groups.filter((group) => group.passing.length);
  const { key } = SORTS[state.sort] ?? SORTS.order;
  if (key) {
    for (const group of shown) {
      group.key = group.passing.reduce((sum, row) => sum + (key(columns, row) || 0), 0) / group.passing.length;
    }
    shown.sort((one, other) => one.key - other.key);
  }
  return shown;
}

/** A list of which only the rows in sight are elements. */
export class PromptList {
  constructor(list, runway, choose) {
    Object.assign(this, { list, runway, choose, groups: [], chosen: -1 });
    list.addEventListener("scroll", () => this.#draw());
    new ResizeObserver(() => this.#draw()).observe(list);
  }

  show(columns, groups, chosen) {
    Object.assign(this, { columns, groups, chosen });
    this.runway.style.height = `${HEIGHT * groups.length}px`;
    const top = HEIGHT * chosen;
    const { scrollTop, clientHeight } = this.list;
    if (chosen >= 0 && (top < scrollTop || top + HEIGHT > scrollTop + clientHeight)) {
      this.list.scrollTop = top - clientHeight / 2;
    }
    this.#draw();
  }

  #draw() {
    const first = Math.max(0, Math.floor(this.list.scrollTop / HEIGHT) - 4);
    const end = Math.min(this.groups.length, Math.ceil((this.list.scrollTop + this.list.clientHeight) / HEIGHT) + 4);
    const items = [];
    for (let index = first; index < end; index++) items.push(this.#item(index));
    this.runway.replaceChildren(...items);
    if (this.chosen >= first && this.chosen < end) this.list.setAttribute("aria-activedescendant", `prompt-${this.chosen}`);
    else this.list.removeAttribute("aria-activedescendant");
  }

  #item(index) {
    const { columns } = this;
    const { rows, passing } = this.groups[index];
    const item = element("div", index === this.chosen ? "item chosen" : "item");
    item.id = `prompt-${index}`;
    item.setAttribute("role", "option");
    item.setAttribute("aria-selected", String(index === this.chosen));
    item.setAttribute("aria-posinset", String(index + 1));
    item.setAttribute("aria-setsize", String(this.groups.length));
    item.style.top = `${HEIGHT * index}px`;
    item.append(appendText(element("div", "excerpt"), columns.excerpt[rows[0]] || columns.prompt_id[rows[0]]));
    const strip = element("div", "strip");
    const rewards = passing.map((row) => columns.reward[row]).filter((reward) => reward !== null);
    const mean = rewards.length ? rewards.reduce((sum, each) => sum + each, 0) / rewards.length : null;
    strip.append(element("span", "mean", number(mean)));
    const wanted = new Set(passing);
    for (const row of rows.slice(0, 32)) {
      const reward = columns.reward[row];
      const kind = reward >= 1 ? "right" : reward > 0 ? "partly" : "wrong";
      const cell = element("i", `cell ${kind}${wanted.has(row) ? "" : " out"}`);
      cell.title = `response ${columns.response[row] + 1}: reward ${number(reward)}`;
      strip.append(cell);
    }
    if (rows.length > 32) strip.append(element("span", "mean", `+${rows.length - 32}`));
    item.append(strip);
    item.addEventListener("click", () => this.choose(index));
    return item;
  }
}
