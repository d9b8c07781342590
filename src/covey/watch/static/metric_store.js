// The numbers of the shown runs, downsampled by the server, and their curves on one common x axis.

import { api } from "./api.js";

export const POINTS = 600; // of a curve

// The numbers of one run: `x` values of its points and, by name, columns {mean, low, high}.
export class RunNumbers {
  constructor(id) {
    this.id = id;
    this.steps = [];
    this.series = {};
    this.lastStep = 0;
  }

  async load(names, signal) {
    const answer = await api.metrics(this.id, names, POINTS, signal);
    const same = answer.steps.length === this.steps.length && answer.steps.every((step, i) => step === this.steps[i]);
    this.steps = answer.steps;
    this.lastStep = answer.last_step ?? answer.steps.at(-1) ?? 0;
    this.series = same ? { ...this.series, ...answer.series } : this.merged(answer.series);
  }

  // Columns of an earlier, shorter answer stay until they are asked for again; they end earlier.
  merged(series) {
    return { ...this.series, ...series };
  }

  x(axis) {
    return axis === "step" ? this.steps : (this.series[axis]?.mean ?? []);
  }

  // The last step with a value of a metric.
  lastWith(name) {
    const at = this.series[name]?.mean.findLastIndex((value) => value !== null) ?? -1;
    return at < 0 ? null : this.steps[at];
  }

  // A metric of these numbers with a value at step 0, where an estimate of it is known: that of the policy before training.
  from(name, estimate) {
    const own = this.series[name];
    if (!own || !estimate || estimate.score === null) return this;
    const first = (column, value) => column && [value, ...column];
    const series = { mean: first(own.mean, estimate.score), low: first(own.low, estimate.score), high: first(own.high, estimate.score) };
    return { series: { [name]: series }, x: () => [0, ...this.steps] };
  }
}

// Exponential moving average without bias at its start; nulls stay null.
export function smooth(values, weight) {
  if (!weight) return values;
  let sum = 0;
  let total = 0;
  return values.map((value) => {
    if (value === null || value === undefined) return null;
    sum = weight * sum + (1 - weight) * value;
    total = weight * total + (1 - weight);
    return sum / total;
  });
}

// The columns of several runs over the union of their x values.
export function align(runs, axis, columnsOf) {
  const values = new Set();
  const own = runs.map((run) => run.x(axis));
  for (const xs of own) for (const x of xs) if (x !== null) values.add(x);
  const x = [...values].sort((a, b) => a - b);
  if (runs.length === 1 && own[0].length === x.length && x.every((each, i) => each === own[0][i])) {
    return { x, columns: [columnsOf(runs[0]).map((column) => padded(column, x.length))] };
  }
  const place = new Map(x.map((each, i) => [each, i]));
  const columns = runs.map((run, r) =>
    columnsOf(run).map((column) => {
      const spread = new Array(x.length).fill(null);
      own[r].forEach((each, i) => {
        if (each !== null && column) spread[place.get(each)] = column[i] ?? null;
      });
      return spread;
    }));
  return { x, columns };
}

function padded(column, length) {
  if (!column) return new Array(length).fill(null);
  return column.length === length ? column : [...column.slice(0, length), ...new Array(Math.max(0, length - column.length)).fill(null)];
}
