// Server-sent events: which run has grown, and whether the server is there.

const listeners = new Set();
let source = null;
let retry = null;
let wait = 1000; // milliseconds until the next attempt
let state = "connecting"; // "connected", "gone"

export const live = {
  get state() {
    return state;
  },

  // listener({type: "run", run}) if a run has grown or changed, ({type: "gone", run}) if its folder was deleted, and
  // ({type: "state", state, before}) for the connection.
  onEvent(listener) {
    listeners.add(listener);
  },

  start: connect,
  retry: () => state !== "connected" && connect(),
};

function tell(event) {
  for (const listener of listeners) listener(event);
}

function become(next) {
  if (state === next) return;
  const before = state;
  state = next;
  tell({ type: "state", state, before });
}

function connect() {
  clearTimeout(retry);
  source?.close();
  source = new EventSource("/api/events");
  source.addEventListener("open", () => {
    wait = 1000;
    become("connected");
  });
  source.addEventListener("run", (message) => tell({ type: "run", run: JSON.parse(message.data) }));
  source.addEventListener("gone", (message) => tell({ type: "gone", run: JSON.parse(message.data) }));
  source.addEventListener("error", () => {
    source.close();
    become("gone");
    retry = setTimeout(connect, wait);
    wait = Math.min(2 * wait, 8000);
  });
}

addEventListener("online", live.retry);
addEventListener("pageshow", (event) => event.persisted && connect());
addEventListener("pagehide", () => source?.close());
