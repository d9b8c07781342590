// All runs in one table, sorted by the column whose head is pressed.

import { h, put } from "./dom.js";
import { ago, direction, hasInterval, seconds, vocabulary, whole } from "./format.js";
import { router } from "./router.js";
import { STATES } from "./runs_list.js";

const by = (run) => vocabulary(run).score;
const score = (run, when) => run.result?.[when]?.score ?? null;
const change = (run) => (score(run, "before") === null || score(run, "after") === null ? null : score(run, "after") - score(run, "before"));

function estimate(run, when) {
  const value = run.result?.[when];
  if (!value) return "\u2013";
  return [by(run)(value.score), hasInterval(value) && h("small", {}, ` ${by(run)(value.low)}\u2013${by(run)(value.high)}`)];
}

// Columns: head, the value to sort by, the shown one (else the value), and their alignment.
const COLUMNS = [
  ["run", (run) => run.name, (run) => h("a", { href: router.link({ view: "overview", run: run.id, params: {}, keep: false }) }, run.name)],
  ["state", (run) => run.state, (run) => h("span", { class: "state", data: { state: run.state } }, STATES[run.state] ?? run.state)],
  ["recipe", (run) => run.recipe], ["algorithm", (run) => run.algorithm], ["seed", (run) => run.seed],
  ["steps", (run) => run.last_step, (run) => whole(run.last_step)],
  ["before", (run) => score(run, "before"), (run) => estimate(run, "before")],
  ["after or so far", (run) => score(run, "after"), (run) => estimate(run, "after")],
  ["change", change, (run) => (change(run) === null ? "\u2013" : h("span", { class: `change ${direction(run.result.before, run.result.after)}` }, vocabulary(run).change(change(run))))],
  ["time", (run) => run.seconds, (run) => seconds(run.seconds)],
  ["changed", (run) => run.updated, (run) => ago(run.updated)],
];

export class RunsTable {
  constructor(list) {
    this.list = list;
    this.sorted = null; // the place of a column
    this.down = false;
    this.heads = COLUMNS.map(([name], place) => h("th", { scope: "col" }, h("button", { type: "button", class: "plain", on: { click: () => this.sort(place) } }, name)));
    this.body = h("tbody", {});
    this.el = h("div", { class: "runs-table" }, h("h1", { tabIndex: -1 }, "Runs"), h("div", { class: "scroll", tabIndex: 0, role: "region", "aria-label": "Table of the runs" }, h("table", {}, h("thead", {}, h("tr", {}, this.heads)), this.body)));
  }

  sort(place) {
    this.down = this.sorted === place ? !this.down : false;
    this.sorted = place;
    this.draw();
  }

  draw() {
    const runs = [...this.list.runs.values()];
    if (this.sorted !== null) {
      const value = COLUMNS[this.sorted][1];
      const missing = (run) => value(run) === null || value(run) === undefined;
      const compare = (a, b) => (typeof value(a) === "string" ? value(a).localeCompare(value(b)) : value(a) - value(b)) * (this.down ? -1 : 1);
      runs.sort((a, b) => missing(a) - missing(b) || (missing(a) ? 0 : compare(a, b)));
    }
    this.heads.forEach((head, place) => head.setAttribute("aria-sort", place !== this.sorted ? "none" : this.down ? "descending" : "ascending"));
    put(this.body, runs.map((run) => h("tr", {}, COLUMNS.map(([, value, shown], place) => h(place ? "td" : "th", place ? {} : { scope: "row" }, (shown ?? value)(run) ?? "\u2013")))));
  }
}
