// The page of `covey watch`. Plain modules without a build step; the map:
//
//   main            starts everything, chooses the view, carries news to it
//   router          the address of a view                    api           requests to the server
//   live            server-sent events                       theme         light and dark, colours for canvases
//   dom             building of elements                     format        numbers with units
//   keys            shortcuts and their list                 plain_text    model output as text, never as markup
//
//   runs_list       the runs, and which are laid over        run_head      name, state, progress and views of a run
//   runs_table      the runs in a table that can be sorted
//   overview        result + findings + curves               result        before and now, with intervals
//   findings        the diagnosis                            curves        sections of charts with one cursor and zoom
//   chart           one uPlot, its readout and its table     metric_store  downsampled numbers, smoothing, alignment
//   sections        which curve belongs where             inlined        the answers that a report has in its file
//   rollouts        groups of a step and their siblings      step_picker   the choice of a step
//   rollout_card    one sibling                              token_text    tokens with numbers, tinted by `tints`
//   search          rollouts of the whole run                held_out      answers of two evaluations
//   plain_views     recordings, configuration                turns         a conversation as its turns
//
// A view is an object {el, update(route), grown(detail), watches(id)}; it may have key(name), searchField() and destroy().

import { api, ServerGone } from "./api.js";
import { h, say, throttle } from "./dom.js";
import { HeldOut } from "./held_out.js";
import { report } from "./inlined.js";
import { helpDialog, startKeys } from "./keys.js";
import { live } from "./live.js";
import { Overview } from "./overview.js";
import { Config, Files } from "./plain_views.js";
import { Rollouts } from "./rollouts.js";
import { router } from "./router.js";
import { RunHead, VIEW_NAMES, viewsOf } from "./run_head.js";
import { MAX_SHOWN, RunsList } from "./runs_list.js";
import { RunsTable } from "./runs_table.js";
import { Search } from "./search.js";
import { startTheme, theme } from "./theme.js";

const VIEWS = { overview: Overview, rollouts: Rollouts, search: Search, "held-out": HeldOut, files: Files, config: Config };

const byId = (id) => document.getElementById(id);
const main = byId("main");
const head = new RunHead();
const place = h("div", { class: "view" });
const trouble = h("p", { class: "trouble", role: "alert", hidden: true });
const list = new RunsList(byId("runs"));
const table = new RunsTable(list);
list.onDraw = () => table.el.isConnected && table.draw();
const announce = (text) => say(byId("announcer"), text);

let view = null; // the shown view, and of what it is
let shown = { view: null, run: null };
let detail = null; // of the shown run

async function show(route, before, scroll = null) {
  closeMenu();
  list.draw();
  if (route.view === "runs") return showTable(before);
  if (!route.run) return home(route);
  try {
    if (route.run !== shown.run || !detail) detail = withPace(await api.run(route.run));
    if (router.current !== route) return null; // another choice was made meanwhile
    const kind = VIEWS[route.view] ? route.view : "overview";
    if (route.run !== shown.run || kind !== shown.view) await open(kind, route, before);
    else await updateView(route);
    complain(null);
    if (scroll !== null) scrollTo(0, scroll);
  } catch (error) {
    fail(error);
  }
  return null;
}

async function open(kind, route, before) {
  view?.destroy?.();
  view = new VIEWS[kind](detail, announce);
  shown = { view: kind, run: route.run };
  head.update(detail, { ...route, view: kind });
  place.replaceChildren(view.el);
  if (!head.el.isConnected) main.replaceChildren(head.el, trouble, place);
  document.title = `${detail.name} \u00b7 ${VIEW_NAMES[kind]} \u00b7 covey ${report ? "report" : "watch"}`;
  scrollTo(0, 0);
  if (before) head.name.focus({ preventScroll: true });
  if (before) announce(`${VIEW_NAMES[kind]} of ${detail.name}`);
  await view.update(route);
}

async function updateView(route) {
  head.update(detail, { ...route, view: shown.view });
  await view.update(route);
}

function showTable(before) {
  view?.destroy?.();
  view = null;
  shown = { view: null, run: null };
  main.replaceChildren(trouble, table.el);
  table.draw();
  document.title = `Runs \u00b7 covey ${report ? "report" : "watch"}`;
  if (before) table.el.querySelector("h1").focus({ preventScroll: true });
  return null;
}

function home() {
  const first = list.first();
  const others = report ? list.ids().slice(1, MAX_SHOWN).join() : "";
  if (first) return router.go({ view: "overview", run: first.id, params: { vs: others }, keep: false }, { replace: true });
  view?.destroy?.();
  view = null;
  shown = { view: null, run: null };
  main.replaceChildren(trouble, h("div", { class: "empty" }, h("h1", { tabIndex: -1 }, "No run yet"), h("p", {}, "Start a training in another terminal, for example:"), h("pre", {}, "covey train cartpole_grpo"), h("p", {}, "It appears here by itself.")));
  return null;
}

