// One chart: a title with the value under the cursor, the definition of its metric, and a uPlot or a table of its numbers.
//
// A line is {label, colour, dash, mean, low, high, raw, shown, area, whiskers}: columns over the common x values. `low` and `high` make a
// band, `whiskers` are estimates [{x, low, high}] with their intervals, `raw` is drawn faintly behind a smoothed `mean`, `shown` are the values to read where they are not `mean` (stacked areas).

import uPlot from "./vendor/uPlot.esm.js";
import { assign, h, keyed, put, say, uniqueId } from "./dom.js";
import { roundEnds } from "./format.js";
import { theme } from "./theme.js";

const STEPS = [1, 2, 5, 10, 20, 25, 50, 100, 200, 250, 500, 1e3, 2e3, 2500, 5e3, 1e4, 2e4, 25e3, 5e4, 1e5, 2e5, 25e4, 5e5, 1e6, 2e6, 5e6, 1e7, 1e8, 1e9]; // distances of ticks
const SECONDS = [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 28800, 86400, 172800, 432800];
const SYNC = "watch"; // all charts share one cursor
const PER_LINE = 4; // uPlot series of a line: low, high, raw, mean
export const DASHES = [[], [7, 3], [2, 3], [9, 3, 2, 3], [4, 2, 1, 2, 1, 2], [12, 4]];

const resized = new ResizeObserver((entries) => {
  for (const { target, contentRect } of entries) target.chart?.resize(Math.floor(contentRect.width));
});

export class Chart {
  // `texts`: {title, unit, definition (nodes), write, tick, xLabel, writeX}; `on`: {range([min, max] or null), cursor(x)};
  // `increments`: distances of ticks on the y axis, if not the usual ones
  constructor(key, texts, { height = 150, logarithmic = false, floor = null, ceiling = null, increments = undefined, on = {} } = {}) {
    Object.assign(this, { key, texts, height, floor, ceiling, increments, on });
    this.lines = [];
    this.x = [];
    this.zoom = null;
    this.log = false;
    this.marks = [];
    this.build(logarithmic);
    this.plot.chart = this;
    resized.observe(this.plot);
  }

  build(logarithmic) {
    const { title, definition } = this.texts;
    const headingId = uniqueId("chart");
    this.readout = h("dl", { class: "readout" });
    this.at = h("span", { class: "at" });
    this.info = h("div", { class: "definition", id: uniqueId("definition"), hidden: true }, definition,
      h("p", {}, "Save as ", h("button", { type: "button", class: "plain", on: { click: () => this.savePicture() } }, "PNG"), " ", h("button", { type: "button", class: "plain", on: { click: () => this.saveNumbers() } }, "CSV")));
    const toggle = h("button", {
      type: "button", class: "tiny", "aria-expanded": "false", "aria-controls": this.info.id, "aria-label": `What is ${title}?`,
      on: { click: () => toggle.setAttribute("aria-expanded", String((this.info.hidden = !this.info.hidden) === false)) },
    }, "?");
    this.logButton = logarithmic && h("button", {
      type: "button", class: "tiny", "aria-pressed": "false", "aria-label": `log axis: ${title}`, on: { click: () => this.setLog(!this.log) },
    }, "log");
    this.plot = h("div", { class: "plot", role: "slider", tabIndex: 0, "aria-labelledby": headingId, "aria-valuemin": "0", "aria-valuemax": "0", "aria-valuenow": "0", vars: { "--height": `${this.height}px` } });
    this.plot.addEventListener("keydown", (event) => this.onKey(event));
    this.table = h("div", { class: "numbers", role: "region", tabIndex: 0, "aria-label": `Numbers: ${title}`, hidden: true });
    this.el = h("figure", { class: "chart", data: { metric: this.key } },
      h("figcaption", {},
        h("div", { class: "chart-head" }, h("h4", { id: headingId }, title), this.at, this.logButton, toggle),
        this.readout, this.info),
      this.plot, this.table);
  }

  setLog(pressed) {
    if (!this.logButton || this.log === pressed) return;
    this.log = pressed;
    this.logButton.setAttribute("aria-pressed", String(pressed));
    this.rebuild();
  }

