// Requests to the server: all of them GET, JSON, and of this page's own origin. A report answers them itself.

import { answered, report } from "./inlined.js";

export class ServerGone extends Error {}
export class Refused extends Error {}

async function get(path, parameters = {}, signal = undefined) {
  if (report) {
    const found = answered(path, parameters);
    if (!found) throw new Refused("The report does not have this part; covey watch shows it.");
    return found;
  }
  const query = new URLSearchParams(Object.entries(parameters).filter(([, v]) => v !== null && v !== undefined && v !== ""));
  let response;
  try {
    response = await fetch(`/api/${path}${query.size ? `?${query}` : ""}`, { signal, cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerGone("The server does not answer.");
  }
  const body = await response.json().catch(() => null);
  if (!response.ok) throw new Refused(body?.error?.message ?? `The server answered ${response.status} to ${path}.`);
  return body;
}

const of = (run) => `runs/${encodeURIComponent(run)}`;

export const api = {
  runs: (signal) => get("runs", {}, signal),
  run: (run, signal) => get(of(run), {}, signal),
  metrics: (run, names, points, signal) => get(`${of(run)}/metrics`, { names: names.join(","), points }, signal),
  groups: (run, step, signal) => get(`${of(run)}/steps/${step}/groups`, {}, signal),
  group: (run, step, group, signal) => get(`${of(run)}/steps/${step}/groups/${group}`, {}, signal),
  rollouts: (run, parameters, signal) => get(`${of(run)}/rollouts`, parameters, signal),
  heldOut: (run, parameters, signal) => get(`${of(run)}/held_out`, parameters, signal),
  diagnosis: (run, signal) => get(`${of(run)}/diagnosis`, {}, signal),
  file: (run, name) => `/api/${of(run)}/files/${name.split("/").map(encodeURIComponent).join("/")}`,
};

// Requests of which only the last one counts: a new one aborts the one before.
export function latest() {
  let controller = null;
  return async (request) => {
    controller?.abort();
    const mine = (controller = new AbortController());
    try {
      const answer = await request(mine.signal);
      return mine.signal.aborted ? null : answer;
    } catch (error) {
      if (error.name === "AbortError" || mine.signal.aborted) return null;
      throw error;
    }
  };
}
