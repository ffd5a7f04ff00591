// Tables of foreign text.

import { appendText, element } from "./text.js";

/** Return a table; each cell is its class and its text. */
export function table(heads, rows) {
  const made = element("table");
  const head = made.createTHead().insertRow();
  for (const name of heads) head.append(appendText(element("th"), name));
  const body = made.createTBody();
  for (const cells of rows) {
    const row = body.insertRow();
    for (const [kind, text] of cells) {
      const cell = element("td", kind);
      const box = element(kind === "pre" ? "pre" : "span");
      // A key is broken after its dots and underscores where it does not fit on a line.
      const [first, ...rest] = kind === "key" ? text.split(/(?<=[._])/) : [text];
      appendText(box, first);
      for (const part of rest) {
        box.append(element("wbr"));
        appendText(box, part);
      }
      cell.append(box);
      row.append(cell);
    }
  }
  const box = element("div", "table card");
  box.append(made);
  return box;
}
