// One rollout of a group: its reward by part, advantage, end, and its text, its reasoning steps or its turns.

import { h } from "./dom.js";
import { count, number, signed } from "./format.js";
import { block } from "./plain_text.js";
import { TokenText } from "./token_text.js";
import { failure, modelTurns, tokensByTurn, turnList } from "./turns.js";

const ENDS = {
  stop: "ended by itself", terminated: "episode ended", length: "cut at the token limit", truncated: "reached the time limit", cut: "cut by the sampler",
};
const ENDS_OF_CONVERSATIONS = { terminated: "ended by the environment", length: "cut at the limit of turns or tokens", cut: "ended by a failure" };

// `scale`: {low, high} of the rewards in the step; `words`: the vocabulary of the run; `baseline`: that of the group.
export class RolloutCard {
  constructor(rollout, { scale, words, find, baseline }) {
    this.rollout = rollout;
    const { index, reward, advantage, failed, tokens } = rollout;
    const name = `rollout ${index + 1}`;
    this.tokenTexts = tokens ? tokenTexts(rollout, name) : [];
    this.el = h("article", { class: "rollout", id: `rollout-${index}`, tabIndex: -1, "aria-label": name, data: { index, failed: failed ? "yes" : "no" } },
      h("header", {}, h("h3", {}, h("span", { class: "ordinal" }, `${index + 1}`)),
        h("span", { class: "reward" }, failed || reward === null ? "not graded" : number(reward)),
        h("span", { class: "advantage", data: { sign: advantage > 0 ? "plus" : advantage < 0 ? "minus" : "none" } }, advantage === null || advantage === undefined ? "" : ["advantage ", signed(advantage)]),
        h("span", { class: "meter", "aria-hidden": "true", vars: { "--at": `${share(reward, scale)}%`, "--base": `${share(rollout.baseline, scale)}%` }, data: { base: rollout.baseline === null || rollout.baseline === undefined ? "no" : "yes" } }, h("i", {}), h("b", {}))),
      parts(rollout), facts(rollout, words, baseline), failure(rollout.failure), body(rollout, find, this.tokenTexts.map((text) => text.el)), extra(rollout.extra));
  }

  tint(key, most) {
    for (const text of this.tokenTexts) text.tint(key, most);
  }
}

// One text of tokens; for a conversation one for each turn of the model.
function tokenTexts({ tokens, turns }, name) {
  const parts = turns ? tokensByTurn(tokens) : [];
  if (!parts.length || parts.length !== modelTurns(turns)) return [new TokenText(tokens, name)];
  return parts.map(({ table, first }, turn) => new TokenText(table, `turn ${turn + 1} of ${name}`, first));
}

function share(value, { low, high }) {
  if (value === null || value === undefined) return 0;
  return high > low ? (100 * (value - low)) / (high - low) : 50;
}

function parts({ reward_parts: table }) {
  const entries = Object.entries(table ?? {});
  if (!entries.length) return null;
  return h("dl", { class: "parts" }, entries.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, typeof value === "number" ? number(value) : "failed"))));
}

function facts({ end, decisions, version, truncated, baseline, turns }, words, shared) {
  const ends = turns ? { ...ENDS, ...ENDS_OF_CONVERSATIONS } : ENDS;
  return h("p", { class: "rollout-facts" }, h("span", { class: truncated && words.language ? "chip warn" : "chip" }, ends[end] ?? String(end ?? "")), turns && `${count(modelTurns(turns), "turn")} \u00b7 `, count(decisions ?? 0, words.decision),
    baseline === null || baseline === undefined || baseline === shared ? null : ` \u00b7 baseline ${number(baseline)}`, version === null || version === undefined ? null : ` \u00b7 weights ${version}`);
}

function body(rollout, find, texts) {
  const { turns } = rollout;
  if (turns) return texts.length === modelTurns(turns) ? turnList(turns, { find, texts }) : [texts, turnList(turns, { find })];
  if (texts.length) return texts;
  if (!rollout.steps?.length) return block(rollout.text, { find, label: "completion" });
  return h("ol", { class: "reasoning" }, rollout.steps.map(([text, reward]) =>
    h("li", {}, h("span", { class: "step-reward", data: { sign: reward > 0 ? "plus" : reward < 0 ? "minus" : "none" } }, number(reward)), block(text, { find, label: "step" }))));
}

function extra(table) {
  if (!table || !Object.keys(table).length) return null;
  return h("details", { class: "extra" }, h("summary", {}, "More of this rollout"), block(JSON.stringify(table, null, 1), { label: "table" }));
}
