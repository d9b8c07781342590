// A conversation as its turns: who speaks, the text, calls of tools with their arguments, replies, the reward of a turn.

import { h } from "./dom.js";
import { count, signed } from "./format.js";
import { block, nodes } from "./plain_text.js";

const SHOWN_AT_FIRST = 40; // turns
const MODEL = "assistant";

// `texts`: elements in place of the texts of the model's turns, if their tokens are known.
export function turnList(turns, { find = "", texts = null } = {}) {
  const left = [...(texts ?? [])];
  const list = h("ol", { class: "turns" });
  const show = (length) => {
    for (const turn of turns.slice(list.children.length, length)) list.append(turnItem(turn, find, turn.role === MODEL ? left.shift() : null));
  };
  show(find ? turns.length : SHOWN_AT_FIRST);
  if (list.children.length === turns.length) return list;
  const more = h("button", { type: "button", class: "more" }, `Show all ${count(turns.length, "turn")}`);
  more.addEventListener("click", () => {
    show(turns.length);
    more.remove();
  });
  return h("div", {}, list, more);
}

export const modelTurns = (turns) => (turns ?? []).filter((turn) => turn.role === MODEL).length;

function turnItem({ role, name, text, calls, unread, reward }, find, written) {
  const paid = reward === null ? null : h("span", { class: "step-reward", data: { sign: reward > 0 ? "plus" : reward < 0 ? "minus" : "none" } }, `reward ${signed(reward)}`);
  const shown = written ?? (text || !(calls.length || unread.length) ? block(text, { find, label: "turn" }) : null);
  return h("li", { class: "turn", data: { by: role === MODEL ? "model" : "other" } },
    h("p", { class: "turn-head" }, h("span", { class: "role" }, nodes(role), name ? [" ", h("code", {}, nodes(name))] : null), paid), shown, calls.map((call) => callBlock(call, find)), unread.map((call) => h("div", { class: "call" }, h("p", { class: "role" }, "call that could not be read"), block(call, { find, label: "call" }))));
}

function callBlock({ name, arguments: given }, find) {
  return h("div", { class: "call" }, h("p", {}, h("span", { class: "role" }, "calls "), h("code", {}, nodes(name, find.toLowerCase()))),
    given.length ? h("dl", {}, given.map(([key, value]) => h("div", {}, h("dt", {}, nodes(key)), h("dd", {}, block(value, { find, label: "argument" }))))) : null);
}

// Why the environment of a rollout or an answer failed.
export const failure = (reason) => (reason ? h("p", { class: "failure" }, h("span", { class: "chip warn" }, "failed"), nodes(reason)) : null);

// The tables of the tokens of each turn of the model, with the place of their first token: what it did not write, which
// has no log-probability, lies between.
export function tokensByTurn(tokens) {
  const made = [];
  let from = 0;
  tokens.texts.forEach((_, i) => {
    if (tokens.logprobs?.[i] === null) from = i + 1;
    else if (i + 1 === tokens.texts.length || tokens.logprobs?.[i + 1] === null) made.push({ first: from, table: part(tokens, from, i + 1) });
  });
  return made;
}

const part = (tokens, from, to) => Object.fromEntries(Object.entries(tokens).map(([name, list]) => [name, list?.slice?.(from, to) ?? null]));