  setData(x, lines, marks = []) {
    const same = lines.length === this.lines.length && lines.every((line, i) => line.label === this.lines[i].label && line.colour === this.lines[i].colour);
    const grown = x.length - this.x.length;
    Object.assign(this, { x, lines, marks });
    const crossing = this.wantsPoints !== this.pointsWanted();
    if (!same || crossing || !this.u) this.rebuild();
    else this.u.setData(this.columns());
    if (grown && this.u && this.held !== null && this.held !== undefined) this.moveTo(this.held);
    this.read();
    if (!this.table.hidden) this.fillTable();
  }

  // True if every line has one value only, so that there is nothing to draw.
  isSteady() {
    return this.x.length > 1 && this.lines.every((line) => new Set(line.mean.filter((v) => v !== null)).size <= 1);
  }

  columns() {
    const positive = (column) => (this.log && column ? column.map((v) => (v > 0 ? v : null)) : column);
    const nothing = new Array(this.x.length).fill(null);
    return [this.x, ...this.lines.flatMap((line) => [line.low, line.high, line.raw, line.mean].map((c) => positive(c) ?? nothing))];
  }

  pointsWanted() {
    return this.lines.map((line) => !line.area && line.mean.reduce((n, v) => n + (v !== null), 0) <= 40).join();
  }

  rebuild() {
    this.u?.destroy();
    this.u = null;
    const width = Math.floor(this.plot.clientWidth);
    if (!width || !this.x.length || !this.lines.length) return;
    this.wantsPoints = this.pointsWanted();
    this.u = new uPlot(this.options(width), this.columns(), this.plot);
  }

  options(width) {
    const axis = { stroke: () => theme.colour("--ink-3"), font: "11px ui-sans-serif, system-ui, sans-serif", grid: { stroke: () => theme.colour("--line"), width: 1 }, ticks: { stroke: () => theme.colour("--line"), width: 1, size: 4 } };
    return {
      width, height: this.height, padding: [8, 18, 0, 0], legend: { show: false },
      scales: { x: { time: false, range: (_, min, max) => this.zoom ?? (min === max ? [min - 1, max + 1] : [min, max]) }, y: this.log ? { distr: 3 } : { range: (_, min, max) => this.yRange(min, max) } },
      axes: [
        { ...axis, size: 24, gap: 3, space: 60, values: (_, ticks) => ticks.map((t) => this.texts.writeX(t)), incrs: this.texts.fractions ? SECONDS : STEPS },
        { ...axis, size: 48, gap: 4, space: 28, label: this.texts.unit, labelSize: 15, labelGap: 0, labelFont: axis.font, ...(this.increments ? { incrs: this.increments } : {}), values: (_, ticks) => ticks.map((t, i) => (t === null ? null : this.texts.tick(t, Math.abs((ticks[i + 1] ?? ticks[i - 1] ?? t) - t)))) },
      ],
      series: [{}, ...this.lines.flatMap((line, i) => this.seriesOf(line, this.wantsPoints.split(",")[i] === "true"))],
      bands: this.lines.flatMap((line, i) => {
        const first = 1 + PER_LINE * i;
        const bands = [{ series: [first + 1, first], fill: () => theme.translucent(line.colour, 0.16) }];
        if (line.area && i) bands.push({ series: [first + 3, first - 1], fill: () => theme.translucent(line.colour, 0.55) });
        return bands;
      }),
      cursor: {
        sync: { key: SYNC, setSeries: false }, y: false, drag: { x: true, y: false, setScale: false, dist: 5 },
        points: { size: 7, show: (u, s) => (s % PER_LINE === 0 ? undefined : false) },
        bind: { dblclick: () => () => this.on.range?.(null) },
      },
      hooks: {
        setSelect: [(u) => this.onSelect(u)],
        setCursor: [() => this.read()],
        drawClear: [(u) => this.drawMarks(u)],
        draw: [(u) => this.drawWhiskers(u)],
      },
    };
  }

  seriesOf(line, points) {
    const hidden = { stroke: "transparent", width: 0, points: { show: false }, spanGaps: true };
    const stroke = () => theme.colour(line.colour);
    const area = line.area && line === this.lines[0] ? { fill: () => theme.translucent(line.colour, 0.55) } : {};
    return [
      hidden, hidden,
      { ...hidden, stroke: () => theme.translucent(line.colour, 0.35), width: 1 },
      { stroke, width: line.area ? 1 : 1.6, dash: line.dash, spanGaps: true, points: { show: points, size: 5, width: 1, fill: stroke }, ...area },
    ];
  }

