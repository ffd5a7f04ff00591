// Shows foreign text as what it is: nothing in it can act as markup or change the direction or place of other text.

const HIDDEN = /[\u0000-\u0009\u000b-\u001f\u007f-\u009f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]|[\u{e0000}-\u{e007f}]|\p{Surrogate}/gu;

function name(character) {
  return "U+" + character.codePointAt(0).toString(16).toUpperCase().padStart(4, "0");
}

/** Append `text` to `parent`; characters that cannot be seen are shown by their code point. Returns the parent. */
export function appendText(parent, text) {
  let end = 0;
  for (const match of text.matchAll(HIDDEN)) {
    parent.append(text.slice(end, match.index));
    if (match[0] === "\t") parent.append(element("span", "blank", "⇥"), "\t");
    else parent.append(element("span", "code", name(match[0])));
    end = match.index + match[0].length;
  }
  parent.append(text.slice(end));
  return parent;
}

/** The text with hidden characters named, for places that take no markup. */
export function plainText(text) {
  return text.replace(HIDDEN, (character) => `⟨${name(character)}⟩`).replaceAll("\n", "⏎");
}

/** Create an element with a class and own text, which must not be foreign text. */
export function element(tag, className = "", text = "") {
  const created = document.createElement(tag);
  if (className) created.className = className;
  if (text) created.textContent = text;
  return created;
}
