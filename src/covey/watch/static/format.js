// Numbers with their units, as text.

const THIN = "\u202f"; // between a number and its unit
const MINUS = "\u2212";
const NONE = "\u2013";

const known = (value) => typeof value === "number" && Number.isFinite(value);
const minus = (text) => text.replace("-", MINUS);

export function whole(value) {
  return known(value) ? minus(Math.round(value).toLocaleString("en-US")) : NONE;
}

// Any number in about three significant digits: 0.634, 12.5, 1,240, 3.1e−6.
export function number(value, digits = 3) {
  if (!known(value)) return NONE;
  const size = Math.abs(value);
  if (size < 1e-12) return "0"; // what rounding leaves of 0
  if (Number.isInteger(value) && size < 1e6) return whole(value);
  if (size >= 1e9 || size < 1e-4) return minus(value.toExponential(Math.max(0, digits - 2)));
  if (size >= 1000) return minus(Math.round(value).toLocaleString("en-US"));
  const decimals = Math.max(0, digits - 1 - Math.floor(Math.log10(size)));
  return minus(value.toFixed(Math.min(decimals, 7)));
}

export const signed = (value, write = number) => (known(value) && value > 0 ? `+${write(value)}` : write(value));

export function percent(value, digits = 1) {
  return known(value) ? `${minus((100 * value).toFixed(digits))}${THIN}%` : NONE;
}

export function seconds(value) {
  if (!known(value)) return NONE;
  if (value !== 0 && Math.abs(value) < 0.0995) return `${number(1000 * value, 2)}${THIN}ms`;
  if (value < 99.5) return `${number(value)}${THIN}s`;
  const minutes = Math.round(value / 60);
  if (minutes < 120) return `${minutes}${THIN}min`;
  const hours = Math.floor(minutes / 60);
  return hours < 48 ? `${hours}${THIN}h ${minutes % 60}${THIN}min` : `${Math.floor(hours / 24)}${THIN}d ${hours % 24}${THIN}h`;
}

export function bytes(value) {
  if (!known(value)) return NONE;
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let power = 0;
  while (Math.abs(value) >= 1024 && power < units.length - 1) {
    value /= 1024;
    power += 1;
  }
  return `${power ? number(value) : whole(value)}${THIN}${units[power]}`;
}

export function ago(unixSeconds) {
  if (!known(unixSeconds)) return "";
  const passed = Date.now() / 1000 - unixSeconds;
  if (passed < 90) return "just now";
  return passed < 7 * 86400 ? `${seconds(passed)} ago` : new Date(1000 * unixSeconds).toISOString().slice(0, 10);
}

export const count = (n, noun, plural = `${noun}s`) => `${whole(n)} ${n === 1 ? noun : plural}`;

// Round ends of an axis around numbers: (-0.038, 0.79) as [-0.2, 0.8].
export function roundEnds(low, high) {
  const size = Math.max(Math.abs(low), Math.abs(high));
  const same = high - low <= 1e-8 * size; // numbers that differ by less are drawn in the middle
  const rough = (same ? size || 1 : high - low) / 5;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * ([1, 2, 2.5, 5].find((each) => each * power >= rough * 0.999) ?? 10);
  const end = (value, round) => +(round(+(value / step).toFixed(6)) * step).toPrecision(12);
  return same ? [end(low, Math.floor) - step, end(high, Math.ceil) + step] : [end(low, Math.floor), end(high, Math.ceil)];
}

// True if an estimate has an interval: a single score and equal ones have none, because their spread is not known.
export const hasInterval = (e) => known(e?.low) && known(e?.high) && e.low < e.high;

// The direction of a change, if the intervals of both estimates are apart: "better", "worse" or "".
export function direction(before, after) {
  if (![before, after].every((e) => known(e?.low) && known(e?.high))) return "";
  return after.low > before.high ? "better" : before.low > after.high ? "worse" : "";
}

// How a run of this kind names a decision and writes a score.
export function vocabulary(run) {
  const language = run?.domain !== "control";
  const kind = run?.score_kind ?? run?.wording?.score_name ?? (language ? "score" : "return");
  return {
    language,
    kind,
    measure: language ? kind : `${kind} ${run?.config?.environment?.id ?? ""}`.trim(), // runs of the same measure share an axis
    fragments: run?.config?.rollouts?.kind === "fragments", // then rewards and lengths are those of fragments, not of episodes
    decision: language ? "token" : "action",
    cut: language ? "cut" : "at the time limit", // which for an agent is often the best that it can do
    score: kind === "accuracy" ? percent : number,
    change: (value) => (kind === "accuracy" ? signed(100 * value, (v) => number(v)) + " points" : signed(value)),
    unit: (text) => {
      const plain = (text ?? "").replace(/decision/g, language ? "token" : "action").replace("score; return", kind);
      return plain === "-" ? "" : plain.replace("token / s", "tokens / s");
    },
  };
}

// The function that writes values of a metric with this unit of the glossary.
export function writer(unit, words) {
  if (unit === "fraction") return percent;
  if (unit === "bytes") return bytes;
  if (unit === "s") return seconds;
  if (unit === "score; return") return words.score;
  return number;
}

// Short labels of axis ticks for the same units; `step` is the distance of two ticks.
export function tickWriter(unit, words) {
  const share = unit === "fraction" || (unit === "score; return" && words.kind === "accuracy");
  return (value, step) => {
    if (!known(value)) return "";
    if (share) return `${minus((100 * value).toFixed(step < 0.0095 ? 1 : 0))}%`;
    if (unit === "bytes") return bytes(value).replace(THIN, " ");
    const size = Math.abs(value);
    if (size >= 1e6) return `${minus(String(+(value / 1e6).toPrecision(3)))}M`;
    if (size >= 1e4) return `${minus(String(+(value / 1e3).toPrecision(3)))}k`;
    if (size !== 0 && size < 1e-3) return minus(value.toExponential(Math.max(0, Math.floor(Math.log10(size)) - Math.floor(Math.log10(step || size) + 1e-9))));
    return minus(String(+value.toPrecision(6)));
  };
}

// Title of a metric: its name as words. The exact name stays visible beside the definition.
const TITLES = {
  "reward/mean": "Reward, mean", "reward/std": "Reward, spread", "score/mean": "Score in training", "eval/score": "Held-out score",
  kl: "KL to the reference", "kl/behavior": "KL of the update", entropy: "Entropy", "policy/std": "Spread of actions", loss: "Loss",
  "loss/value": "Value loss", grad_norm: "Gradient norm", learning_rate: "Learning rate", kl_coefficient: "KL coefficient",
  entropy_coefficient: "Entropy coefficient", "clip/range_low": "Clip range, below", "clip/range_high": "Clip range, above",
  "ratio/max": "Largest ratio", "clip/low": "Clipped below", "clip/high": "Clipped above", "length/mean": "Length, mean",
  "length/max": "Length, longest", "length/truncated_fraction": "Truncated", "length/steps": "Reasoning steps",
  "groups/zero_advantage_fraction": "Groups without signal", "groups/failed_rollouts": "Failed rewards",
  "memory/peak_bytes": "Peak memory", "value/explained_variance": "Explained variance", "time/step": "Time of a step",
};
export function title(name) {
  if (TITLES[name]) return TITLES[name];
  const [section, ...rest] = name.replace(/^(sft|reward_model)\//, "").replace("held_out_", "held-out ").split("/");
  const words = (rest.length ? `${section}: ${rest.join(" / ")}` : section).replace(/_/g, " ");
  return words.charAt(0).toUpperCase() + words.slice(1);
}
