// One response: its facts, and its tokens, which are loaded and laid out as they come into sight.

import { clippedShare } from "./prompts.js";
import { level, MARKS, MEASURES, number } from "./measures.js";
import { appendText, element } from "./text.js";

const FIRST = 512;
const TOKENS = 2048;
const CHUNK = 128;

/** The figures of one token by the name of the column. */
export function tokenAt(columns, index) {
  const at = (name) => columns[name]?.[index] ?? null;
  const names = ["text", "id", "sampled", "rollout", "trainer", "proximal", "ratio", "entropy", "advantage"];
  return Object.fromEntries([...names, "correction", "marks", "staleness", "version"].map((name) => [name, at(name)]));
}

function facts(columns, row) {
  const list = element("dl", "figures");
  const add = (term, value, kind = "") => {
    const pair = element("div", kind);
    pair.append(element("dt", "", term), element("dd", "", value));
    list.append(pair);
  };
  const share = (name) => `${number(columns[name][row])}`;
  const reward = columns.reward[row];
  add("reward", number(reward), reward >= 1 ? "right" : reward > 0 ? "partly" : "wrong");
  add("advantage", number(columns.mean_advantage[row]));
  add("tokens", number(columns.num_tokens[row]));
  add("finish", columns.finish_reason[row] === "length" ? "truncated" : "stop", columns.finish_reason[row]);
  add("staleness", `${number(columns.mean_staleness[row])} (max ${number(columns.max_staleness[row])})`);
  add("versions", number(columns.num_versions[row]));
  if (!columns.update[row]) {
    add("update", "not trained on");
    return list;
  }
  add("clipped", `${number(100 * clippedShare(columns, row))}%`);
  add("up / low / dual", ["num_upper", "num_lower", "num_dual"].map(share).join(" / "));
  if (columns.num_rejected[row]) add("rejected", share("num_rejected"));
  add("mean ratio", `${number(columns.mean_ratio[row])} (max ${number(columns.max_ratio[row])})`);
  add("mean entropy", number(columns.mean_entropy[row]));
  add("|log-prob diff|", number(columns.mean_log_prob_diff[row]));
  add("update", number(columns.update[row]));
  add("bounds", `${number(columns.clip_low[row])} – ${number(columns.clip_high[row])}`);
  return list;
}

export class ResponseView {
  /** `place` is `{step, row, index}`, with the index of the row in `columns`; `told` gets called when tokens came. */
  constructor(source, columns, place, told) {
    Object.assign(this, { source, place, told, columns: {}, spans: [], names: [], total: 1, loading: null });
    this.element = element("article", "response");
    const title = element("h2", "", `Response ${columns.response[place.index] + 1}`);
    this.body = element("div", "tokens");
    this.body.tabIndex = 0;
    this.body.setAttribute("role", "group");
    this.body.setAttribute("aria-label", `Tokens of response ${columns.response[place.index] + 1}; arrow keys move`);
    this.end = element("div", "end", "loading…");
    const scroller = element("div", "scroller");
    scroller.append(this.body, this.end);
    this.element.append(title, facts(columns, place.index), scroller);
    this.seen = new IntersectionObserver((entries) => entries.some((e) => e.isIntersecting) && this.#loadOrSay(), {
      rootMargin: "400px",
      scrollMargin: "400px",
    });
    this.seen.observe(this.end);
  }

  close() {
    this.seen.disconnect();
    this.closed = true;
  }

  /** Load the next page of tokens. */
  load() {
    this.loading ??= this.#load().finally(() => {
      this.loading = null;
    });
    return this.loading;
  }

  #loadOrSay() {
    this.load().catch((error) => {
      this.end.textContent = error.message;
    });
  }

  async loadUntil(index) {
    while (!this.closed && this.spans.length <= index && this.spans.length < this.total) await this.load();
  }

  async #load() {
    if (this.spans.length >= this.total) return;
    const { step, row } = this.place;
    const page = await this.source.tokens(step, row, this.spans.length, this.spans.length ? TOKENS : FIRST);
    if (this.closed) return;
    this.total = page.total;
    for (const [name, values] of Object.entries(page.columns)) (this.columns[name] ??= []).push(...values);
    for (let index = this.spans.length; index < page.end; index++) this.#append(index);
    const rest = this.total - this.spans.length;
    this.end.textContent = rest ? `${number(rest)} more tokens…` : "";
    this.end.hidden = !rest;
    this.told(this);
    if (rest) {
      // The observer only tells of changes, and the end may still be in sight.
      this.seen.unobserve(this.end);
      this.seen.observe(this.end);
    }
  }

  #append(index) {
    const text = this.columns.text[index];
    const sampled = this.columns.sampled[index];
    const changed = index === 0 ? !sampled : sampled !== this.columns.sampled[index - 1];
    const full = this.chunk && this.chunk.childElementCount >= CHUNK && this.columns.text[index - 1].endsWith("\n");
    if (!this.chunk || changed || full || this.chunk.childElementCount >= 8 * CHUNK) {
      if (changed) this.body.append(element("div", "turn", sampled ? "policy" : "environment"));
      this.chunk = element("div", sampled ? "chunk" : "chunk reply");
      this.body.append(this.chunk);
    }
    const span = element("span", "t");
    span.index = index;
    const lines = text.split("\n");
    lines.forEach((line, number) => {
      if (number) span.append(element("span", "blank", "⏎"), "\n");
      appendText(span, line);
    });
    if (!text) span.append(element("span", "blank", "◂"));
    this.spans.push(span);
    this.chunk.append(span);
  }

  /** What the tokens are coloured by; computed once for each token, because each page of tokens changes the scale. */
  values(measure) {
    if (this.measured?.measure !== measure) this.measured = { measure, values: [] };
    const { values } = this.measured;
    while (values.length < this.spans.length) values.push(MEASURES[measure].value(this.columns, values.length));
    return values;
  }

  /** The bits of all marks of the tokens that are loaded. */
  marks() {
    return (this.columns.marks ?? []).reduce((bits, own) => bits | own, 0);
  }

  colour(measure, limit) {
    const { diverging } = MEASURES[measure];
    const { marks } = this.columns;
    this.values(measure).forEach((value, index) => {
      let name = "t";
      const own = level(value, limit, diverging);
      if (own) name += ` ${own}`;
      const bits = marks?.[index] ?? 0;
      if (bits) for (const mark of MARKS) if (bits & mark.bit) name += ` ${mark.name}`;
      if (this.names[index] === name) return;
      this.names[index] = name;
      this.spans[index].className = name;
    });
  }
}
