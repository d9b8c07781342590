// Two simple views: the recordings and pictures of a run; its settings, its environment and how to repeat it.

import { api } from "./api.js";
import { h, keyed, put, say } from "./dom.js";
import { bytes, count } from "./format.js";
import { flat } from "./overview.js";

const still = matchMedia("(prefers-reduced-motion: reduce)");

export class Files {
  constructor(detail) {
    this.detail = detail;
    this.list = h("div", { class: "files" });
    this.empty = h("p", { class: "empty" }, "This run has no picture or recording yet. A run that ends writes curve.png; ", h("code", {}, "covey eval RUN --render"), " records an agent.");
    this.el = h("div", {}, this.empty, this.list);
  }

  async update() {
    const files = this.detail.files ?? [];
    this.empty.hidden = files.length > 0;
    keyed(this.list, files, (file) => `${file.name} ${file.bytes}`, (file) => this.figure(file));
  }

  figure(file) {
    const source = api.file(this.detail.id, file.name);
    const moving = /\.(gif|webp|mp4|webm)$/i.test(file.name);
    const place = h("div", { class: "picture" });
    const show = () => put(place, /\.(mp4|webm)$/i.test(file.name) ? h("video", { controls: true, src: source }) : h("img", { src: source, alt: `${file.name} of ${this.detail.name}`, loading: "lazy" }));
    if (moving && still.matches) put(place, h("button", { type: "button", on: { click: show } }, `Play ${file.name}`));
    else show();
    return h("figure", { class: "file" }, place, h("figcaption", {}, h("a", { href: source, download: file.name.split("/").at(-1) }, file.name), ` ${bytes(file.bytes)}`));
  }

  grown(detail) {
    Object.assign(this.detail, detail);
    return this.update();
  }

  watches(id) {
    return id === this.detail.id;
  }
}

export class Config {
  constructor(detail) {
    this.detail = detail;
    this.filter = h("input", { type: "search", placeholder: "Filter settings", "aria-label": "Filter settings", on: { input: () => this.draw() } });
    this.changed = settings("Settings that differ from the defaults", ["setting", "value", "default"]);
    this.usual = settings("Settings with their defaults", ["setting", "value"]);
    this.summary = h("summary", {});
    this.rest = h("details", {}, this.summary, this.usual);
    this.machine = settings("Environment", ["part", "version or value"]);
    this.el = h("div", { class: "config" }, h("div", { class: "toolbar" }, h("div", { class: "search-field" }, this.filter)), this.changed, this.rest,
      (this.repeat = h("section", {}, h("h2", {}, "To repeat it"), h("pre", { tabIndex: 0 }), h("p", { class: "hint" }, "With the same versions, files and kind of machine, the result is bitwise the same."))), this.machine);
  }

  async update() {
    this.draw();
  }

  draw() {
    const wanted = this.filter.value.trim().toLowerCase();
    const defaults = new Map(flat(this.detail.defaults));
    const shown = flat(this.detail.config).filter(([name, value]) => name !== "run_dir" && (!wanted || `${name} ${value}`.toLowerCase().includes(wanted)));
    const [usual, changed] = [true, false].map((same) => shown.filter(([name, value]) => (defaults.get(name) === value) === same));
    this.changed.fill(changed.map(([name, value]) => [name, value, defaults.get(name) || "\u2013"]));
    this.usual.fill(usual);
    this.rest.hidden = !usual.length;
    if (wanted) this.rest.open = true;
    say(this.summary, count(usual.length, "setting with its default", "settings with their defaults"));
    this.machine.fill(flat(this.detail.machine));
    this.repeat.hidden = !this.detail.repeat;
    say(this.repeat.querySelector("pre"), this.detail.repeat ?? "");
  }

  grown() {}

  watches() {
    return false;
  }

  searchField() {
    return this.filter;
  }
}

// A table of names and values; `fill(rows)`, and without rows it is hidden.
function settings(label, heads) {
  const body = h("tbody", {});
  const box = h("div", { class: "scroll", tabIndex: 0, role: "region", "aria-label": label }, h("table", {}, h("caption", {}, label), h("thead", {}, h("tr", {}, heads.map((head) => h("th", { scope: "col" }, head)))), body));
  return Object.assign(box, { fill: (rows) => {
    box.hidden = !rows.length;
    put(body, rows.map(([name, ...values]) => h("tr", {}, h("th", { scope: "row" }, h("code", {}, name)), values.map((value) => h("td", {}, value)))));
  } });
}
