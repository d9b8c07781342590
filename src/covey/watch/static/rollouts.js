// The rollouts of one step: its groups, and the siblings of the chosen group side by side.

import { api, latest } from "./api.js";
import { h, keyed, put, say, segmented, select } from "./dom.js";
import { count, number, percent, vocabulary, whole } from "./format.js";
import { block, line, promptBlock, promptText } from "./plain_text.js";
import { RolloutCard } from "./rollout_card.js";
import { router } from "./router.js";
import { StepPicker } from "./step_picker.js";
import { available, legend, range, TINTS } from "./tints.js";

const ORDERS = [["", "as sampled"], ["best", "best first"], ["worst", "worst first"]];

export class Rollouts {
  constructor(detail, announce) {
    Object.assign(this, { detail, announce, words: vocabulary(detail), onlyGroups: latest(), onlyGroup: latest(), cards: [] });
    this.picker = new StepPicker((step, options) => router.go({ params: { step, group: null, i: null } }, options));
    this.groupList = h("ul", { class: "group-list" });
    this.groupsHead = h("p", { class: "hint" });
    this.body = h("div", { class: "group" });
    this.orders = segmented("Order of the siblings", ORDERS, "", (sort) => router.go({ params: { sort: sort || null } }, { replace: true }));
    this.tints = select("Tint", [["none", "no tint"]], "none", (tint) => router.go({ params: { tint } }, { replace: true }));
    this.legend = h("div", {});
    this.el = h("div", { class: "rollouts" }, this.picker.el,
      h("div", { class: "two" }, h("section", { class: "groups", "aria-label": "Groups" }, this.groupsHead, this.groupList), h("section", { class: "siblings", "aria-label": "Siblings" }, h("div", { class: "toolbar" }, this.orders, this.tints), this.legend, this.body)));
  }

  async update({ params }) {
    this.params = params;
    this.picker.set(this.detail.steps_with_rollouts, params.step);
    const step = this.picker.step;
    if (step === null) {
      put(this.body, h("p", { class: "empty" }, "No rollout has been recorded yet."));
      return;
    }
    if (step !== this.step || this.stale) await this.loadStep(step);
    if (this.step !== step) return;
    const group = this.groups.find((each) => String(each.group) === params.group) ?? this.groups[0];
    this.drawGroups(group);
    if (group && (group.group !== this.group?.group || this.groupStep !== step)) await this.loadGroup(step, group.group);
    else this.present();
  }

  async loadStep(step) {
    const answer = await this.onlyGroups((signal) => api.groups(this.detail.id, step, signal));
    if (!answer) return;
    Object.assign(this, { step, stale: false, groups: answer.groups });
    const silent = answer.groups.filter((group) => !group.signal).length;
    say(this.groupsHead, `${count(answer.groups.length, "group")} in step ${whole(step)}, ${silent} without signal${answer.left_out ? `; ${answer.left_out} with less spread of rewards left out` : ""}${answer.damaged ? `, ${count(answer.damaged, "damaged line")}` : ""}`);
    if (!answer.groups.length) put(this.body, h("p", { class: "empty" }, "This step has no readable rollouts."));
  }

  drawGroups(chosen) {
    const known = this.groups.flatMap((g) => [g.reward_low, g.reward_high]).filter((v) => v !== null);
    this.scale = { low: Math.min(...known, 0), high: Math.max(...known, 0) };
    keyed(this.groupList, this.groups, (g) => `${this.step}/${g.group}`, (g) => this.groupRow(g), (element, g) => {
      const link = element.firstChild;
      link.setAttribute("href", router.link({ params: { step: this.step, group: g.group, i: null } }));
      if (g === chosen) link.setAttribute("aria-current", "true");
      else link.removeAttribute("aria-current");
    });
    this.showChosen();
  }

  // Scrolls the list of groups, but not the page, to the chosen group.
  showChosen() {
    const box = this.groupList.parentElement;
    const row = this.groupList.querySelector("[aria-current]");
    if (!row) return;
    const above = row.getBoundingClientRect().top - box.getBoundingClientRect().top;
    if (above < 0 || above + row.offsetHeight > box.clientHeight) box.scrollTop += above - box.clientHeight / 3;
  }

  groupRow(g) {
    const at = (v) => `${(100 * ((v ?? 0) - this.scale.low)) / (this.scale.high - this.scale.low || 1)}%`;
    return h("li", {}, h("a", { data: { signal: g.signal ? "yes" : "no" } },
      h("span", { class: "group-number" }, g.group), h("span", { class: "group-prompt" }, line(g.prompt, { length: 70 })),
      h("span", { class: "group-mean" }, number(g.reward_mean)), h("span", { class: "spread", "aria-hidden": "true", vars: { "--low": at(g.reward_low), "--high": at(g.reward_high), "--mean": at(g.reward_mean) } }, h("i", {}), h("b", {})),
      h("span", { class: "group-flags" }, g.dropped ? "dropped" : g.signal ? `\u00b1${number(g.reward_std, 2)}` : "no signal", g.failed ? ` \u00b7 ${g.failed} failed` : "", g.truncated ? ` \u00b7 ${g.truncated} ${this.words.cut}` : "")));
  }

