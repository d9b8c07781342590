// The result so far: scores before and after with their intervals, as a table and drawn on one line.

import { h } from "./dom.js";
import { count, number, vocabulary } from "./format.js";

// A table of the evaluations of the shown runs.
export function results(details) {
  const rows = details.flatMap((detail, i) => (detail.evaluations ?? []).filter((e) => e.before || e.after).map((evaluation) => ({ detail, i, evaluation })));
  if (!rows.length) return h("p", { class: "hint" }, "No evaluation yet.");
  const several = details.length > 1;
  const limits = rows.some(({ evaluation }) => evaluation.max_new_tokens !== null && evaluation.max_new_tokens !== undefined);
  const bounds = rows.flatMap(({ evaluation }) => [evaluation.before, evaluation.after]).filter(Boolean).flatMap((e) => [e.low, e.high, e.score]).filter((v) => v !== null && v !== undefined);
  const accuracy = rows.every(({ detail }) => vocabulary(detail).kind === "accuracy");
  const [low, high] = accuracy ? [0, 1] : padded(Math.min(...bounds), Math.max(...bounds));
  const { before, after } = rows[0].evaluation;
  const measured = details[0].wording?.measured ?? "case";
  return h("table", { class: "results" },
    h("caption", {}, `${details[0].wording?.evaluation ?? "evaluation"}${(after ?? before)?.count ? `, ${count((after ?? before).count, measured)}` : ""}, 95\u202f% interval. \u25cb before \u25cf now`),
    h("thead", {}, h("tr", {}, several && h("th", { scope: "col" }, "run"), limits && h("th", { scope: "col" }, "token limit"), h("th", { scope: "col" }, "before"), h("th", { scope: "col" }, "now"), h("th", { scope: "col" }, "change"),
      h("td", { class: "drawn", "aria-hidden": "true" }, scale(low, high, vocabulary(details[0]))))),
    h("tbody", {}, rows.map(({ detail, i, evaluation }) => row(detail, i, evaluation, { several, limits, low, high }))));
}

function padded(low, high) {
  const spread = high - low || Math.abs(high) || 1;
  return [low - 0.05 * spread, high + 0.05 * spread];
}

function row(detail, i, { max_new_tokens: limit, before, after }, { several, limits, low, high }) {
  const words = vocabulary(detail);
  const change = before && after ? after.score - before.score : null;
  return h("tr", {}, several && h("th", { scope: "row" }, h("i", { class: "swatch", vars: { "--colour": `var(--run-${i})` } }), detail.name),
    limits && h("td", {}, limit ?? "\u2013"), h("td", {}, estimate(before, words)), h("td", {}, estimate(after, words)),
    h("td", { class: change > 0 ? "better" : change < 0 ? "worse" : "" }, change === null ? "\u2013" : words.change(change)),
    h("td", { class: "drawn", "aria-hidden": "true" }, whiskers(before, after, low, high, i)));
}

function estimate(value, words) {
  if (!value || value.score === null) return "\u2013";
  const interval = value.low === null || value.low === undefined ? "" : ` ${words.score(value.low).replace("\u202f%", "")}\u2013${words.score(value.high)}`;
  return [h("strong", {}, words.score(value.score)), interval && h("small", {}, interval)];
}

function whiskers(before, after, low, high, i) {
  const at = (value) => `${(100 * (value - low)) / (high - low || 1)}%`;
  const mark = (e, kind) => e && e.score !== null && [
    e.low !== null && e.low !== undefined && h("i", { class: `interval ${kind}`, vars: { "--low": at(e.low), "--high": at(e.high) } }),
    h("b", { class: `estimate ${kind}`, vars: { "--at": at(e.score) } })];
  return h("div", { class: "whiskers", vars: { "--own": `var(--run-${i})` } }, mark(before, "before"), mark(after, "after"));
}

function scale(low, high, words) {
  const write = words.kind === "accuracy" ? (v) => `${Math.round(100 * v)}\u202f%` : (v) => number(v, 2);
  return h("span", { class: "scale" }, h("span", {}, write(low)), h("span", {}, write(high)));
}
