// The curves of the overview: sections of charts over the shown runs, with one cursor, one zoom and one smoothing for all.

import { Chart, DASHES } from "./chart.js";
import { h, segmented, throttle } from "./dom.js";
import { hasInterval, number, seconds, tickWriter, title, vocabulary, whole, writer } from "./format.js";
import { align, RunNumbers, smooth } from "./metric_store.js";
import { arrange, chartKey, LOGARITHMIC, meaningOf, nameOf, TIME_PARTS, TIME_TOTAL } from "./sections.js";
import { theme } from "./theme.js";

const BINARY = Array.from({ length: 40 }, (_, power) => 2 ** (power + 5)); // distances of ticks in bytes

export class Curves {
  // `details`: what the server says of each shown run, the first one being the main one; `change(params)` changes the address
  constructor(details, change) {
    this.details = details;
    this.change = change;
    this.words = details.map(vocabulary);
    this.runs = details.map((detail) => new RunNumbers(detail.id));
    this.charts = new Map();
    this.findings = [];
    this.toolbar = this.buildToolbar();
    this.sections = h("div", { class: "sections" });
    this.el = h("div", { class: "curves" }, this.toolbar, this.sections);
    this.forget = theme.onChange(() => this.charts.forEach((chart) => chart.redraw()));
    this.refresh = throttle(1500, () => this.load().catch(() => {}));
  }

  buildToolbar() {
    const { x_metric: own, x_label: label } = this.details[0].wording ?? {};
    const shared = own && own !== "step" && this.details.every((detail) => detail.wording?.x_metric === own);
    this.axes = [["step", "step"], ...(shared ? [[own, (label ?? own).replace(/^training /, "")]] : []), ["seconds", "time of training"]];
    this.axisPicker = segmented("Horizontal axis", this.axes, "step", (x) => this.change({ x: x === "step" ? null : x, zoom: null }));
    const slider = h("input", { type: "range", min: "0", max: "0.98", value: "0", "aria-label": "Smoothing of the curves" });
    slider.step = "0.02";
    const shown = h("output", {}, "0");
    slider.addEventListener("input", () => {
      shown.textContent = slider.value;
      this.setSmoothing(Number(slider.value));
    });
    slider.addEventListener("change", () => this.change({ smooth: Number(slider.value) || null }));
    this.slider = Object.assign(slider, { shown });
    this.modes = segmented("Form of the numbers", [["", "Curves"], ["tables", "Tables"]], "", (as) => this.change({ as: as || null }));
    this.reset = h("button", { type: "button", class: "plain", hidden: true, on: { click: () => this.change({ zoom: null }) } }, "Reset zoom");
    return h("div", { class: "toolbar" }, h("label", { class: "field" }, h("span", {}, "Smoothing"), slider, shown), this.axisPicker, this.modes, this.reset,
      h("span", { class: "hint" }, "drag to zoom, double-click to reset"));
  }

  // The charts by key: the metric, and the places of the runs whose numbers have the same meaning.
  plan() {
    const found = new Map();
    this.details.forEach((detail, i) => {
      for (const metric of detail.metrics ?? []) {
        const meaning = meaningOf(metric, this.words[i]);
        const split = this.words.some((words) => meaningOf(metric, words) !== meaning);
        const key = chartKey(metric.name, split ? meaning : "");
        if (!found.has(key)) found.set(key, { metric, members: [], words: this.words[i], split: split ? meaning : "" });
        found.get(key).members.push(i);
      }
    });
    return found;
  }

  async load(signal) {
    const keys = [...this.plan().keys()];
    const names = [...new Set(keys.map(nameOf))];
    const sections = arrange(keys);
    const first = (sections[0]?.keys ?? []).map(nameOf);
    const axis = { step: [], seconds: [TIME_TOTAL] }[this.axis ?? "step"] ?? [this.axis];
    if (!this.loaded && first.length) {
      await Promise.all(this.runs.map((run) => run.load([...new Set([...first, ...axis])], signal)));
      this.draw(sections.slice(0, 1));
    }
    await Promise.all(this.runs.map((run) => run.load(names, signal)));
    this.loaded = true;
    this.draw(sections);
  }

  draw(sections) {
    for (const section of sections) this.drawSection(section);
    if (!sections.length) this.sections.replaceChildren(h("p", { class: "empty" }, "No step has been recorded yet. The curves begin with the first one."));
  }

