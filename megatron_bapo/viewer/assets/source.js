// Where the data comes from: the server, or the page itself if it was exported.

const PAGE = 2000;

/** What the server says why it has no answer. */
export class Refused extends Error {}

/** Ask the server; the path is below `api/`. */
export async function ask(path, parameters = {}) {
  const query = new URLSearchParams(parameters).toString();
  const response = await fetch(`api/${path}${query ? `?${query}` : ""}`).catch(() => {
    throw new Error("The viewer does not answer any more.");
  });
  if (!response.ok) throw new Refused(`${response.status}: ${(await response.text()).trim()}`);
  return response.json();
}

class ServerSource {
  isLive = true;
  run = 0;

  async runs() {
    return (await ask("runs")).runs;
  }

  get(path, parameters) {
    return ask(`runs/${this.run}${path && `/${path}`}`, parameters);
  }

  rollouts() {
    return this.get("");
  }

  /** Yields pages of the step; the first one is small, so that something is seen at once. */
  async *step(step) {
    let start = 0;
    let total = 1;
    while (start < total) {
      const page = await this.get(`steps/${step}`, { start, count: start ? PAGE : 256 });
      yield page;
      ({ end: start, total } = page);
      if (page.end <= page.start) return;
    }
  }

  /** The summaries of some responses of any step. */
  rows(step, start, count) {
    return this.get(`steps/${step}`, { start, count });
  }

  response(step, row) {
    return this.get(`steps/${step}/responses/${row}`);
  }

  tokens(step, row, start, count) {
    return this.get(`steps/${step}/responses/${row}/tokens`, { start, count });
  }

  async search(step, text) {
    return (await this.get(`steps/${step}/search`, { text })).rows;
  }

  history(step, row) {
    return this.get(`steps/${step}/responses/${row}/history`);
  }
}

class EmbeddedSource {
  constructor(data) {
    this.data = data;
  }

  isLive = false;

  async runs() {
    return [this.data.run];
  }

  async rollouts() {
    return this.data.run;
  }

  async *step() {
    yield this.data.step;
  }

  async #unpacked(packed) {
    const bytes = Uint8Array.from(atob(packed), (character) => character.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    return new Response(stream).json();
  }

  async response(step, row) {
    return this.#unpacked(this.data.prompts[this.data.step.columns.group[row]]);
  }

  async tokens(step, row, start, count) {
    const whole = await this.#unpacked(this.data.responses[row]);
    const end = Math.min(start + count, whole.total);
    const columns = Object.fromEntries(Object.entries(whole.columns).map(([key, all]) => [key, all.slice(start, end)]));
    return { start, end, total: whole.total, columns };
  }

  async search(step, text) {
    const wanted = text.toLowerCase();
    const found = [];
    for (let row = 0; row < this.data.step.total; row++) {
      const prompt = await this.response(step, row);
      const response = await this.#unpacked(this.data.responses[row]);
      const texts = [response.columns.text.join(""), prompt.ground_truth, ...prompt.messages.map((m) => m.content)];
      if (texts.some((each) => each.toLowerCase().includes(wanted))) found.push(row);
    }
    return found;
  }

  async history(step, row) {
    const { prompt_id: ids } = this.data.step.columns;
    const rows = [...ids.keys()].filter((each) => ids[each] === ids[row]);
    return { prompt_id: ids[row], steps: [{ step: this.data.step.step, rows }], problems: [] };
  }
}

export function openSource() {
  const embedded = document.getElementById("embedded");
  return embedded ? new EmbeddedSource(JSON.parse(embedded.textContent)) : new ServerSource();
}
