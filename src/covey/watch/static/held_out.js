// Held-out answers of two evaluations beside each other, sorted by how much they changed.

import { api, latest } from "./api.js";
import { debounce, h, put, say, segmented, select } from "./dom.js";
import { count, number, vocabulary, whole } from "./format.js";
import { report } from "./inlined.js";
import { block, promptBlock } from "./plain_text.js";
import { columnsTable } from "./rollouts.js";
import { router } from "./router.js";
import { failure, turnList } from "./turns.js";

const PAGE = 40;
const ORDERS = [["worse", "got worse first"], ["better", "got better first"], ["problem", "by number"]];

export class HeldOut {
  constructor(detail, announce) {
    Object.assign(this, { detail, announce, words: vocabulary(detail), only: latest() });
    const pick = (name) => (value) => router.go({ params: { [name]: value, offset: null } });
    this.firstBox = select("First", [], "", pick("first"));
    this.lastBox = select("Second", [], "", pick("last"));
    this.limits = select("Token limit", [], "", pick("limit"));
    this.orders = segmented("Order", ORDERS, "worse", pick("order"));
    this.kinds = h("div", { class: "segmented kinds", role: "group", "aria-label": "Kind of change" });
    this.text = h("input", { type: "search", placeholder: "Text in prompt or answer", "aria-label": "Search text", "aria-keyshortcuts": "/" });
    this.text.addEventListener("input", debounce(250, () => router.go({ params: { text: this.text.value || null, offset: null } }, { replace: true })));
    this.status = h("p", { class: "hint", role: "status" });
    this.list = h("ol", { class: "answers" });
    this.pages = h("nav", { class: "pages", "aria-label": "Pages" });
    this.el = h("div", { class: "held-out" }, h("div", { class: "toolbar" }, this.firstBox, this.lastBox, this.limits, this.orders, h("div", { class: "search-field" }, this.text)), this.kinds, this.status, this.list, this.pages);
  }

  async update({ params }) {
    this.params = params;
    const steps = this.detail.held_out_steps ?? [];
    if (!steps.length) {
      put(this.list);
      say(this.status, "No held-out answer has been recorded yet. They are written by each evaluation.");
      this.el.classList.add("without");
      return;
    }
    this.el.classList.remove("without");
    const { first = String(steps[0]), last = String(this.last ?? steps.at(-1)), limit = "", order = "worse", kind = "", text = "", offset = "0" } = params;
    this.last = Number(last);
    const named = steps.map((step) => [step, step === 0 ? "before training" : `after step ${whole(step)}`]);
    this.firstBox.set(named, first);
    this.lastBox.set(named, last);
    const limits = this.detail.token_limits ?? [];
    this.limits.hidden = limits.length < 2;
    this.limits.set(limits.map((each) => [each, whole(each)]), limit || limits[0]);
    this.orders.set(order);
    if (document.activeElement !== this.text) this.text.value = text;
    this.el.setAttribute("aria-busy", "true");
    const answer = await this.only((signal) => api.heldOut(this.detail.id, { first, last, max_new_tokens: limit, order, kind, text, offset, limit: PAGE }, signal));
    if (!answer) return;
    this.el.removeAttribute("aria-busy");
    this.draw(answer, kind, Number(offset) || 0, text);
  }

  draw(answer, kind, offset, text) {
    const { changes, count: all, total, answers, next_offset: next } = answer;
    const right = this.words.kind === "accuracy";
    const names = [["", "all", all], ["better", right ? "wrong \u2192 right" : "better", changes.better], ["worse", right ? "right \u2192 wrong" : "worse", changes.worse], ["same", "same score", changes.same], ["truncated", "cut at the limit", changes.truncated]];
    put(this.kinds, names.map(([key, label, n]) => h("button", { type: "button", class: key, "aria-pressed": String(key === kind), on: { click: () => router.go({ params: { kind: key || null, offset: null } }) } }, label, n === undefined ? null : h("b", {}, whole(n)))));
    const left = report ? `; the report has ${whole(report.answers[`runs/${this.detail.id}/held_out`].answers.length)} of ${whole(all)}, those that changed most` : "";
    say(this.status, answers.length ? `Answers ${whole(offset + 1)}\u2013${whole(offset + answers.length)} of ${whole(total ?? all)}${left}` : "No answer matches.");
    put(this.list, answers.map((each) => this.row(each, answer, text)));
    const link = (to, label) => h("a", { class: "button", href: router.link({ params: { offset: to || null } }) }, label);
    put(this.pages, offset > 0 && link(Math.max(0, offset - PAGE), "\u2039 Previous"), next !== null && next !== undefined && link(next, "Next \u203a"));
  }

  row({ problem, prompt, columns, first, last, change }, answer, text) {
    const kind = change > 0 ? "better" : change < 0 ? "worse" : "same";
    return h("li", { class: kind },
      h("div", { class: "answer-head" }, h("h2", {}, `Problem ${problem}`), h("span", { class: `change ${kind}` }, change === null ? "not graded" : change === 0 ? "same score" : this.words.change(change)), promptBlock(prompt, text), columnsTable(columns)),
      h("div", { class: "pair" }, this.side(first, answer.first, text), this.side(last, answer.last, text)));
  }

  side(answer, step, text) {
    const title = step === 0 ? "before training" : `after step ${whole(step)}`;
    if (!answer) return h("div", { class: "side" }, h("p", { class: "side-head" }, title), h("p", { class: "nothing" }, "no answer"));
    const parts = Object.entries(answer.reward_parts ?? {});
    return h("div", { class: "side" }, h("p", { class: "side-head" }, title, h("b", {}, answer.score === null ? "not graded" : this.words.kind === "accuracy" ? (answer.score === 1 ? "right" : "wrong") : number(answer.score)),
      h("span", {}, count(answer.tokens ?? 0, "token")), answer.truncated && h("span", { class: "chip warn" }, "cut"), parts.length > 1 && h("span", {}, parts.map(([name, value]) => `${name} ${number(value)}`).join(", "))),
    failure(answer.failure), answer.turns ? turnList(answer.turns, { find: text }) : block(answer.text, { find: text, label: "answer" }));
  }

  // A new evaluation can be chosen; the two that are shown stay.
  grown(detail) {
    const before = (this.detail.held_out_steps ?? []).length;
    Object.assign(this.detail, detail);
    if (before !== (this.detail.held_out_steps ?? []).length) return this.update({ params: this.params });
    return null;
  }

  watches(id) {
    return id === this.detail.id;
  }

  searchField() {
    return this.text;
  }
}
