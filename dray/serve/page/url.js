// Where one is: all that a view shows is in the address, after the #. Back and reload restore it, with scroll and focus.

import { useEffect, useState } from "./lib/preact.js";
import { SAVED } from "./data.js";

// The session's; of a report that is shown within another site, which may forbid it, that of this page.
export const storage = (() => {
  try {
    return sessionStorage;
  } catch {
    const kept = new Map();
    return { getItem: name => kept.get(name) ?? null, setItem: (name, text) => kept.set(name, text) };
  }
})();
const listeners = new Set();
// Draws the views anew.
export const tell = () => { for (const each of [...listeners]) each(); };

function decoded(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;  // of an address that was typed
  }
}

export function route() {
  const [path, query = ""] = location.hash.replace(/^#/, "").split(/\?(.*)/s);
  const parts = path.split("/").filter(Boolean).map(decoded);
  return { parts, params: new URLSearchParams(query) };
}

export function useRoute() {
  const [, again] = useState(0);
  useEffect(() => {
    const listener = () => again(it => it + 1);
    listeners.add(listener);
    return () => listeners.delete(listener);
  }, []);
  return route();
}

// Changes parameters of the address; null removes one. Without `push`, Back does not undo the change by itself.
export function setParams(changes, { push = false } = {}) {
  const [path] = location.hash.replace(/^#/, "").split("?"), { params } = route();
  for (const [name, value] of Object.entries(changes))
    if (value === null || value === "") params.delete(name);
    else params.set(name, value);
  const query = `${params}`, hash = `#${path || "/"}${query ? `?${query}` : ""}`;
  if (hash === location.hash) return;
  if (push) {
    leave();
    enter(hash, null);
  } else history.replaceState(history.state, "", hash);
  tell();
}

// A parameter of the address as state: [text, set].
export function useParam(name, fallback = "") {
  const found = useRoute().params.get(name) ?? fallback;
  return [found, (value, how) => setParams({ [name]: value === fallback ? null : value }, how)];
}

// Values of one parameter, with commas.
export const joined = values => values.map(encodeURIComponent).join(",");
export const listed = text => text.split(",").filter(Boolean).map(decoded);

export const go = hash => { location.hash = hash; };

// ------------------------------------------------------------------ addresses
let selected = () => "";
export const addSelection = of => { selected = of; };

// Null in a report, which has no other views.
export function address(name, trial = null, tab = "", params = {}) {
  if (SAVED) return null;
  const query = new URLSearchParams(params), chosen = selected(name);
  if (chosen && !query.has("sel")) query.set("sel", chosen);
  const path = ["#/e", encodeURIComponent(name), ...trial === null ? [] : ["t", trial], ...tab ? [tab] : []].join("/");
  return `${path}${`${query}` ? `?${query}` : ""}`;
}

// ------------------------------------------------------------------ scroll and focus, by entry of the history
const PLACES = "places", MOST = 50, PATIENCE_MS = 3000;
let current = null;

// A selector that finds the focused element again after it has been drawn anew; "" if there is none.
function focused() {
  const it = document.activeElement, by = name => it.getAttribute(name) && `${it.localName}[${name}=${JSON.stringify(it.getAttribute(name))}]`;
  return !it || it === document.body || it.id === "main" ? "" : it.id ? `#${CSS.escape(it.id)}` : by("href") || by("aria-label") || by("name") || "";
}

// Whether one has been at this entry of the history before, so that it restores its own scroll.
export const returning = () => JSON.parse(storage.getItem(PLACES) ?? "[]").some(([key]) => key === current);

function leave() {
  if (!current) return;
  const places = JSON.parse(storage.getItem(PLACES) ?? "[]").filter(([key]) => key !== current);
  storage.setItem(PLACES, JSON.stringify([...places, [current, scrollY, focused()]].slice(-MOST)));
}

function enter(hash, key) {
  current = key ?? `${Date.now()}-${Math.random()}`;
  if (!key) history[hash === null ? "replaceState" : "pushState"]({ key: current }, "", hash ?? location.href);
}

function restore() {
  const [, y = 0, focus = ""] = JSON.parse(storage.getItem(PLACES) ?? "[]").find(([key]) => key === current) ?? [];
  const until = performance.now() + PATIENCE_MS, mine = current;
  let touched = false;
  const touch = () => { touched = true; };
  for (const what of ["wheel", "keydown", "pointerdown"]) addEventListener(what, touch, { once: true, capture: true });
  const attempt = () => {
    if (touched || mine !== current) return;
    const it = focus && document.querySelector(focus);
    if (it) it.focus({ preventScroll: true });
    scrollTo(0, y);
    if ((Math.abs(scrollY - y) > 1 || (focus && !it)) && performance.now() < until) requestAnimationFrame(attempt);
  };
  requestAnimationFrame(attempt);
}

history.scrollRestoration = "manual";
addEventListener("popstate", () => {
  leave();
  enter(null, history.state?.key);
  restore();
  tell();
});
addEventListener("pagehide", leave);
enter(null, history.state?.key);
restore();
