// The overview of one run, or of several over each other: result, diagnosis, facts, curves.

import { api, latest } from "./api.js";
import { Curves } from "./curves.js";
import { h, put, say, throttle } from "./dom.js";
import { Findings } from "./findings.js";
import { bytes, number, seconds, vocabulary, whole } from "./format.js";
import { byKind, results } from "./result.js";
import { router } from "./router.js";
import { overlaid } from "./runs_list.js";

export class Overview {
  constructor(detail) {
    this.detail = detail;
    this.result = h("section", { class: "panel", "aria-labelledby": "result" }, h("h2", { id: "result" }, "Result"), (this.verdict = h("p", { class: "verdict" })), h("div", { class: "scroll", tabIndex: 0, role: "region", "aria-label": "Table of the evaluations" }));
    this.kinds = h("div", { class: "scroll by-kind", tabIndex: 0, role: "region", "aria-label": "Table of the results by kind of problem", hidden: true });
    this.next = h("p", { class: "next", hidden: true }, h("strong", {}, "Next: "), h("span", {}));
    this.facts = h("dl", { class: "fact-list" });
    this.iterations = h("div", { class: "scroll", tabIndex: 0, role: "region", "aria-label": "Trainings of the reward model", hidden: true });
    this.result.append(this.kinds, this.next, this.iterations, this.facts);
    this.findings = new Findings((metric) => this.curves?.reveal(metric));
    this.differences = h("section", { class: "panel differences", hidden: true, "aria-labelledby": "differences" }, h("h2", { id: "differences" }, "What differs"), h("div", { class: "scroll", tabIndex: 0, role: "region", "aria-label": "Table of the settings that differ" }));
    this.place = h("section", { "aria-label": "Curves" });
    this.top = h("div", { class: "top" }, this.result, this.findings.el, this.differences);
    this.el = h("div", { class: "overview" }, this.top, this.place);
    this.only = latest();
    this.diagnose = throttle(2500, () => this.loadFindings());
  }

  async update(route) {
    const ids = [this.detail.id, ...overlaid(route.params).filter((id) => id !== this.detail.id)].slice(0, 6);
    if (ids.join() !== this.ids) {
      const others = await this.only((signal) => Promise.all(ids.slice(1).map((id) => api.run(id, signal).catch(() => null))));
      if (others === null) return;
      this.ids = ids.join();
      this.details = [this.detail, ...others.filter(Boolean)];
      this.curves?.destroy();
      this.curves = new Curves(this.details, (params) => router.go({ params }, { replace: !("zoom" in params) }));
      this.place.replaceChildren(this.curves.el);
      this.drawTop();
      this.curves.apply(route.params);
      await Promise.all([this.curves.load(), this.loadFindings()]);
      return;
    }
    this.curves.apply(route.params);
  }

  drawTop() {
    this.top.classList.toggle("several", this.details.length > 1);
    const { verdict, next, iterations } = this.detail;
    this.verdict.hidden = !verdict || this.details.length > 1;
    this.verdict.dataset.outcome = verdict?.outcome ?? "";
    say(this.verdict, verdict?.text ?? "");
    this.next.hidden = !next || this.details.length > 1;
    say(this.next.lastChild, next ?? "");
    this.iterations.hidden = !iterations?.length || this.details.length > 1;
    put(this.iterations, trainings(iterations ?? []));
    put(this.result.querySelector(".scroll"), results(this.details));
    const written = JSON.stringify(this.details.map((detail) => [detail.id, detail.evaluations?.[0]?.kinds]));
    if (written !== this.shownKinds) { // otherwise the place in the table stays
      this.shownKinds = written;
      put(this.kinds, byKind(this.details));
      this.kinds.hidden = !this.kinds.firstChild;
    }
    put(this.facts, facts(this.detail).map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))));
    this.differences.hidden = this.details.length < 2;
    if (this.details.length > 1) put(this.differences.querySelector(".scroll"), differences(this.details));
  }

  async loadFindings() {
    const found = await api.diagnosis(this.detail.id).catch(() => null);
    if (!found) return;
    this.findings.set(found, this.details.length > 1 ? this.detail.name : "");
    this.curves?.setFindings(found.findings ?? []);
  }

  // A shown run has grown; `detail` is what is known of it now.
  grown(detail) {
    const place = this.details?.findIndex((each) => each.id === detail.id) ?? -1;
    if (place < 0) return;
    Object.assign(this.details[place], detail);
    if (place === 0) Object.assign(this.detail, detail);
    this.drawTop();
    this.curves.refresh();
    if (place === 0) this.diagnose();
  }

  watches(id) {
    return this.details?.some((detail) => detail.id === id) ?? false;
  }

  destroy() {
    this.curves?.destroy();
  }
}

// The trainings of the reward model of an iterative run.
function trainings(iterations) {
  const heads = ["training", "after step", "rank agreement before", "after"];
  const agreement = (each, when) => number(each[when]?.rank_agreement);
  return h("table", {}, h("caption", {}, "Trainings of the reward model. Rank agreement: how often it scores a right completion of the current policy above a wrong one."),
    h("thead", {}, h("tr", {}, heads.map((head) => h("th", { scope: "col" }, head)))),
    h("tbody", {}, iterations.map((each, i) => h("tr", {}, [whole(i + 1), whole(each.step), agreement(each, "before"), agreement(each, "after")].map((text) => h("td", {}, text))))));
}

function facts(detail) {
  const summary = detail.summary ?? {};
  const words = vocabulary(detail);
  const rows = [
    ["recipe", detail.recipe], ["time", typeof summary.seconds === "number" ? seconds(summary.seconds) : null],
    ["tokens sampled", words.language && summary.decisions_sampled ? whole(summary.decisions_sampled) : null],
    ["environment steps", summary.environment_steps ? whole(summary.environment_steps) : null], ["episodes", summary.episodes ? whole(summary.episodes) : null],
    ["expected return", summary.expected_return ? number(summary.expected_return) : null],
    ["peak memory", summary.peak_memory_bytes ? bytes(summary.peak_memory_bytes) : null], ["folder", detail.path],
  ];
  return rows.filter(([, value]) => value !== null && value !== undefined);
}

export function flat(table, prefix = "") {
  const isTable = (value) => value !== null && typeof value === "object" && !Array.isArray(value);
  return Object.entries(table ?? {}).flatMap(([key, value]) =>
    isTable(value) ? flat(value, `${prefix}${key}.`) : Array.isArray(value) && value.length && value.every(isTable) ? value.flatMap((each, i) => flat(each, `${prefix}${key}[${i + 1}].`)) : [[`${prefix}${key}`, typeof value === "string" ? value : JSON.stringify(value)]]);
}

// The settings that are not the same in all shown runs.
function differences(details) {
  const tables = details.map((detail) => new Map(flat(detail.config)));
  const names = [...new Set(tables.flatMap((table) => [...table.keys()]))].filter((name) => new Set(tables.map((table) => table.get(name))).size > 1 && name !== "run_dir");
  if (!names.length) return h("p", { class: "hint" }, "The settings are the same.");
  return h("table", {}, h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "setting"), details.map((detail, i) => h("th", { scope: "col" }, h("i", { class: "swatch", vars: { "--colour": `var(--run-${i})` } }), detail.name)))),
    h("tbody", {}, names.map((name) => h("tr", {}, h("th", { scope: "row" }, h("code", {}, name)), tables.map((table) => h("td", {}, table.get(name) ?? "\u2013"))))));
}
