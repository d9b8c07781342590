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
    this.firstSteps = answer.first_steps ?? answer.steps;
    this.lastStep = answer.last_step ?? answer.steps.at(-1) ?? 0;
    this.series = same ? { ...this.series, ...answer.series } : this.merged(answer.series);
  }

  // Columns of an earlier, shorter answer stay until they are asked for again; they end earlier.
  merged(series) {
    return { ...this.series, ...series };
  }

  x(axis) {
    if (axis === "seconds") return this.seconds();
    return axis === "step" ? this.steps : (this.series[axis]?.mean ?? []);
  }

  // The time that the steps up to each point have taken, without evaluations.
  seconds() {
    let sum = 0;
    return this.steps.map((step, i) => (sum += (this.series["time/step"]?.mean[i] ?? 0) * (step - this.firstSteps[i] + 1)));
  }

  // The last step with a value of a metric.
  lastWith(name) {
    const at = this.series[name]?.mean.findLastIndex((value) => value !== null) ?? -1;
    return at < 0 ? null : this.steps[at];
  }

  // A metric of these numbers with the estimates of it before training, at step 0, and after the last step; null: unknown.
  withEnds(name, before, after) {
    const own = this.series[name];
    if (!own) return this;
    const first = before ? [before.score] : [];
    const ended = (column) => column && [...first, ...column.map((value, i) => (after && i === column.length - 1 ? (value ?? after.score) : value))];
    const series = { mean: ended(own.mean), low: ended(own.low), high: ended(own.high) };
    return { series: { [name]: series }, x: (axis) => [...first.map(() => 0), ...this.x(axis)] };
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
