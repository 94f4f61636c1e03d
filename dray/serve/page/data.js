// Requests to the server, and what is asked again and again while somebody looks.

import { useEffect, useLayoutEffect, useRef, useState } from "./lib/preact.js";

// The path of the server, which has another one before it below a proxy; it ends with a slash.
export const ROOT = new URL("..", import.meta.url).pathname;
const BASE = `${ROOT}api/v1`;
export const experiment = name => `/experiments/${encodeURIComponent(name)}`;
// Of a report: the experiment's name, the version of dray, and all answers; it asks no server. Else null.
export const SAVED = JSON.parse(document.getElementById("saved")?.textContent ?? "null");
const known = new Map();  // by path: the last answer and its ETag
for (const [path, query, body] of SAVED?.answers ?? []) known.set(queried(experiment(SAVED.name) + path, query), { body });
const MOST_KNOWN = 60;

export class Refused extends Error {
  constructor(status, body) {
    super(body.error ?? `the server answered ${status}`);
    this.status = status;
    this.faults = body.faults ?? [];
  }
}

export const logAddress = (name, trial) => `${BASE}${experiment(name)}/trials/${trial}/logs?whole=1`;

// A path with those parameters that have a value.
export function queried(path, parameters) {
  const query = new URLSearchParams(Object.entries(parameters).filter(([, value]) => value));
  return `${path}${query.size ? `?${query}` : ""}`;
}

async function answered(response) {
  if (response.ok) return response.json();
  throw new Refused(response.status, await response.json().catch(() => ({})));
}

// The answer for a path, which is the same object as long as it is unchanged; `wait.ms`: how long asking again makes no sense.
export async function get(path, signal, wait = {}) {
  const before = known.get(path);
  const response = await fetch(BASE + path, {
    signal, cache: "no-store", headers: before ? { "If-None-Match": before.tag } : {},
  });
  wait.ms = 1000 * Number(response.headers.get("Retry-After") ?? 0);
  if (response.status === 304) return before.body;
  const body = await answered(response), tag = response.headers.get("ETag");
  known.delete(path);
  if (tag) known.set(path, { tag, body });
  if (known.size > MOST_KNOWN) known.delete(known.keys().next().value);
  return body;
}

export async function send(method, path, body = {}) {
  const response = await fetch(BASE + path, {
    method, headers: { "X-Dray": "1", "Content-Type": "application/json" }, body: JSON.stringify(body),
  });
  const found = response.status === 204 ? null : await answered(response);
  refresh();
  return found;
}

// ------------------------------------------------------------------ asking again
const polls = new Set();
let listener = () => {};
export const onTrouble = found => { listener = found; };

// Calls `ask` now and then every `every` ms, 0: once; not while the tab is hidden; one call at a time.
export class Poll {
  constructor(ask, every) {
    Object.assign(this, { ask, every, timer: null, asking: null });
    polls.add(this);
    this.now();
  }

  async now() {
    clearTimeout(this.timer);
    this.asking?.abort();
    const mine = this.asking = new AbortController(), wait = {};
    try {
      await this.ask(mine.signal, wait);
      if (this.asking === mine && !mine.signal.aborted) listener(null);
    } catch (error) {
      if (mine.signal.aborted || !polls.has(this)) return;
      if (!(error instanceof Refused) && !(error instanceof TypeError)) console.error(error);
      listener(error);
    }
    if (this.asking !== mine || !polls.has(this)) return;
    this.asking = null;
    if (!document.hidden && this.every) this.timer = setTimeout(() => this.now(), Math.max(this.every, wait.ms ?? 0));
  }

  stop() {
    polls.delete(this);
    clearTimeout(this.timer);
    this.asking?.abort();
  }
}

// Asks everything on the screen anew, after something has been changed; once for many changes in a row.
export function refresh() {
  clearTimeout(refresh.timer);
  refresh.timer = setTimeout(() => { for (const poll of polls) poll.now(); }, 50);
}

document.addEventListener("visibilitychange", () => {
  for (const poll of polls) {
    if (document.hidden) clearTimeout(poll.timer);
    else if (poll.every) poll.now();
  }
});

// What a path holds, asked again every `every` ms (0: once) and whenever `on` changes, while `when` holds; a path of null
// is not asked.
// `data` is at once the last known answer of this path, or with `keep` that of the path before, until there is a new one
// (`fresh`). `error` is what the last request ended with.
export function useData(path, { every = 0, when = true, keep = false, on } = {}) {
  const [, again] = useState(0), last = useRef({}), poll = useRef(null);
  if (last.current.path !== path)
    last.current = { path, error: null, fresh: false, data: known.get(path)?.body ?? (keep ? last.current.data : undefined) };
  useLayoutEffect(() => {  // the request does not wait for a picture
    if (!when || path === null || SAVED) return undefined;
    const mine = poll.current = new Poll(async (signal, wait) => {
      const { current: before } = last;
      try {
        const data = await get(path, signal, wait);
        if (signal.aborted) return;
        if (before.data === data && before.fresh && !before.error) return;
        last.current = { path, data, error: null, fresh: true };
      } catch (error) {
        if (signal.aborted) return;
        last.current = { ...before, error };
        again(it => it + 1);
        throw error;
      }
      again(it => it + 1);
    }, every);
    return () => mine.stop();
  }, [path, when, on]);
  useEffect(() => { if (poll.current) poll.current.every = every; }, [every]);
  return last.current;
}
