// Requests to the server, and what is asked again and again while somebody looks.

const BASE = "/api/v1";
const known = new Map();  // by path: the last answer and its ETag
const MOST_KNOWN = 60;

export class Refused extends Error {
  constructor(status, body) {
    super(body.error ?? `the server answered ${status}`);
    this.status = status;
    this.faults = body.faults ?? [];
  }
}

export const experiment = name => `/experiments/${encodeURIComponent(name)}`;

async function answered(response) {
  const body = await response.json().catch(() => ({}));
  if (!response.ok) throw new Refused(response.status, body);
  return body;
}

// What a path holds now; null if it is as at the last call.
export async function news(path, signal) {
  const before = known.get(path);
  const response = await fetch(BASE + path, {
    signal, cache: "no-store", headers: before ? { "If-None-Match": before.tag } : {},
  });
  // The server says how soon asking again makes sense.
  if (signal) signal.waitMs = 1000 * Number(response.headers.get("Retry-After") ?? 0);
  if (response.status === 304) return null;
  const body = await answered(response), tag = response.headers.get("ETag");
  if (tag) {
    known.delete(path);
    known.set(path, { tag, body });
    if (known.size > MOST_KNOWN) known.delete(known.keys().next().value);
  }
  return body;
}

export async function get(path, signal) {
  return (await news(path, signal)) ?? known.get(path).body;
}

export async function send(method, path, body) {
  const response = await fetch(BASE + path, {
    method, headers: { "X-Dray": "1", "Content-Type": "application/json" }, body: JSON.stringify(body ?? {}),
  });
  return response.status === 204 ? null : answered(response);
}

export const logAddress = (name, trial) => `${BASE}${experiment(name)}/trials/${trial}/logs?whole=1`;

// ------------------------------------------------------------------ asking again
const polls = new Set();
let listener = () => {};
export const onTrouble = found => { listener = found; };

// Calls `ask` now and then every `every` ms, not while the tab is hidden; one call at a time.
export class Poll {
  constructor(ask, every) {
    this.ask = ask;
    this.every = every;
    this.timer = null;
    this.asking = null;
    polls.add(this);
    this.now();
  }

  async now() {
    clearTimeout(this.timer);
    this.asking?.abort();
    const mine = this.asking = new AbortController();
    try {
      await this.ask(mine.signal);
      if (this.asking === mine) listener(null);
    } catch (error) {
      if (mine.signal.aborted || !polls.has(this)) return;
      if (!(error instanceof Refused) && !(error instanceof TypeError)) console.error(error);
      listener(error);
    }
    if (this.asking !== mine || !polls.has(this)) return;
    this.asking = null;
    if (!document.hidden) this.timer = setTimeout(() => this.now(), Math.max(this.every, mine.signal.waitMs ?? 0));
  }

  stop() {
    polls.delete(this);
    clearTimeout(this.timer);
    this.asking?.abort();
  }
}

export function stopAll() {
  for (const poll of [...polls]) poll.stop();
}

document.addEventListener("visibilitychange", () => {
  for (const poll of polls) {
    if (document.hidden) clearTimeout(poll.timer);
    else poll.now();
  }
});
