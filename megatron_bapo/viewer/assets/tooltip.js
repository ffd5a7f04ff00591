// The numbers of the token under the pointer, or of the one that the arrow keys have chosen.

import { MARKS, number } from "./measures.js";
import { tokenAt } from "./response.js";
import { element, plainText } from "./text.js";

const FIGURES = [
  ["ratio", (t) => number(t.ratio)],
  ["engine log-prob", (t) => number(t.rollout)],
  ["trainer log-prob", (t) => number(t.trainer)],
  ["trainer − engine", (t) => (t.trainer === null || t.rollout === null ? "–" : number(t.trainer - t.rollout))],
  ["recomputed log-prob", (t) => (t.proximal === null ? "" : number(t.proximal))],
  ["entropy", (t) => number(t.entropy)],
  ["advantage", (t) => number(t.advantage)],
  ["policy version", (t) => number(t.version)],
  ["staleness", (t) => number(t.staleness)],
  ["correction", (t) => (t.correction === null ? "" : number(t.correction))],
];

export class Tooltip {
  constructor(box) {
    this.box = box;
  }

  show(view, index) {
    const token = tokenAt(view.columns, index);
    const list = element("dl");
    if (!token.sampled) list.append(element("dt", "", "environment's token"), element("dd", "", "not trained on"));
    for (const [name, value] of token.sampled ? FIGURES : []) {
      if (value(token)) list.append(element("dt", "", name), element("dd", "", value(token)));
    }
    const title = element("p", "token");
    title.append(element("code", "", plainText(token.text) || "(rest of a character)"));
    title.append(element("span", "", ` token ${index + 1} of ${view.total} · id ${token.id}`));
    this.box.replaceChildren(title, list);
    for (const mark of MARKS) {
      if ((token.marks ?? 0) & mark.bit) this.box.append(element("p", `mark ${mark.name}`, mark.text));
    }
    this.box.hidden = false;
    const [place] = view.spans[index].getClientRects();
    if (!place) return;
    const { offsetWidth: width, offsetHeight: height } = this.box;
    const below = place.bottom + height + 12 < innerHeight;
    this.box.style.left = `${Math.max(8, Math.min(place.left, innerWidth - width - 8))}px`;
    this.box.style.top = `${Math.max(8, below ? place.bottom + 6 : place.top - height - 6)}px`;
  }

  hide() {
    this.box.hidden = true;
  }
}
