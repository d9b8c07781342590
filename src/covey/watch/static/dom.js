// Building and updating of elements. Text becomes text nodes only; nothing here parses markup.

const PROPERTIES = new Set(["value", "checked", "disabled", "hidden", "open", "selected", "indeterminate", "tabIndex", "max", "min"]);

function fill(element, children) {
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    element.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
  return element;
}

// h("button", {class: "x", on: {click}, vars: {"--width": "3px"}, "aria-label": "Close"}, "text", element, [more])
// `vars` are CSS custom properties, set through the CSSOM because the content security policy forbids style attributes.
export function h(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  assign(element, properties);
  return fill(element, children);
}

// The same for SVG.
export function svg(tag, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) if (value !== null) element.setAttribute(name, value);
  return fill(element, children);
}

export function assign(element, properties) {
  for (const [name, value] of Object.entries(properties)) {
    if (name === "on") for (const [type, listener] of Object.entries(value)) element.addEventListener(type, listener);
    else if (name === "vars") for (const [key, each] of Object.entries(value)) element.style.setProperty(key, each);
    else if (name === "data") Object.assign(element.dataset, value);
    else if (PROPERTIES.has(name)) element[name] = value ?? "";
    else if (value === null || value === undefined || value === false) element.removeAttribute(name === "class" ? "class" : name);
    else element.setAttribute(name, value === true ? "" : value);
  }
  return element;
}

// Replaces the children, unless they are the same nodes already.
export function put(element, ...children) {
  const fresh = fill(document.createDocumentFragment(), children);
  element.replaceChildren(fresh);
  return element;
}

// Sets the text only if it differs, so that a selection in it survives.
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
  return element;
}

// Makes the children of `parent` match `items` and keeps the element of each key, with its focus, selection and scroll.
// `create(item)` returns an element; `update(element, item)` is called for all.
export function keyed(parent, items, key, create, update = () => {}) {
  const known = (parent.knownByKey ??= new Map());
  const wanted = new Set(items.map(key));
  for (const [name, element] of known) {
    if (!wanted.has(name)) {
      element.remove();
      known.delete(name);
    }
  }
  let place = parent.firstChild;
  for (const item of items) {
    const name = key(item);
    let element = known.get(name);
    if (!element) known.set(name, (element = create(item)));
    update(element, item);
    if (element === place) place = place.nextSibling;
    else parent.insertBefore(element, place);
  }
}

let numbers = 0;
export const uniqueId = (prefix) => `${prefix}-${++numbers}`;

// A labelled select. `choices` are [value, text] pairs.
export function select(label, choices, value, onChange) {
  const box = h("select", { on: { change: () => onChange(box.value) } });
  const set = (pairs, chosen) => {
    const same = box.options.length === pairs.length && pairs.every(([v, t], i) => box.options[i].value === String(v) && box.options[i].text === t);
    if (!same) put(box, pairs.map(([v, text]) => h("option", { value: v }, text)));
    box.value = String(chosen);
  };
  set(choices, value);
  return Object.assign(h("label", { class: "field" }, h("span", {}, label), box), { set, box });
}

// A row of buttons of which one is pressed.
export function segmented(label, choices, value, onChange) {
  const group = h("div", { class: "segmented", role: "group", "aria-label": label });
  const buttons = choices.map(([key, text]) =>
    h("button", { type: "button", data: { key }, on: { click: () => onChange(key) } }, text));
  const set = (chosen) => buttons.forEach((b) => b.setAttribute("aria-pressed", String(b.dataset.key === String(chosen))));
  set(value);
  return Object.assign(fill(group, buttons), { set });
}

export function throttle(milliseconds, action) {
  let timer = null;
  let last = 0;
  return () => {
    if (timer) return;
    timer = setTimeout(() => {
      timer = null;
      last = performance.now();
      action();
    }, Math.max(0, last + milliseconds - performance.now()));
  };
}

export function debounce(milliseconds, action) {
  let timer = null;
  return (...words) => {
    clearTimeout(timer);
    timer = setTimeout(() => action(...words), milliseconds);
  };
}
