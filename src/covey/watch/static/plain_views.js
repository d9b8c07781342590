// Two simple views: the recordings and pictures of a run, and its configuration.

import { api } from "./api.js";
import { h, keyed, put } from "./dom.js";
import { bytes } from "./format.js";
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
    this.body = h("tbody", {});
    this.el = h("div", { class: "config" }, h("div", { class: "toolbar" }, h("div", { class: "search-field" }, this.filter)), h("div", { class: "scroll", tabIndex: 0, role: "region", "aria-label": "Settings of the run" },
      h("table", {}, h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "setting"), h("th", { scope: "col" }, "value"))), this.body)));
  }

  async update() {
    this.draw();
  }

  draw() {
    const wanted = this.filter.value.trim().toLowerCase();
    const rows = flat(this.detail.config).filter(([name, value]) => !wanted || `${name} ${value}`.toLowerCase().includes(wanted));
    put(this.body, rows.map(([name, value]) => h("tr", {}, h("th", { scope: "row" }, h("code", {}, name)), h("td", {}, value))));
  }

  grown() {}

  watches() {
    return false;
  }

  searchField() {
    return this.filter;
  }
}
