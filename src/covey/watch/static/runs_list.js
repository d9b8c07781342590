// The list of runs: its state, its result, and which runs are laid over the chosen one.

import { h, keyed, say } from "./dom.js";
import { ago, vocabulary, whole } from "./format.js";
import { report } from "./inlined.js";
import { router } from "./router.js";

export const STATES = { running: "running", finished: "finished", stopped: "stopped", crashed: "crashed" };
export const MAX_SHOWN = 6; // runs in one chart, as many as there are colours

export const overlaid = (params) => (params.vs ?? "").split(",").filter(Boolean);

export class RunsList {
  constructor(element) {
    this.runs = new Map();
    this.filter = h("input", { type: "search", placeholder: "Filter runs", "aria-label": "Filter runs", on: { input: () => this.draw() } });
    this.list = h("ul", { class: "run-list" });
    this.note = h("p", { class: "hint" });
    element.append(h("div", { class: "runs-head" }, h("h2", {}, "Runs"), (this.table = h("a", { href: "#/runs/" }, "as a table")), this.filter), this.list, this.note);
  }

  set(runs, root) {
    this.runs = new Map(runs.map((run) => [run.id, run]));
    say(this.note, runs.length ? `Tick further runs to lay their curves over the chosen one.` : `No run yet${root ? ` in ${root}` : ""}. It appears here when a training begins.`);
    this.draw();
  }

  // The news of an event about one run.
  merge(news) {
    const run = this.runs.get(news.id);
    if (!run) return false;
    Object.assign(run, news);
    this.draw();
    return true;
  }

  // The run to open when the address names none: one that is running, else the one that changed last.
  first() {
    const all = [...this.runs.values()];
    return (report ? null : all.find((run) => run.state === "running")) ?? all[0] ?? null;
  }

  ids() {
    return [...this.runs.keys()];
  }

  draw() {
    const { run: chosen, params, view } = router.current;
    const others = overlaid(params);
    const wanted = this.filter.value.trim().toLowerCase();
    this.filter.hidden = this.runs.size < 8;
    const shown = [...this.runs.values()].filter((run) => !wanted || `${run.name} ${run.recipe} ${run.state}`.toLowerCase().includes(wanted));
    this.table.hidden = this.runs.size < 2;
    this.onDraw?.();
    keyed(this.list, shown, (run) => run.id, (run) => this.row(run), (element, run) => this.update(element, run, { chosen, others, view }));
  }

  row(run) {
    const parts = {
      link: h("a", {}), name: h("span", { class: "run-name" }), state: h("span", { class: "state" }), result: h("span", { class: "run-result" }), step: h("span", { class: "run-step" }),
      tick: h("input", { type: "checkbox", "aria-label": `Lay ${run.name} over the chosen run`, on: { change: () => this.toggle(run.id) } }),
    };
    parts.link.append(parts.name, h("span", { class: "run-facts" }, parts.state, parts.step, parts.result));
    return Object.assign(h("li", {}, h("span", { class: "run-tick" }, h("i", { class: "swatch" }), parts.tick), parts.link), { parts });
  }

  update(element, run, { chosen, others, view }) {
    const { link, name, state, result, step, tick } = element.parts;
    const words = vocabulary(run);
    const isChosen = run.id === chosen;
    const place = isChosen ? 0 : others.indexOf(run.id) + 1;
    const same = ["overview", "rollouts", "search", "held-out", "files", "config"].includes(view) ? view : "overview";
    link.setAttribute("href", router.link({ view: same, run: run.id, params: {}, keep: false }));
    if (isChosen) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
    element.classList.toggle("chosen", isChosen);
    tick.checked = isChosen || place > 0;
    tick.disabled = isChosen || (!tick.checked && others.length >= MAX_SHOWN - 1);
    element.querySelector(".swatch").style.setProperty("--colour", isChosen || place ? `var(--run-${place})` : "transparent");
    say(name, run.name);
    state.dataset.state = run.state;
    say(state, STATES[run.state] ?? String(run.state));
    say(step, run.steps && run.state !== "finished" ? `${whole(run.last_step)} / ${whole(run.steps)}` : `${whole(run.last_step)} steps`);
    const { before, after } = run.result ?? {};
    say(result, after && before && after.score !== null ? `${words.score(before.score)} \u2192 ${words.score(after.score)}` : run.score !== null && run.score !== undefined ? words.score(run.score) : "");
    link.title = `${run.path ?? run.name}\nchanged ${ago(run.updated)}`;
  }

  toggle(id) {
    const others = overlaid(router.current.params);
    const next = others.includes(id) ? others.filter((each) => each !== id) : [...others, id];
    router.go({ view: "overview", params: { ...(router.current.view === "overview" ? {} : { step: null, group: null }), vs: next.join(",") || null } });
  }
}