  drawSection(section) {
    let box = this.sections.querySelector(`[data-section="${section.key}"]`);
    if (!box) {
      box = h("details", { class: "section", open: !section.closed, data: { section: section.key } }, h("summary", {}, h("h3", {}, section.title)),
        section.note && h("p", { class: "note" }, section.note), h("div", { class: `grid${section.tall ? " tall" : ""}` }), h("div", { class: "steady" }));
      const order = arrange([...this.plan().keys()]).map((each) => each.key);
      const next = [...this.sections.children].find((other) => order.indexOf(other.dataset.section) > order.indexOf(section.key));
      this.sections.querySelector(".empty")?.remove();
      this.sections.insertBefore(box, next ?? null);
    }
    const grid = box.querySelector(".grid");
    if (section.key === "cost" && section.keys.includes(TIME_TOTAL)) this.drawTime(grid);
    const plan = this.plan();
    for (const key of section.keys) {
      if (!this.charts.has(key)) {
        this.charts.set(key, this.chartOf(key, plan.get(key), section.tall));
        this.dress(this.charts.get(key));
      }
      this.drawMetric(key, plan.get(key));
      this.settle(box, section.keys, this.charts.get(key));
    }
  }

  // A number that does not change is a line of text below the section's curves, in the same order.
  settle(box, keys, chart) {
    const steady = chart.isSteady() && !this.tables;
    const target = box.querySelector(steady ? ".steady" : ".grid");
    if (chart.el.parentElement === target) return;
    const after = keys.slice(keys.indexOf(chart.key) + 1).map((key) => this.charts.get(key)?.el).find((el) => el?.parentElement === target);
    chart.el.classList.toggle("constant", steady);
    target.insertBefore(chart.el, after ?? null);
  }

  chartOf(key, { metric, words, split }, tall) {
    const { name, unit } = metric;
    const share = unit === "fraction" || (unit === "score; return" && words.kind === "accuracy");
    const ofScore = name === "score/mean" || name === "eval/score";
    const named = ofScore ? scoreTitle(name, words) : title(name);
    const shared = [...this.plan().keys()].filter((other) => nameOf(other) === name).length > 1;
    const environment = words.measure.slice(words.kind.length).trim();
    const suffix = !shared || !split ? "" : split !== words.measure ? split : environment || (ofScore ? "" : split);
    return new Chart(key, {
      title: suffix ? `${named} (${suffix})` : named, unit: words.unit(unit) || named.toLowerCase(), write: writer(unit, words), tick: tickWriter(unit, words), ...this.axisTexts(), definition: definition(metric, words),
    }, { height: tall ? 180 : 140, logarithmic: LOGARITHMIC.test(name), floor: share ? 0 : null, ceiling: share ? 1 : null, increments: unit === "bytes" ? BINARY : undefined, on: this.handlers() });
  }

  axisTexts() {
    const writeX = this.axis === "seconds" ? seconds : (x) => (x >= 1e6 ? `${number(x / 1e6)}M` : whole(x));
    return { xLabel: this.axisLabel(), writeX, fractions: this.axis === "seconds" };
  }

  axisLabel() {
    const axis = this.axis ?? "step";
    return this.axes.find(([key]) => key === axis)?.[1] ?? axis;
  }

  handlers() {
    return {
      range: (range) => this.change({ zoom: range ? range.map((x) => +x.toFixed(1)).join("_") : null }),
      cursor: (x) => this.charts.forEach((chart) => chart.moveTo(x)),
    };
  }

  dress(chart) {
    chart.setZoom(this.zoom ?? null);
    chart.showTable(this.tables ?? false);
  }

  drawMetric(key, { metric: { name }, members }) {
    const runs = members.map((i) => ({ run: this.withEnds(name, i), i })).filter(({ run }) => run.series[name]?.mean.some((v) => v !== null));
    const { x, columns } = align(runs.map(({ run }) => run), this.axis ?? "step", (run) => {
      const { mean, low, high } = run.series[name];
      const smoothed = smooth(mean, this.smoothing ?? 0);
      const thin = mean.some((v, i) => v !== null && low?.[i] !== null && low?.[i] !== undefined && low[i] !== high[i]);
      return [smoothed, thin ? low : null, thin ? high : null, this.smoothing ? mean : null];
    });
    const lines = runs.map(({ run, i }, r) => ({ label: this.details[i].name, colour: `--run-${i % 6}`, dash: DASHES[i % DASHES.length], mean: columns[r][0], low: columns[r][1], high: columns[r][2], raw: columns[r][3], whiskers: this.whiskers(name, i, run) }));
    const marks = (this.axis ?? "step") === "step" ? this.findings.filter((f) => (f.metrics ?? []).includes(name)) : [];
    this.charts.get(key).setData(x, lines, marks.map((f) => ({ first: f.first_step, last: f.last_step, severity: f.severity })));
  }

  // The held-out scores have those before training and, of a finished run, after it.
  withEnds(name, i) {
    if (name !== "eval/score") return this.runs[i];
    const { before, after } = this.details[i].result ?? {};
    return this.runs[i].withEnds(name, before, this.details[i].state === "finished" ? after : null);
  }