  async loadGroup(step, number_) {
    this.body.setAttribute("aria-busy", "true");
    const answer = await this.onlyGroup((signal) => api.group(this.detail.id, step, number_, signal));
    if (!answer) return;
    Object.assign(this, { group: answer, groupStep: step });
    this.body.removeAttribute("aria-busy");
    this.drawGroup();
    this.present();
    this.announce(`Step ${step}, group ${number_}: ${count(answer.rollouts.length, "rollout")}.`);
  }

  drawGroup() {
    const { prompt, model_prompt: read, columns, baseline, rollouts, dropped, signal, left_out: left } = this.group;
    const rewards = rollouts.map((r) => r.reward).filter((v) => v !== null);
    const mean = rewards.length ? rewards.reduce((a, b) => a + b, 0) / rewards.length : null;
    this.cards = rollouts.map((rollout) => new RolloutCard(rollout, { scale: this.scale, words: this.words, baseline, find: this.params.find ?? "" }));
    this.siblings = h("div", { class: "sibling-grid" }, this.cards.map((card) => card.el));
    const facts = [`mean reward ${number(mean)}`, baseline !== null && baseline !== undefined ? `baseline ${number(baseline)}` : null, `${this.words.cut} ${percent(rollouts.filter((r) => r.truncated).length / rollouts.length, 0)}`,
      signal ? null : "no signal: every reward is the same, and every advantage is 0", dropped ? "dropped: other groups were sampled in its place" : null,
      left ? `${count(left, "rollout")} between the best and the worst left out` : null];
    put(this.body,
      h("div", { class: "prompt" }, h("h2", {}, this.words.language ? "Prompt" : "Start"), prompt === null ? h("p", { class: "hint" }, "The episodes of a group begin in the same state.") : this.words.language ? promptBlock(prompt, this.params.find) : block(`seed ${promptText(prompt)}`), read ? h("details", { class: "model-prompt" }, h("summary", {}, "As the model reads it"), block(read, { find: this.params.find, label: "prompt" })) : null, columnsTable(columns)),
      h("p", { class: "group-facts" }, facts.filter(Boolean).join(" \u00b7 ")), this.siblings);
    const tints = available(rollouts);
    this.tints.hidden = !tints.length;
    this.tints.set(tints.length ? tints.map((key) => [key, TINTS[key].title]) : [["none", "no tint"]], "none");
  }

  // Order, tint and the chosen rollout, from the address; the cards stay the same elements.
  present() {
    if (!this.group) return;
    const { sort = "", i } = this.params;
    const tints = available(this.group.rollouts);
    const tint = tints.includes(this.params.tint) ? this.params.tint : tints.includes("advantage") ? "advantage" : "none";
    this.orders.set(sort);
    this.tints.box.value = tint;
    const most = range(this.group.rollouts, tint);
    put(this.legend, tints.length ? legend(tint, most) : null);
    const sign = { best: -1, worst: 1 }[sort];
    const sorted = sign ? [...this.cards].sort((a, b) => sign * ((a.rollout.reward ?? -Infinity) - (b.rollout.reward ?? -Infinity))) : this.cards;
    sorted.forEach((card, place) => {
      if (this.siblings.children[place] !== card.el) this.siblings.insertBefore(card.el, this.siblings.children[place] ?? null);
    });
    for (const card of this.cards) {
      card.tint(tint, most);
      card.el.classList.toggle("chosen", String(card.rollout.index) === i);
    }
    if (i !== undefined && i !== this.shownIndex) this.cards.find((card) => String(card.rollout.index) === i)?.el.scrollIntoView({ block: "nearest" });
    this.shownIndex = i;
  }

  // The run has grown: the step that is shown stays, unless the newest is followed.
  grown(detail) {
    const again = detail.generation !== this.detail.generation;
    Object.assign(this.detail, detail);
    if (again) this.stale = true;
    const before = this.picker.step;
    this.picker.set(this.detail.steps_with_rollouts, this.params.step ?? (this.picker.step !== null ? String(this.picker.step) : undefined));
    if (this.picker.step !== before || again) return this.update({ params: this.params });
    return null;
  }

  watches(id) {
    return id === this.detail.id;
  }

  key(name) {
    if (name === "j" || name === "k") this.picker.move(name === "j" ? 1 : -1);
    else if (name === "f") this.picker.follow();
    else if (name === "ArrowRight" || name === "ArrowDown") this.moveGroup(1);
    else if (name === "ArrowLeft" || name === "ArrowUp") this.moveGroup(-1);
    else if (name === "c") this.nextTint();
    else return false;
    return true;
  }

  moveGroup(by) {
    const at = this.groups?.findIndex((each) => each.group === this.group?.group) ?? -1;
    const next = this.groups?.[at + by];
    if (!next) return;
    router.go({ params: { step: this.step, group: next.group, i: null } }, { replace: true });
  }

  nextTint() {
    const tints = available(this.group?.rollouts ?? []);
    if (tints.length) router.go({ params: { tint: tints[(tints.indexOf(this.tints.box.value) + 1) % tints.length] } }, { replace: true });
  }
}

export function columnsTable(columns) {
  const entries = Object.entries(columns ?? {});
  if (!entries.length) return null;
  return h("dl", { class: "columns" }, entries.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, block(typeof value === "string" ? value : JSON.stringify(value), { limit: 600, label: "column" })))));
}