function withPace(found) {
  return { ...found, secondsPerStep: detail?.id === found.id ? detail.secondsPerStep : null, seen: { step: found.last_step, time: performance.now() } };
}

function complain(text) {
  trouble.hidden = !text;
  say(trouble, text ?? "");
  if (text && !trouble.isConnected) main.prepend(trouble);
}

function fail(error) {
  if (error instanceof ServerGone) live.retry();
  else complain(error.message);
  if (!(error instanceof ServerGone) && error.name !== "Refused" && error.constructor === TypeError) console.error(error);
}

// News: the list always, the shown view only if it shows that run.
const fresh = new Set();
const follow = throttle(700, async () => {
  const ids = [...fresh];
  fresh.clear();
  for (const id of ids) {
    try {
      const found = await api.run(id);
      list.merge(found);
      if (id === shown.run) {
        const began = detail?.seen;
        const passed = (performance.now() - (began?.time ?? 0)) / 1000;
        const pace = began && found.last_step > began.step ? passed / (found.last_step - began.step) : null;
        const again = detail && found.generation !== detail.generation;
        if (view?.watches(id)) await view.grown({ ...found });
        detail = { ...found, secondsPerStep: pace ?? detail?.secondsPerStep ?? null, seen: again || !began ? { step: found.last_step, time: performance.now() } : began };
        head.update(detail, { ...router.current, view: shown.view });
      } else if (view?.watches(id)) await view.grown(found);
    } catch (error) {
      fail(error);
    }
  }
});

async function loadRuns() {
  try {
    const { runs, root } = await api.runs();
    list.set(runs, root);
    return true;
  } catch (error) {
    fail(error);
    return false;
  }
}

const loadRunsSoon = throttle(500, async () => {
  if ((await loadRuns()) && !router.current.run) home();
});

live.onEvent((event) => {
  if (event.type === "run") {
    if (!list.merge(event.run)) loadRunsSoon();
    if (event.run.id === shown.run || view?.watches(event.run.id)) {
      fresh.add(event.run.id);
      follow();
    }
  } else if (event.type === "gone") loadRunsSoon();
  else if (event.type === "state") connection(event);
});

async function connection({ state, before }) {
  const box = byId("connection");
  box.dataset.state = state;
  say(box, { connected: "live", gone: "The server is gone. Shown is what was loaded; trying again\u2026", connecting: "" }[state]);
  if (state === "connected" && before === "gone") {
    await loadRuns();
    if (detail) {
      fresh.add(shown.run);
      follow();
    } else show(router.current, null);
  }
}

function closeMenu() {
  document.body.classList.remove("menu-open");
  byId("menu").setAttribute("aria-expanded", "false");
}

function openMenu() {
  const opened = document.body.classList.toggle("menu-open");
  byId("menu").setAttribute("aria-expanded", String(opened));
  byId("runs").querySelector(".run-list [aria-current], .run-list a")?.focus();
}

function nextTheme() {
  const chosen = theme.next();
  nameTheme();
  announce(`Theme: ${chosen}`);
}

const nameTheme = () => say(byId("theme"), { system: "Theme: system", light: "Theme: light", dark: "Theme: dark" }[theme.choice]);

async function start() {
  startTheme();
  nameTheme();
  const help = helpDialog();
  byId("theme").addEventListener("click", nextTheme);
  byId("help").addEventListener("click", () => help.showModal());
  byId("menu").addEventListener("click", openMenu);
  byId("skip").addEventListener("click", (event) => {
    event.preventDefault();
    main.focus();
  });
  startKeys({
    help: () => help.showModal(),
    theme: nextTheme,
    runs: () => (getComputedStyle(byId("menu")).display === "none" ? byId("runs").querySelector(".run-list [aria-current], .run-list a")?.focus() : openMenu()),
    zoom: () => router.go({ params: { zoom: null } }),
    search: () => (view?.searchField ? view.searchField().focus() : detail && viewsOf(detail).includes("search") && router.go({ view: "search", params: {}, keep: false })),
    view: (number) => detail && viewsOf(detail)[number - 1] && router.go({ view: viewsOf(detail)[number - 1], params: {}, keep: false }),
    viewKey: (key) => view?.key?.(key) ?? false,
  });
  router.onChange(show);
  await loadRuns();
  if (report) dressReport();
  else live.start();
  await show(router.current, null);
}

// A report says what it is and what it leaves out; of one run it has no list.
function dressReport() {
  say(byId("product"), "report");
  say(byId("connection"), report.title === list.first()?.name ? "" : report.title);
  document.body.classList.add("report");
  document.body.classList.toggle("alone", list.ids().length === 1);
  byId("main").after(h("footer", { class: "hint" }, `Written by covey ${report.version} on ${report.written}. The curves have fewer points than steps if the run is long; of rollouts and held-out answers a part is shown, and long texts are cut. Everything is in the run folders: covey watch, covey show, covey runs export.`));
}

start();