  yRange(min, max) {
    if (min === null || max === null || (min === 0 && max === 0)) return [0, 1];
    for (const { low: bottom, high: top } of this.lines.flatMap((line) => line.whiskers ?? [])) {
      min = Math.min(min, bottom ?? min);
      max = Math.max(max, top ?? max);
    }
    if (min >= 0 && (min < 0.35 * max || this.lines.some((line) => line.area))) min = 0;
    const [low, high] = roundEnds(min, max);
    const atTop = this.ceiling !== null && max <= this.ceiling && high >= this.ceiling;
    return [low, atTop ? this.ceiling + 0.03 * (this.ceiling - low) : high]; // so that a line at 100 % is seen whole
  }

  onSelect(u) {
    if (u.select.width < 5) return;
    const range = [u.posToVal(u.select.left, "x"), u.posToVal(u.select.left + u.select.width, "x")];
    u.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
    this.on.range?.(range);
  }

  // Another horizontal axis: {xLabel, writeX, fractions}; the numbers follow.
  setAxis(texts) {
    Object.assign(this.texts, texts);
    this.u?.destroy();
    this.u = null;
  }

  setZoom(range) {
    if (String(range) === String(this.zoom)) return;
    this.zoom = range;
    this.u?.setData(this.u.data);
  }

  drawMarks(u) {
    for (const { first, last, severity } of this.marks) {
      const left = Math.max(u.valToPos(first, "x", true), u.bbox.left);
      const right = Math.min(u.valToPos(last, "x", true), u.bbox.left + u.bbox.width);
      if (right < left) continue;
      u.ctx.fillStyle = theme.translucent(severity === "problem" ? "--bad" : "--warn", 0.1);
      u.ctx.fillRect(left - 1, u.bbox.top, Math.max(3, right - left + 2), u.bbox.height);
    }
  }

  drawWhiskers(u) {
    for (const line of this.lines) {
      for (const { x, low, high } of line.whiskers ?? []) {
        const at = u.valToPos(x, "x", true);
        if (at < u.bbox.left - 1 || at > u.bbox.left + u.bbox.width + 1 || low === null || low === undefined) continue;
        u.ctx.fillStyle = theme.translucent(line.colour, 0.45);
        const top = u.valToPos(high, "y", true);
        u.ctx.fillRect(at - devicePixelRatio, top, 2 * devicePixelRatio, u.valToPos(low, "y", true) - top);
      }
    }
  }

  // Index of the point that is read: that under the cursor, else the last one.
  index() {
    return this.u?.cursor.idx ?? this.x.length - 1;
  }

  valueAt(line, index) {
    const values = line.shown ?? line.mean;
    let i = index;
    while (i >= 0 && (values[i] === null || values[i] === undefined)) i -= 1;
    return i >= 0 ? values[i] : null;
  }

  read() {
    const index = this.index();
    const hovering = (this.u?.cursor.idx ?? null) !== null;
    say(this.at, hovering || !this.x.length ? (this.x.length ? `${this.texts.xLabel} ${this.texts.writeX(this.x[index])}` : "") : "");
    keyed(this.readout, this.lines, (line) => `${line.label}${line.colour}`,
      (line) => h("div", {}, h("dt", {}, h("i", { class: "swatch", vars: { "--colour": `var(${line.colour})` }, data: { dash: line.dash?.length ? "yes" : "no" } }), h("span", {}, line.label)), h("dd", {})),
      (element, line) => {
        say(element.lastChild, this.texts.write(this.valueAt(line, index)));
        element.firstChild.lastChild.hidden = this.lines.length === 1;
      });
    if (!this.x.length) return;
    assign(this.plot, { "aria-valuemin": this.x[0], "aria-valuemax": this.x.at(-1), "aria-valuenow": this.x[index],
      "aria-valuetext": `${this.texts.xLabel} ${this.texts.writeX(this.x[index])}: ${this.lines.map((line) => `${this.lines.length > 1 ? `${line.label} ` : ""}${this.texts.write(this.valueAt(line, index))}`).join(", ")}` });
  }

