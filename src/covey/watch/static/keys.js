// Keyboard shortcuts, and the dialog that lists them.

import { h } from "./dom.js";

const LIST = [
  ["1 \u2026 6", "the views of the run, from left to right"],
  ["j / k", "next step, step before (Rollouts)"],
  ["\u2190 / \u2192", "group before, next group (Rollouts); on a chart: move the cursor; in tinted tokens: token by token"],
  ["c", "next tint of the tokens (Rollouts)"],
  ["f", "follow the newest step (Rollouts)"],
  ["/", "search"],
  ["r", "list of runs"],
  ["z", "reset the zoom of the curves"],
  ["t", "theme: system, light, dark"],
  ["?", "this list"],
  ["Esc", "close; leave a field"],
];

const typing = (element) => element?.matches?.("input:not([type=range]):not([type=checkbox]), select, textarea, [contenteditable]");
const ownsArrows = (element) => element?.matches?.("input, select, .plot, .tokens, .numbers, .scroll, summary");

export function helpDialog() {
  const close = h("button", { type: "button", class: "plain", on: { click: () => dialog.close() } }, "Close");
  const dialog = h("dialog", { class: "help", "aria-labelledby": "help-title" }, h("h2", { id: "help-title" }, "Keys"),
    h("dl", {}, LIST.map(([keys, what]) => h("div", {}, h("dt", {}, h("kbd", {}, keys)), h("dd", {}, what)))),
    h("p", { class: "hint" }, "Every view has its own address: copy it to share what you see. Back and forward work."), close);
  dialog.addEventListener("click", (event) => event.target === dialog && dialog.close());
  document.body.append(dialog);
  return dialog;
}

// `actions`: {view(number), runs(), theme(), help(), zoom(), search()}, and viewKey(key), which returns true if it used the key.
export function startKeys(actions) {
  addEventListener("keydown", (event) => {
    const target = event.target;
    if (event.key === "Escape" && typing(target)) {
      target.blur();
      return;
    }
    if (event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey || typing(target) || document.querySelector("dialog[open]")) return;
    if (event.key.startsWith("Arrow") && (ownsArrows(target) || event.shiftKey)) return;
    if (use(event.key, actions)) event.preventDefault();
  });
}

function use(key, actions) {
  if (/^[1-9]$/.test(key)) return actions.view(Number(key)) !== false;
  const own = { "?": actions.help, t: actions.theme, r: actions.runs, z: actions.zoom, "/": actions.search }[key];
  if (own) return own() !== false;
  return actions.viewKey(key);
}
