// The head of a run: its name, state, progress, and the views of it.

import { h, put, say } from "./dom.js";
import { seconds, whole } from "./format.js";
import { report } from "./inlined.js";
import { router } from "./router.js";
import { STATES } from "./runs_list.js";

export const VIEW_NAMES = { overview: "Overview", rollouts: "Rollouts", search: "Search", "held-out": "Held-out", files: "Pictures", config: "Settings" };

export function viewsOf(detail) {
  const views = ["overview"];
  if (report) {
    if (detail.steps_with_rollouts.length) views.push("rollouts");
    if (detail.held_out_steps.length) views.push("held-out");
    return [...views, "config"];
  }
  const writes = detail.domain !== "control" && detail.score_kind !== "loss"; // a training on examples samples nothing
  if (writes || (detail.steps_with_rollouts ?? []).length) views.push("rollouts", "search");
  if (writes || (detail.held_out_steps ?? []).length) views.push("held-out");
  if ((detail.files ?? []).length || detail.domain === "control") views.push("files");
  return [...views, "config"];
}

export class RunHead {
  constructor() {
    this.name = h("h1", { tabIndex: -1 });
    this.state = h("span", { class: "state" });
    this.facts = h("span", { class: "facts" });
    this.progress = h("progress", { "aria-label": "Steps of the run" });
    this.tabs = h("nav", { class: "tabs", "aria-label": "Views of the run" });
    this.el = h("header", { class: "run-head" }, h("div", { class: "run-title" }, this.name, this.state, this.facts), this.progress, this.tabs);
  }

  update(detail, route) {
    say(this.name, detail.name);
    this.state.dataset.state = detail.state;
    say(this.state, STATES[detail.state] ?? "");
    const model = detail.config?.model ?? detail.config?.environment?.id;
    const step = detail.steps ? `step ${whole(detail.last_step)} of ${whole(detail.steps)}` : `step ${whole(detail.last_step)}`;
    const left = detail.state === "running" && detail.secondsPerStep && detail.steps ? `about ${seconds(detail.secondsPerStep * (detail.steps - detail.last_step))} left` : null;
    say(this.facts, [step, left, typeof model === "string" ? model.split("/").at(-1) : null, detail.config?.algorithm ?? null, detail.seed !== null && detail.seed !== undefined ? `seed ${detail.seed}` : null].filter(Boolean).join(" \u00b7 "));
    this.progress.hidden = !detail.steps || detail.state === "finished";
    if (detail.steps) {
      this.progress.max = detail.steps;
      this.progress.value = detail.last_step;
    }
    const names = viewsOf(detail);
    if (this.tabs.dataset.names !== names.join()) {
      this.tabs.dataset.names = names.join();
      put(this.tabs, names.map((view) => h("a", { data: { view } }, VIEW_NAMES[view])));
    }
    for (const tab of this.tabs.children) {
      tab.setAttribute("href", router.link({ view: tab.dataset.view, params: tab.dataset.view === "overview" && route.params.vs ? { vs: route.params.vs } : {}, keep: false }));
      if (tab.dataset.view === route.view) tab.setAttribute("aria-current", "page");
      else tab.removeAttribute("aria-current");
    }
  }
}
