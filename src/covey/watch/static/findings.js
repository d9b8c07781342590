// What the diagnosis found in a run.

import { h, keyed, say } from "./dom.js";
import { count, title, whole } from "./format.js";

const SEVERITIES = { problem: "Problem", warning: "Warning" };

export class Findings {
  constructor(reveal) {
    this.reveal = reveal;
    this.summary = h("p", { class: "hint" });
    this.list = h("ul", { class: "findings" });
    this.el = h("section", { class: "panel", "aria-labelledby": "diagnosis" }, (this.heading = h("h2", { id: "diagnosis" }, "Diagnosis")), this.summary, this.list);
  }

  set({ findings = [], available = true, step = 0 } = {}, run = "") {
    say(this.heading, run ? `Diagnosis of ${run}` : "Diagnosis");
    const sorted = [...findings].sort((a, b) => (a.severity === b.severity ? 0 : a.severity === "problem" ? -1 : 1));
    this.summary.className = available && !findings.length && step ? "all-well" : "hint";
    say(this.summary, !available ? "Nothing can be said yet." : findings.length ? `${count(findings.length, "finding")} in ${count(step, "step")}.` : step ? `Nothing found in ${count(step, "step")}.` : "The checks begin with the first step.");
    keyed(this.list, sorted, (f) => `${f.check} ${f.first_step}`, (f) => this.row(f), (element, f) => {
      say(element.querySelector(".finding-steps"), steps(f));
      say(element.querySelector(".evidence"), sentence(f.evidence));
    });
  }

  row(f) {
    const name = f.check.replace(/_/g, " ").replace(/\bkl\b/, "KL");
    return h("li", { data: { severity: f.severity } },
      h("p", { class: "finding-head" }, h("span", { class: "severity" }, SEVERITIES[f.severity] ?? f.severity), h("strong", {}, name.charAt(0).toUpperCase() + name.slice(1)), h("span", { class: "finding-steps" })),
      h("p", { class: "evidence" }), h("p", { class: "reason" }, sentence(f.explanation)), h("p", { class: "remedy" }, h("strong", {}, "Remedy: "), sentence(f.remedy)),
      (f.metrics ?? []).length > 0 && h("p", { class: "see" }, "See ", f.metrics.map((metric) => h("button", { type: "button", class: "plain", on: { click: () => this.reveal(metric) } }, title(metric)))));
  }
}

function steps({ first_step: first, last_step: last }) {
  if (first === null || first === undefined) return "";
  return first === last ? `step ${whole(first)}` : `steps ${whole(first)}\u2013${whole(last)}`;
}

const sentence = (text) => `${text.charAt(0).toUpperCase()}${text.slice(1)}${/[.!?]$/.test(text) ? "" : "."}`;
