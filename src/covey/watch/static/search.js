// The rollouts of the whole run, filtered and searched, page by page.

import { api, latest } from "./api.js";
import { debounce, h, put, say, segmented } from "./dom.js";
import { count, number, signed, vocabulary, whole } from "./format.js";
import { line } from "./plain_text.js";
import { router } from "./router.js";

const PAGE = 50;
const AGAIN = 1000; // milliseconds between two looks while steps are not read yet
const FILTERS = [["", "newest"], ["best", "best"], ["worst", "worst"], ["truncated", "truncated"], ["failed", "failed rewards"], ["no_signal", "groups without signal"]];

export class Search {
  constructor(detail, announce) {
    Object.assign(this, { detail, announce, words: vocabulary(detail), only: latest() });
    const filters = FILTERS.map(([key, label]) => [key, key === "truncated" ? this.words.cut : label]);
    this.filters = segmented("Which rollouts", filters, "", (filter) => this.change({ filter: filter || null }));
    this.text = h("input", { type: "search", placeholder: this.words.language ? "Text in completion or prompt" : "Text", "aria-label": "Search text", "aria-keyshortcuts": "/" });
    const typed = debounce(250, () => this.change({ text: this.text.value || null }));
    this.text.addEventListener("input", typed);
    this.first = this.bound("First step", "first");
    this.last = this.bound("Last step", "last");
    this.status = h("p", { class: "hint", role: "status" });
    this.list = h("ul", { class: "hits" });
    this.pages = h("nav", { class: "pages", "aria-label": "Pages" });
    this.el = h("div", { class: "search" },
      h("div", { class: "toolbar" }, h("div", { class: "search-field" }, this.text), this.filters, h("span", { class: "field" }, h("span", {}, "steps"), this.first, "\u2013", this.last)),
      this.status, this.list, this.pages);
  }

  bound(label, name) {
    return h("input", { type: "number", min: "1", "aria-label": label, placeholder: name === "first" ? "1" : "last", on: { change: (event) => this.change({ [name]: event.target.value || null }) } });
  }

  change(params) {
    router.go({ params: { ...params, offset: null } }, { replace: "text" in params });
  }

  async update({ params }) {
    this.params = params;
    const { filter = "", text = "", first = "", last = "", offset = "0" } = params;
    this.filters.set(filter);
    if (document.activeElement !== this.text) this.text.value = text;
    this.first.value = first;
    this.last.value = last;
    this.el.setAttribute("aria-busy", "true");
    const answer = await this.only((signal) => api.rollouts(this.detail.id, { filter, text, first, last, offset, limit: PAGE }, signal));
    if (!answer) return;
    this.el.removeAttribute("aria-busy");
    clearTimeout(this.again);
    if (isUnread(answer.index)) this.again = setTimeout(() => this.el.isConnected && this.update({ params: this.params }), AGAIN);
    const written = JSON.stringify([params, answer]);
    if (written === this.written) return; // the same as shown, where a selection stays
    this.written = written;
    this.draw(answer, Number(offset) || 0, text);
  }

  draw({ rollouts, total, next_offset: next, index }, offset, text) {
    const shown = rollouts.length ? `${whole(offset + 1)}\u2013${whole(offset + rollouts.length)}` : "none";
    const of = total === null || total === undefined ? (next === null ? "" : " of more") : ` of ${whole(total)}`;
    const reading = isUnread(index) ? ` \u00b7 ${count(index.files - index.indexed, "step")} not read yet` : "";
    say(this.status, rollouts.length ? `Rollouts ${shown}${of}${reading}` : `No rollout matches${reading}.`);
    put(this.list, rollouts.map((rollout) => this.row(rollout, text)));
    const link = (to, label) => h("a", { class: "button", href: router.link({ params: { offset: to || null } }) }, label);
    put(this.pages, offset > 0 && link(Math.max(0, offset - PAGE), "\u2039 Previous"), next !== null && next !== undefined && link(next, "Next \u203a"));
    this.newer = false;
  }

  row(rollout, text) {
    const href = router.link({ view: "rollouts", params: { step: rollout.step, group: rollout.group, i: rollout.index, find: text || null }, keep: false });
    return h("li", {}, h("a", { href },
      h("span", { class: "hit-place" }, `step ${whole(rollout.step)} \u00b7 group ${rollout.group} \u00b7 ${rollout.index + 1}`),
      h("span", { class: "hit-reward" }, rollout.failed ? "failed" : number(rollout.reward)),
      h("span", { class: "hit-advantage", data: { sign: rollout.advantage > 0 ? "plus" : rollout.advantage < 0 ? "minus" : "none" } }, rollout.advantage === null || rollout.advantage === undefined ? "" : signed(rollout.advantage)),
      h("span", { class: "hit-flags" }, rollout.truncated && h("span", { class: this.words.language ? "chip warn" : "chip" }, this.words.cut), !rollout.signal && h("span", { class: "chip" }, "no signal"), count(rollout.decisions ?? 0, this.words.decision)),
      h("span", { class: "hit-prompt" }, line(rollout.prompt, { find: text, length: 110 })),
      h("span", { class: "hit-text" }, rollout.text_from ? "\u2026" : "", line(rollout.text, { find: text, length: 240 }))));
  }

  grown(detail) {
    Object.assign(this.detail, detail);
    if (this.newer) return;
    this.newer = true;
    this.written = null; // so that the next answer is drawn, without this note
    const again = h("button", { type: "button", class: "plain", on: { click: () => this.update({ params: this.params }) } }, "Show them");
    this.status.append(" \u00b7 the run has new rollouts ", again);
  }

  watches(id) {
    return id === this.detail.id;
  }

  searchField() {
    return this.text;
  }
}

// True while rollouts of some steps are missing in the index, which the server goes on reading.
const isUnread = (index) => index && index.state !== "ready" && index.files > index.indexed;
