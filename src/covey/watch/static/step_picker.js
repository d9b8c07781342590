// The choice of a step that has rollouts: a slider, a number, neighbours, and following the newest.

import { h, say } from "./dom.js";
import { whole } from "./format.js";

export class StepPicker {
  // change(step, {replace}): `step` is a number, or "latest"
  constructor(change) {
    this.change = change;
    this.step = null;
    this.steps = [];
    this.slider = h("input", { type: "range", "aria-label": "Step", min: "0", max: "0", value: "0" });
    this.number = h("input", { type: "number", "aria-label": "Number of the step", inputmode: "numeric" });
    this.before = h("button", { type: "button", class: "plain", "aria-label": "Step before", "aria-keyshortcuts": "k", on: { click: () => this.move(-1) } }, "\u2039");
    this.after = h("button", { type: "button", class: "plain", "aria-label": "Step after", "aria-keyshortcuts": "j", on: { click: () => this.move(1) } }, "\u203a");
    this.newest = h("button", { type: "button", class: "plain", "aria-pressed": "false", "aria-keyshortcuts": "f", on: { click: () => this.follow() } }, "Follow newest");
    this.range = h("span", { class: "hint" });
    this.slider.addEventListener("input", () => (this.number.value = this.steps[Number(this.slider.value)]));
    this.slider.addEventListener("change", () => this.change(this.steps[Number(this.slider.value)]));
    this.number.addEventListener("change", () => this.change(this.nearest(Number(this.number.value))));
    this.el = h("div", { class: "step-picker", role: "group", "aria-label": "Step" }, h("span", { class: "label", "aria-hidden": "true" }, "Step"), this.before, this.number, this.after, this.slider, this.range, this.newest);
  }

  // `ranges`: steps with rollouts as [first, last] pairs; `wanted`: a number as text, "latest", or undefined for the newest now
  set(ranges, wanted) {
    const steps = (ranges ?? []).flatMap(([first, last]) => Array.from({ length: last - first + 1 }, (_, i) => first + i));
    this.steps = steps;
    this.following = wanted === "latest";
    this.step = steps.length ? (wanted === undefined || this.following ? steps.at(-1) : this.nearest(Number(wanted))) : null;
    this.newest.setAttribute("aria-pressed", String(this.following));
    if (!steps.length) return;
    const at = steps.indexOf(this.step);
    this.slider.max = String(steps.length - 1);
    if (document.activeElement !== this.slider || Number(this.slider.value) !== at) this.slider.value = String(at);
    this.slider.setAttribute("aria-valuetext", `step ${this.step}`);
    this.number.min = String(steps[0]);
    this.number.max = String(steps.at(-1));
    if (document.activeElement !== this.number) this.number.value = String(this.step);
    this.before.disabled = at <= 0;
    this.after.disabled = at >= steps.length - 1;
    say(this.range, `of ${whole(steps.at(-1))}`);
  }

  nearest(step) {
    return this.steps.reduce((best, each) => (Math.abs(each - step) < Math.abs(best - step) ? each : best), this.steps[0]);
  }

  move(by) {
    const next = this.steps[this.steps.indexOf(this.step) + by];
    if (next !== undefined) this.change(next, { replace: true });
  }

  follow() {
    this.change(this.following ? this.step : "latest", { replace: true });
  }
}
