/** Texts of samples: shown as they are, line by line, with control characters made visible. */

import { element } from "./dom.js";

/** Characters that a terminal obeys or that reorder text; not the joiners that scripts and emoji need. */
const CONTROLS = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200b\u200e\u200f\u061c\u2028-\u202e\u2060-\u2069\ufeff]/g;
const MOST_MARKED = 2000;

/** Returns text nodes, and a mark for each control character. */
export function visible(text) {
  const nodes = [];
  let done = 0;
  for (const found of text.matchAll(CONTROLS)) {
    if (nodes.length > MOST_MARKED) break;
    nodes.push(text.slice(done, found.index), mark(found[0]));
    done = found.index + found[0].length;
  }
  nodes.push(text.slice(done).replace(CONTROLS, "\ufffd"));
  return nodes.filter((node) => node !== "");
}

function mark(character) {
  const code = character.codePointAt(0).toString(16).toUpperCase().padStart(4, "0");
  return element("span", { class: "control", title: "control character" }, `U+${code}`);
}

/**
 * A block of text.
 *
 * @param {{text: string, characters: number}} cut
 * @param {function(): void} [all] called to show all of a text that was cut
 */
export function block(cut, all = null) {
  if (cut.characters === 0) return element("p", { class: "quiet" }, "(empty)");
  const missing = cut.characters - [...cut.text].length;
  return element("div", { class: "block" },
    element("pre", { tabindex: "0", dir: "auto" }, visible(cut.text)),
    missing <= 0 ? null
      : all === null ? element("p", { class: "quiet" }, `${missing.toLocaleString("en-US")} more characters are stored.`)
        : element("button", { type: "button", class: "all", on: { click: all } }, `Show all ${cut.characters.toLocaleString("en-US")} characters`));
}