  // The intervals of the first and the last evaluation; those between have none on record.
  whiskers(name, i, run) {
    const { before, after } = this.details[i].result ?? {};
    if (name !== "eval/score" || this.smoothing) return [];
    const x = run.x(this.axis ?? "step");
    const last = run.series[name].mean.findLastIndex((value) => value !== null);
    return [{ x: 0, ...before }, { x: x[last], ...after }].filter(hasInterval);
  }

  drawTime(grid) {
    if (!this.charts.has("time")) {
      this.charts.set("time", new Chart("time", {
        title: this.runs.length > 1 ? `Time of a step, ${this.details[0].name}` : "Time of a step, by part", unit: "s", write: seconds, tick: tickWriter("-", this.words[0]), ...this.axisTexts(),
        definition: [h("p", {}, "The seconds of each step, divided into its parts and stacked: their sum is time/step. A step does not contain evaluations and checkpoints.")],
      }, { height: 140, on: this.handlers() }));
      grid.prepend(this.charts.get("time").el);
      this.charts.get("time").el.classList.add("wide");
      this.dress(this.charts.get("time"));
    }
    const run = this.runs[0];
    const parts = TIME_PARTS.filter((name) => run.series[name]?.mean.some((v) => v > 0));
    const { x, columns: [own] } = align([run], this.axis ?? "step", () => [...parts, TIME_TOTAL].map((name) => run.series[name]?.mean));
    const total = own.at(-1);
    const other = total?.map((all, i) => (all === null ? null : Math.max(0, all - parts.reduce((sum, _, p) => sum + (own[p][i] ?? 0), 0))));
    const stacked = [...own.slice(0, -1), other].map((column) => smooth(column, this.smoothing ?? 0));
    const sums = x.map(() => 0);
    const lines = [...parts.map((name) => name.slice(5)), "other"].map((label, p) => ({
      label, colour: `--part-${p}`, area: true, shown: stacked[p], mean: stacked[p].map((v, i) => (sums[i] += v ?? 0)),
    }));
    this.charts.get("time").setData(x, lines);
  }

  setFindings(findings) {
    this.findings = findings.filter((finding) => finding.first_step !== null);
    if (this.loaded) this.draw(arrange([...this.plan().keys()]));
  }

  setSmoothing(weight) {
    if (weight === (this.smoothing ?? 0)) return;
    this.smoothing = weight;
    if (this.loaded) this.draw(arrange([...this.plan().keys()]));
  }

  // The parameters of the address: zoom, smooth, x, as.
  apply({ zoom, smooth: weight, x, as }) {
    const ends = (zoom ?? "").split("_").map(Number);
    const range = ends.length === 2 && ends.every(Number.isFinite) && ends[0] < ends[1] ? ends : null;
    const smoothing = Math.min(0.98, Math.max(0, Number(weight) || 0));
    this.slider.value = String(smoothing);
    this.slider.shown.textContent = String(smoothing);
    this.tables = as === "tables";
    this.modes.set(as ?? "");
    this.axisPicker?.set(x ?? "step");
    this.zoom = range;
    this.reset.hidden = !range;
    if ((x ?? "step") !== (this.axis ?? "step")) {
      this.axis = x ?? "step";
      this.charts.forEach((chart) => chart.setAxis(this.axisTexts()));
    }
    this.setSmoothing(smoothing);
    this.charts.forEach((chart) => this.dress(chart));
    if (this.loaded) this.draw(arrange([...this.plan().keys()]));
  }

  // Scrolls to the chart of a metric and puts the focus on it.
  reveal(name) {
    const chart = [...this.charts].find(([key]) => nameOf(key) === name)?.[1];
    if (!chart) return;
    chart.el.closest("details").open = true;
    chart.el.scrollIntoView({ block: "center" });
    chart.plot.focus({ preventScroll: true });
  }

  destroy() {
    this.forget();
    this.charts.forEach((chart) => chart.destroy());
  }
}

function scoreTitle(name, { kind }) {
  return name === "eval/score" ? `Held-out ${kind}` : `${kind.charAt(0).toUpperCase()}${kind.slice(1)} in training`;
}

export function definition(metric, words) {
  const text = (words_) => (words.language ? words_.replace(/a decision/g, "a token").replace(/decisions/g, "tokens") : words_);
  return [
    h("p", {}, h("code", {}, metric.name), metric.unit && metric.unit !== "-" ? `, ${words.unit(metric.unit)}` : ""),
    metric.meaning && h("p", {}, text(metric.meaning), "."),
    metric.healthy && h("p", { class: "healthy" }, h("strong", {}, "Healthy: "), text(metric.healthy), "."),
  ];
}
