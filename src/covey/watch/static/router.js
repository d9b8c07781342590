// The address of a view: #/VIEW/RUN?name=value. Every view can be linked to, and back and forward work.

export function parse(hash) {
  const [path, query = ""] = hash.replace(/^#\/?/, "").split("?");
  const [view = "", run = ""] = path.split("/").map(safeDecode);
  return { view, run, params: Object.fromEntries(new URLSearchParams(query)) };
}

function safeDecode(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

export function format({ view, run, params }) {
  const query = new URLSearchParams(Object.entries(params).filter(([, value]) => value !== null && value !== undefined && value !== ""));
  const text = query.toString().replace(/%2C/g, ",");
  return `#/${encodeURIComponent(view)}/${encodeURIComponent(run)}${text ? `?${text}` : ""}`;
}

const listeners = new Set();
const scrolls = new Map(); // position of the page at each address, for back and forward

export const router = {
  current: parse(location.hash),

  onChange(listener) {
    listeners.add(listener);
  },

  // The address with some parameters changed; null removes one.
  link({ view = this.current.view, run = this.current.run, params = {}, keep = true } = {}) {
    return format({ view, run, params: keep ? { ...this.current.params, ...params } : params });
  },

  go(change, { replace = false } = {}) {
    const hash = this.link(change);
    if (hash === location.hash) return;
    scrolls.set(location.hash, scrollY);
    if (replace) history.replaceState(null, "", hash);
    else history.pushState(null, "", hash);
    this.announce(false);
  },

  announce(returned) {
    const before = this.current;
    this.current = parse(location.hash);
    for (const listener of listeners) listener(this.current, before, returned ? (scrolls.get(location.hash) ?? null) : null);
  },
};

if ("scrollRestoration" in history) history.scrollRestoration = "manual";
addEventListener("popstate", () => router.announce(true));
addEventListener("click", (event) => {
  const link = event.target.closest?.("a[href^='#/']");
  if (!link || event.defaultPrevented || event.button || event.metaKey || event.ctrlKey || event.shiftKey || event.altKey) return;
  event.preventDefault();
  scrolls.set(location.hash, scrollY);
  if (link.getAttribute("href") !== location.hash) history.pushState(null, "", link.getAttribute("href"));
  router.announce(false);
});
