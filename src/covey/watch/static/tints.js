// The tints of tokens: numbers per token, and the colours that show them.

import { h } from "./dom.js";
import { number, signed } from "./format.js";

const log = (tokens, name, i) => tokens[name]?.[i] ?? null;

// k3 estimate of the KL to the reference at one token: r - log r - 1 with log r = reference - policy.
function klAt(tokens, i) {
  const policy = log(tokens, "logprobs", i);
  const reference = log(tokens, "reference_logprobs", i);
  if (policy === null || reference === null) return null;
  return Math.exp(reference - policy) - (reference - policy) - 1;
}

function changeAt(tokens, i) {
  const before = log(tokens, "logprobs", i);
  const after = log(tokens, "updated_logprobs", i);
  return before === null || after === null ? null : after - before;
}

export const TINTS = {
  none: { title: "no tint", value: () => null },
  advantage: { title: "advantage", value: (t, i) => log(t, "advantages", i), signed: true, low: "worse than the group", high: "better than the group" },
  kl: { title: "KL to the reference", unit: "nats", value: klAt, low: "as the reference", high: "away from it" },
  change: { title: "change of log-probability", unit: "nats", value: changeAt, signed: true, low: "less likely after the update", high: "more likely" },
  surprise: { title: "surprise", unit: "nats", value: (t, i) => (log(t, "logprobs", i) === null ? null : -log(t, "logprobs", i)), low: "certain", high: "unlikely when sampled" },
};

// The tints that this group's rollouts have numbers for.
export function available(rollouts) {
  const tables = rollouts.map((r) => r.tokens).filter(Boolean);
  if (!tables.length) return [];
  return Object.keys(TINTS).filter((key) => key === "none" || tables.some((t) => t.texts.some((_, i) => TINTS[key].value(t, i) !== null)));
}

// The largest size of a tint's numbers over a group; colours are relative to it.
export function range(rollouts, key) {
  let most = 0;
  for (const { tokens } of rollouts) tokens?.texts.forEach((_, i) => (most = Math.max(most, Math.abs(TINTS[key].value(tokens, i) ?? 0))));
  return most;
}

export function tint(element, value, most) {
  if (value === null || !most || !value) {
    element.removeAttribute("data-sign");
    element.style.removeProperty("--strength");
    return;
  }
  element.dataset.sign = value > 0 ? "plus" : "minus";
  element.style.setProperty("--strength", `${Math.round(Math.min(1, Math.abs(value) / most) * 100)}%`);
}

export function legend(key, most) {
  const { title, unit = "", signed: both, low, high } = TINTS[key];
  if (key === "none") return h("p", { class: "legend", hidden: true });
  const end = (text, value) => h("span", {}, text, " ", h("b", {}, value));
  return h("p", { class: "legend", data: { both: both ? "yes" : "no" } }, h("span", { class: "legend-title" }, `${title}${unit ? `, ${unit}` : ""}`),
    end(low, both ? number(-most) : "0"), h("i", { class: "ramp", "aria-hidden": "true" }), end(high, both ? signed(most) : number(most)));
}

// What is known of one token, as [name, text] pairs.
export function numbersOf(tokens, i) {
  const rows = [["log-probability", number(log(tokens, "logprobs", i))]];
  if (tokens.reference_logprobs) rows.push(["of the reference", number(log(tokens, "reference_logprobs", i))], ["KL", number(klAt(tokens, i))]);
  if (tokens.updated_logprobs) rows.push(["after the update", number(log(tokens, "updated_logprobs", i))], ["change", signed(changeAt(tokens, i))]);
  rows.push(["advantage", signed(log(tokens, "advantages", i))]);
  return rows;
}
