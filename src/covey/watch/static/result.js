// The result so far: scores before and after with their intervals, as tables and drawn on one line; of all held-out problems and by kind.

import { h } from "./dom.js";
import { count, direction, hasInterval, number, roundEnds, vocabulary } from "./format.js";

// Tables of the evaluations of the shown runs, one for each measure.
export function results(details) {
  const measures = [...new Set(details.map((detail) => vocabulary(detail).measure))];
  const tables = measures.map((measure) => resultsOf(details, (detail) => vocabulary(detail).measure === measure)).filter(Boolean);
  return tables.length ? tables : h("p", { class: "hint" }, "No evaluation yet.");
}

// "after" of runs that have ended, else "so far".
const afterOf = (rows) => (rows.every(({ detail }) => detail.state === "finished") ? "after" : "so far");

function resultsOf(details, chosen) {
  const rows = details.flatMap((detail, i) => (chosen(detail) ? (detail.evaluations ?? []) : []).filter((e) => e.before || e.after).map((evaluation) => ({ detail, i, evaluation })));
  if (!rows.length) return null;
  const several = details.length > 1;
  const limits = rows.some(({ evaluation }) => evaluation.max_new_tokens !== null && evaluation.max_new_tokens !== undefined);
  const [low, high] = range(rows.map(({ evaluation }) => evaluation), rows);
  const { before, after } = rows[0].evaluation;
  const { wording, config } = rows[0].detail;
  const what = [wording?.evaluation ?? "evaluation", wording?.score_name === "return" ? config?.environment?.id : null, (after ?? before)?.count ? count((after ?? before).count, wording?.measured ?? "case") : null];
  const interval = rows.some(({ evaluation: e }) => hasInterval(e.before) || hasInterval(e.after)) ? ", 95\u202f% interval" : "";
  return h("table", { class: "results" },
    h("caption", {}, `${what.filter(Boolean).join(", ")}${interval}. \u25cb before \u25cf ${afterOf(rows)}`),
    h("thead", {}, h("tr", {}, several && h("th", { scope: "col" }, "run"), limits && h("th", { scope: "col" }, "token limit"), h("th", { scope: "col" }, "before"), h("th", { scope: "col" }, afterOf(rows)), h("th", { scope: "col" }, "change"),
      h("td", { class: "drawn", "aria-hidden": "true" }, scale(low, high, vocabulary(rows[0].detail))))),
    h("tbody", {}, rows.map(({ detail, i, evaluation }) => row(detail, i, evaluation, { several, limits, low, high }))));
}

// A table of the results by kind of problem of the shown runs, at the token limit of training; null if there are no kinds.
export function byKind(details) {
  const several = details.length > 1;
  const shown = details.map((detail, i) => ({ detail, i, kinds: detail.evaluations?.[0]?.kinds ?? [] }));
  const names = [...new Set(shown.flatMap(({ kinds }) => kinds.map(({ kind }) => kind)))].sort();
  if (!names.length) return null;
  const rows = names.flatMap((name) => shown.map(({ detail, i, kinds }) => ({ detail, i, name, found: kinds.find(({ kind }) => kind === name) })).filter(({ found }) => found));
  const [low, high] = range(rows.map(({ found }) => found), rows);
  return h("table", { class: "results" },
    h("caption", {}, `By kind of problem, 95\u202f% interval. \u25cb before \u25cf ${afterOf(rows)}`),
    h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "kind"), several && h("th", { scope: "col" }, "run"),
      h("th", { scope: "col" }, "before"), h("th", { scope: "col" }, afterOf(rows)), h("th", { scope: "col" }, "change"), h("td", { class: "drawn", "aria-hidden": "true" }, scale(low, high, vocabulary(rows[0].detail))))),
    h("tbody", {}, rows.map(({ detail, i, name, found }) => h("tr", {}, h("th", { scope: "row", class: "kind" }, name, h("small", {}, count((found.after ?? found.before).count, detail.wording?.measured ?? "case"))), several && h("td", {}, h("i", { class: "swatch", vars: { "--colour": `var(--run-${i})` } }), ` ${detail.name}`),
      compared(detail, i, found, low, high)))));
}

// The axis for pairs of estimates.
function range(pairs, rows) {
  if (rows.every(({ detail }) => vocabulary(detail).kind === "accuracy")) return [0, 1];
  const bounds = pairs.flatMap(({ before, after }) => [before, after]).filter(Boolean).flatMap((e) => [e.low, e.high, e.score]).filter((v) => v !== null && v !== undefined);
  return roundEnds(Math.min(...bounds), Math.max(...bounds));
}

function row(detail, i, evaluation, { several, limits, low, high }) {
  return h("tr", {}, several && h("th", { scope: "row" }, h("i", { class: "swatch", vars: { "--colour": `var(--run-${i})` } }), detail.name),
    limits && h("td", {}, evaluation.max_new_tokens ?? "\u2013"), compared(detail, i, evaluation, low, high));
}

// The cells of a pair of estimates: before, after, change, drawing. A change has a colour if the intervals are apart.
function compared(detail, i, { before, after }, low, high) {
  const words = vocabulary(detail);
  const change = before && after ? after.score - before.score : null;
  return [h("td", {}, estimate(before, words)), h("td", {}, estimate(after, words)),
    h("td", { class: direction(before, after) }, change === null ? "\u2013" : words.change(change)),
    h("td", { class: "drawn", "aria-hidden": "true" }, whiskers(before, after, low, high, i))];
}

function estimate(value, words) {
  if (!value || value.score === null) return "\u2013";
  const interval = !hasInterval(value) ? "" : ` ${words.score(value.low).replace("\u202f%", "")}\u2013${words.score(value.high)}`;
  return [h("strong", {}, words.score(value.score)), interval && h("small", {}, interval)];
}

function whiskers(before, after, low, high, i) {
  const at = (value) => `${(100 * (value - low)) / (high - low || 1)}%`;
  const mark = (e, kind) => e && e.score !== null && [
    hasInterval(e) && h("i", { class: `interval ${kind}`, vars: { "--low": at(e.low), "--high": at(e.high) } }),
    h("b", { class: `estimate ${kind}`, vars: { "--at": at(e.score) } })];
  return h("div", { class: "whiskers", vars: { "--own": `var(--run-${i})` } }, mark(before, "before"), mark(after, "after"));
}

function scale(low, high, words) {
  const write = words.kind === "accuracy" ? (v) => `${Math.round(100 * v)}\u202f%` : (v) => number(v, 2);
  return h("span", { class: "scale" }, h("span", {}, write(low)), h("span", {}, write(high)));
}
