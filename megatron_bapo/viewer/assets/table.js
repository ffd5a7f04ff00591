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
      cell.append(appendText(element(kind === "pre" ? "pre" : "span"), text));
      row.append(cell);
    }
  }
  const box = element("div", "table card");
  box.append(made);
  return box;
}
