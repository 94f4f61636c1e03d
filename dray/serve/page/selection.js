// The trials that are selected: one selection for table, curves, parallel coordinates and comparison. For the experiment
// on the screen it is in the address, and the browser's session remembers that of the others.

import { html } from "./lib/preact.js";
import { addSelection, route, setParams, storage, tell, useRoute } from "./url.js";
import { runs } from "./values.js";

const KEPT = "selected", LOOKS = "looks";
const MOST_IN_ADDRESS = 2000, MANY = "many";  // letters; a longer selection is only in the session
const MOST = 100_000;  // trials of an address that was typed
const MOST_LOOKS = 96;  // trials whose colours are remembered
// None of those that the figures have for rungs and for the best trial.
export const COLOURS = ["#1497a8", "#c653a8", "#86861a", "#7068d8", "#b0752f", "#4f9a3a", "#5b7fa6", "#b4637a"];
const DASHES = [[], [8, 4], [2, 3], [10, 3, 2, 3]];  // beside the colours, for those who can't tell them apart

// Objects in the session's storage, which are parsed only after a change.
const cache = new Map();
function read(name) {
  const text = storage.getItem(name) ?? "{}";
  if (cache.get(name)?.text !== text) cache.set(name, { text, value: JSON.parse(text) });
  return cache.get(name).value;
}
function write(name, value) {
  const text = JSON.stringify(value);
  try {
    storage.setItem(name, text);
    cache.set(name, { text, value });
  } catch { /* it is full */ }
}

// {1, 2, 3, 7} as "1-3,7", and back.
export const ranges = trials => runs(trials).map(([first, last]) => first === last ? `${first}` : `${first}-${last}`).join(",");

function parsed(text) {
  const found = new Set();
  for (const [, first, last = first] of (text ?? "").matchAll(/(\d{1,7})(?:-(\d{1,7}))?/g))
    for (let trial = Number(first); trial <= Number(last) && found.size < MOST; trial++) found.add(trial);
  return found;
}

const onScreen = () => route().parts[0] === "e" ? route().parts[1] : null;
const short = text => text.length > MOST_IN_ADDRESS ? MANY : text;

// The selection of an experiment as text: what the address says, where it says it.
function of(name) {
  const kept = read(KEPT), here = onScreen() === name ? route().params.get("sel") ?? "" : null;
  if (here === null || here === MANY || here === (kept[name] ?? "")) return kept[name] ?? "";
  write(KEPT, { ...kept, [name]: here });
  return here;
}

const sets = new Map();
function chosenOf(name) {
  const text = of(name);
  if (sets.get(name)?.text !== text) {
    sets.set(name, { text, chosen: parsed(text) });
    keepLooks(name, sets.get(name).chosen);
  }
  return sets.get(name).chosen;
}

function change(name, trials) {
  const text = ranges(trials);
  keepLooks(name, trials);
  write(KEPT, { ...read(KEPT), [name]: text });
  if (onScreen() === name) setParams({ sel: short(text) });
  tell();
}

addSelection(name => short(of(name)));

export function useSelection(name) {
  useRoute();
  const chosen = chosenOf(name);
  return {
    chosen,
    has: trial => chosen.has(trial),
    toggle: trial => change(name, chosen.has(trial) ? [...chosen].filter(each => each !== trial) : [...chosen, trial]),
    set: trials => change(name, [...trials]),
    add: trials => change(name, [...new Set([...chosen, ...trials])]),
    remove: trials => {
      const gone = new Set(trials);
      change(name, [...chosen].filter(each => !gone.has(each)));
    },
    clear: () => change(name, []),
  };
}

// Selects a trial of any experiment, or not.
export function pick(name, trial, on) {
  const chosen = chosenOf(name);
  if (chosen.has(trial) !== on) change(name, on ? [...chosen, trial] : [...chosen].filter(each => each !== trial));
}

// All that is selected, as [experiment, trial].
export function all() {
  const names = new Set([...Object.keys(read(KEPT)), ...onScreen() ? [onScreen()] : []]);
  return [...names].flatMap(name => [...chosenOf(name)].map(trial => [name, trial]));
}

export function clearAll() {
  write(KEPT, {});
  write(LOOKS, {});
  if (onScreen()) setParams({ sel: null });
  tell();
}

// ------------------------------------------------------------------ looks
// A trial keeps its colour as long as it is selected; the first free one is that of the next.
function keepLooks(name, trials) {
  const looks = read(LOOKS), wanted = [...trials].slice(0, MOST_LOOKS).map(trial => `${trial}:${name}`);
  const left = Object.fromEntries(Object.entries(looks).filter(([key]) => key.slice(key.indexOf(":") + 1) !== name || wanted.includes(key)));
  for (const key of wanted) left[key] ??= free(left);
  write(LOOKS, left);
}

function free(looks) {
  const taken = new Set(Object.values(looks));
  let found = 0;
  while (taken.has(found)) found += 1;
  return found;
}

function look(name, trial) {
  const looks = read(LOOKS), key = `${trial}:${name}`;
  if (key in looks) return looks[key];
  if (Object.keys(looks).length >= MOST_LOOKS) return trial;
  write(LOOKS, { ...looks, [key]: free(looks) });
  return read(LOOKS)[key];
}

export const colourOf = (name, trial) => COLOURS[look(name, trial) % COLOURS.length];
export const dashOf = (name, trial) => DASHES[Math.floor(look(name, trial) / COLOURS.length + look(name, trial)) % DASHES.length];

// A piece of a trial's line.
export const Swatch = ({ name, trial }) => html`<svg class="swatch" width="26" height="10" aria-hidden="true">
  <line x1="0" x2="26" y1="5" y2="5" stroke=${colourOf(name, trial)} stroke-width="3" stroke-dasharray=${dashOf(name, trial).join(" ") || null} /></svg>`;

// ------------------------------------------------------------------ comparing
export const MOST_COMPARED = 12;
export function compareAddress(found) {
  const query = new URLSearchParams(found.slice(0, MOST_COMPARED).map(([name, trial]) => ["t", `${trial}:${name}`]));
  if (found.length > MOST_COMPARED) query.set("of", found.length);
  return `#/compare?${query}`;
}
