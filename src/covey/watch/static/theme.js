// Light, dark, or as the system says; the choice is kept in this browser.

const listeners = new Set();
const system = matchMedia("(prefers-color-scheme: dark)");
const CHOICES = ["system", "light", "dark"];

function stored() {
  try {
    return localStorage.getItem("covey-theme");
  } catch {
    return null; // storage is switched off
  }
}

let choice = CHOICES.includes(stored()) ? stored() : "system";
const probe = document.createElement("i");

export const theme = {
  get choice() {
    return choice;
  },
  // Calls the listener after each change; returns a function that ends that.
  onChange(listener) {
    listeners.add(listener);
    return () => listeners.delete(listener);
  },

  next() {
    choice = CHOICES[(CHOICES.indexOf(choice) + 1) % CHOICES.length];
    try {
      localStorage.setItem("covey-theme", choice);
    } catch {
      // it holds until the page is closed
    }
    apply();
    return choice;
  },

  // The present value of a custom property that is a colour, for a canvas.
  colour(name) {
    if (!cache.has(name)) {
      probe.style.color = `var(${name})`;
      cache.set(name, getComputedStyle(probe).color);
    }
    return cache.get(name);
  },

  translucent(name, alpha) {
    return theme.colour(name).replace(/^rgba?\(([^)]+)\)$/, (_, inside) => `rgba(${inside.split(",").slice(0, 3).join(",")}, ${alpha})`);
  },
};

const cache = new Map();

function apply(shown = choice) {
  if (shown === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = shown;
  cache.clear();
  for (const listener of listeners) listener(shown);
}

export function startTheme() {
  probe.hidden = true;
  document.body.append(probe);
  system.addEventListener("change", () => apply());
  addEventListener("beforeprint", () => apply("light"));
  addEventListener("afterprint", () => apply());
  apply();
}
