// Which curves are shown in which section, and what is said beside them.

export const SECTIONS = [
  { key: "reward", title: "Reward and score", has: (n) => /^(reward|score|eval)(\/|$)/.test(n), first: ["score/mean", "eval/score", "reward/mean"], tall: true },
  { key: "examples", title: "Loss on the examples", has: (n) => /^(sft|reward_model)\//.test(n), first: ["sft/loss", "sft/held_out_loss", "reward_model/loss", "reward_model/held_out_loss"], tall: true },
  { key: "policy", title: "Policy: entropy and KL", has: (n) => /^(entropy|kl|kl\/.*|policy\/.*|covariance\/.*)$/.test(n), first: ["entropy", "kl"] },
  { key: "length", title: "Length", has: (n) => n.startsWith("length/") },
  { key: "groups", title: "Groups", has: (n) => /^(groups|prompts)\//.test(n), first: ["groups/zero_advantage_fraction"],
    note: "A group without signal has advantages of 0, because its rewards are all the same. Many of them mean prompts that are too hard or too easy." },
  { key: "update", title: "Update", has: (n) => /^(grad_norm|loss|learning_rate|kl_coefficient|entropy_coefficient|ratio|clip|update)(\/|$)/.test(n) && n !== "loss/value",
    first: ["grad_norm", "clip/high", "clip/low", "loss"], noted: "loss",
    note: "A loss near 0, a largest ratio of 1 and a clip fraction of 0 are healthy with one optimizer step per batch (on policy): nothing has moved yet when they are measured. The gradient norm and the reward show progress." },
  { key: "critic", title: "Critic", has: (n) => n === "loss/value" || n === "reward_scale" || n.startsWith("value/"), first: ["value/explained_variance"] },
  { key: "sampler", title: "Sampler", has: (n) => /^(mismatch|sampler)\//.test(n),
    note: "The sampler and the trainer compute the same probabilities if both have the same weights and precision." },
  { key: "cost", title: "Time and memory", has: (n) => /^(memory|environment)\/|^(decisions_per_second|time\/step)$/.test(n), first: ["decisions_per_second", "memory/peak_bytes"] },
  { key: "parts", title: "Parts of a step's time, tokens and actions", has: (n) => /^(time|decisions)\//.test(n), closed: true },
  { key: "other", title: "Other numbers", has: () => true },
];

// The parts of a step's time, in the order in which they are stacked; what is left is "other".
export const TIME_PARTS = ["time/sample", "time/grade", "time/gather", "time/prepare", "time/update", "time/refresh"];
export const TIME_TOTAL = "time/step";

// Curves that may be read on a logarithmic axis.
export const LOGARITHMIC = /^(grad_norm|kl|kl\/.*|loss\/value|mismatch\/(mean|kl)|learning_rate|time\/.*|memory\/.*|decisions_per_second)$/;

// The key of a chart is the name of its metric; where runs differ in what it means, a line with the meaning follows.
export const chartKey = (name, meaning) => (meaning ? `${name}\n${meaning}` : name);
export const nameOf = (key) => key.split("\n")[0];

// What a metric means in a run: numbers of different measures, or of tokens and of actions, do not share an axis.
export function meaningOf({ name, unit = "" }, words) {
  if (words.fragments && /^(reward|length)\//.test(name)) return "fragments";
  if (/^(reward|score|eval)(\/|$)/.test(name)) return words.measure;
  return /decision/.test(unit) || name.startsWith("length/") ? `${words.decision}s` : "";
}

// Assigns keys of charts to sections, in the order of the glossary, with each section's first ones in front.
export function arrange(keys) {
  const left = new Set(keys);
  return SECTIONS.map((section) => {
    const mine = [...left].filter((key) => section.has(nameOf(key)));
    mine.forEach((key) => left.delete(key));
    const first = (section.first ?? []).flatMap((name) => mine.filter((key) => nameOf(key) === name));
    const note = section.noted && !mine.some((key) => nameOf(key) === section.noted) ? null : section.note;
    return { ...section, note, keys: [...first, ...mine.filter((key) => !first.includes(key))] };
  }).filter((section) => section.keys.length);
}