  onKey(event) {
    const step = { ArrowLeft: -1, ArrowRight: 1, ArrowDown: -1, ArrowUp: 1, PageDown: -10, PageUp: 10, Home: -1e9, End: 1e9 }[event.key];
    if (!step || event.altKey || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    event.stopPropagation();
    const index = Math.max(0, Math.min(this.x.length - 1, this.index() + step));
    this.on.cursor?.(this.x[index]);
  }

  // Moves this chart's cursor, and through uPlot's synchronisation only this one: the view moves them all.
  moveTo(x) {
    this.held = x;
    if (!this.u) return;
    const left = x === null ? -10 : this.u.valToPos(x, "x");
    this.u.setCursor({ left, top: x === null ? -10 : 1 }, true, false);
  }

  showTable(shown) {
    if (this.table.hidden === !shown) return;
    this.table.hidden = !shown;
    this.plot.hidden = shown;
    if (shown) this.fillTable();
    else this.rebuild();
  }

  fillTable() {
    const { title, unit, xLabel, write, writeX } = this.texts;
    const heads = this.lines.map((line) => h("th", { scope: "col" }, this.lines.length > 1 ? line.label : title));
    const rows = this.x.map((x, i) => [x, i]).filter(([, i]) => this.lines.some((line) => (line.shown ?? line.mean)[i] !== null)).map(([x, i]) =>
      h("tr", {}, h("th", { scope: "row" }, writeX(x)), this.lines.map((line) => h("td", {}, write((line.shown ?? line.mean)[i])))));
    put(this.table, h("table", {}, h("caption", {}, `${title}${unit ? `, in ${unit}` : ""}`), h("thead", {}, h("tr", {}, h("th", { scope: "col" }, xLabel), heads)), h("tbody", {}, rows.reverse())));
  }

  // Saves the curves with the title and the names of the runs.
  savePicture() {
    if (!this.u) return;
    const drawn = this.u.ctx.canvas;
    const [unit, head] = [devicePixelRatio, (this.lines.length > 1 ? 46 : 28) * devicePixelRatio];
    const canvas = h("canvas", { width: drawn.width, height: drawn.height + head });
    const context = canvas.getContext("2d");
    const write = (text, x, y, colour, weight) => {
      context.fillStyle = theme.colour(colour);
      context.font = `${weight} ${12 * unit}px ui-sans-serif, system-ui, sans-serif`;
      context.fillText(text, x, y);
      return x + context.measureText(text).width + 12 * unit;
    };
    context.fillStyle = theme.colour("--panel");
    context.fillRect(0, 0, canvas.width, canvas.height);
    write(this.texts.title, 8 * unit, 18 * unit, "--ink", 600);
    if (this.lines.length > 1) this.lines.reduce((x, line) => write(line.label, x, 36 * unit, line.colour, 400), 8 * unit);
    context.drawImage(drawn, 0, head);
    canvas.toBlob((blob) => save(blob, `${fileName(this.key)}.png`));
  }

  // Saves the numbers of the curves as a table.
  saveNumbers() {
    const quoted = (text) => `"${String(text).replace(/"/g, '""')}"`;
    const rows = this.x.map((x, i) => [x, ...this.lines.map((line) => (line.shown ?? line.mean)[i] ?? "")].join(","));
    const head = [this.texts.xLabel, ...this.lines.map((line) => line.label)].map(quoted).join(",");
    save(new Blob([[head, ...rows, ""].join("\n")], { type: "text/csv" }), `${fileName(this.key)}.csv`);
  }

  resize(width) {
    if (this.plot.hidden || !width) return;
    if (!this.u) this.rebuild();
    else if (this.u.width !== width) this.u.setSize({ width, height: this.height });
  }

  redraw() {
    this.u?.redraw(false, true);
  }

  destroy() {
    resized.unobserve(this.plot);
    this.u?.destroy();
    this.u = null;
  }
}

const fileName = (key) => key.replace(/[^\w.-]+/g, "-");

function save(blob, name) {
  const address = URL.createObjectURL(blob);
  h("a", { href: address, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(address), 60000);
}
