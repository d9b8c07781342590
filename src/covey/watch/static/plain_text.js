// Model output as text: never as markup, with the characters visible that would hide or reorder others.

import { h } from "./dom.js";
import { count } from "./format.js";

// Control characters (not tab and newline), marks and overrides of direction, invisible spaces, lone surrogates.
// Joiners (U+200C, U+200D) stay, because scripts and emoji need them.
const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u2064\u2066-\u206f\ufeff\ufff9-\ufffb]|[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]/g;
const NAMES = { 0x00: "NUL", 0x08: "BS", 0x0d: "CR", 0x1b: "ESC", 0x7f: "DEL", 0x202e: "RLO", 0x202d: "LRO", 0x202a: "LRE", 0x202b: "RLE", 0x202c: "PDF", 0x200b: "ZWSP", 0xfeff: "BOM", 0x200e: "LRM", 0x200f: "RLM" };
export const SHOWN_AT_FIRST = 6000; // characters

function marker(character) {
  const code = character.codePointAt(0);
  const name = `U+${code.toString(16).toUpperCase().padStart(4, "0")}`;
  return h("span", { class: "hidden-character", title: `the character ${name}` }, NAMES[code] ?? name);
}

// Nodes of a text; `find` (lower case) is marked wherever it occurs.
export function nodes(text, find = "") {
  const made = document.createDocumentFragment();
  let from = 0;
  for (const match of text.matchAll(HIDDEN)) {
    made.append(...marked(text.slice(from, match.index), find), marker(match[0]));
    from = match.index + match[0].length;
  }
  made.append(...marked(text.slice(from), find));
  return made;
}

function marked(text, find) {
  if (!text) return [];
  if (!find) return [document.createTextNode(text)];
  const lower = text.toLowerCase();
  const made = [];
  let from = 0;
  for (let at = lower.length === text.length ? lower.indexOf(find) : -1; at >= 0; at = lower.indexOf(find, from)) {
    made.push(document.createTextNode(text.slice(from, at)), h("mark", {}, text.slice(at, at + find.length)));
    from = at + find.length;
  }
  made.push(document.createTextNode(text.slice(from)));
  return made;
}

// A block of model output. Long text is cut, with a button that shows the rest.
export function block(text, { find = "", label = "text", limit = SHOWN_AT_FIRST } = {}) {
  const whole = text ?? "";
  const scrolls = whole.length > 400 || whole.split("\n").length > 10; // then the keyboard must reach it
  const box = h("div", { class: "output", dir: "auto", ...(scrolls ? { tabIndex: 0, role: "group", "aria-label": label } : {}) });
  const show = (length) => box.replaceChildren(nodes(whole.slice(0, length), find.toLowerCase()));
  if (!whole) box.append(h("span", { class: "nothing" }, "(empty)"));
  else show(limit);
  if (whole.length <= limit) return box;
  const more = h("button", { type: "button", class: "more" }, `Show all ${count(whole.length, "character")} of this ${label}`);
  more.addEventListener("click", () => {
    show(whole.length);
    more.remove();
  });
  return h("div", {}, box, more);
}

// One line of a text for a list.
export function line(text, { find = "", length = 160 } = {}) {
  const flat = (text ?? "").replace(/\s+/g, " ").trim();
  const lower = find.toLowerCase();
  const at = lower ? flat.toLowerCase().indexOf(lower) : -1;
  const from = at > length / 2 ? at - Math.floor(length / 3) : 0;
  const cut = flat.slice(from, from + length);
  const made = h("span", { class: "line", dir: "auto" }, from ? "\u2026" : "", nodes(cut, lower), from + length < flat.length ? "\u2026" : "");
  if (!flat) made.append(h("span", { class: "nothing" }, "(empty)"));
  return made;
}

// A prompt is a text or a list of chat messages.
export function promptText(prompt) {
  if (typeof prompt === "string") return prompt;
  if (Array.isArray(prompt)) return prompt.map((m) => `${m?.role ?? ""}: ${contentText(m?.content)}`).join("\n");
  return prompt === null || prompt === undefined ? "" : JSON.stringify(prompt);
}

const contentText = (content) => (typeof content === "string" ? content : JSON.stringify(content ?? ""));

export function promptBlock(prompt, find = "") {
  if (!Array.isArray(prompt)) return block(promptText(prompt), { find, label: "prompt" });
  return h("ol", { class: "messages" }, prompt.map((message) =>
    h("li", {}, h("span", { class: "role" }, String(message?.role ?? "message")), block(contentText(message?.content), { find, label: "message" }), message?.tool_calls ? block(JSON.stringify(message.tool_calls), { find, label: "calls" }) : null)));
}
