// The trials that are selected: one selection for table, curves, parallel coordinates and comparison. For the experiment
// on the screen it is in the address, and the browser's session remembers that of the others.

import { addSelection, route, setParams, tell, useRoute } from "./url.js";

const KEPT = "selected", LOOKS = "looks";
export const COLOURS = ["#2f86d1", "#d81b60", "#12a07a", "#e39a00", "#9a4fc4", "#d5493a", "#6f7d8f", "#5f9e3f", "#b0752f", "#1497a8", "#d05fae", "#5254a3"];
const DASHES = [[], [8, 4], [2, 3], [10, 3, 2, 3]];  // beside the colours, for those who can't tell them apart

const read = name => JSON.parse(sessionStorage.getItem(name) ?? "{}");
const write = (name, value) => sessionStorage.setItem(name, JSON.stringify(value));

// {1, 2, 3, 7} as "1-3,7", and back.
export function ranges(trials) {
  const found = [];
  for (const trial of [...trials].sort((one, other) => one - other)) {
    const last = found.at(-1);
    if (last && last[1] === trial - 1) last[1] = trial;
    else found.push([trial, trial]);
  }
  return found.map(([first, last]) => first === last ? `${first}` : `${first}-${last}`).join(",");
}

export function parsed(text) {
  const found = new Set();
  for (const [, first, last = first] of (text ?? "").matchAll(/(\d{1,7})(?:-(\d{1,7}))?/g))
    for (let trial = Number(first); trial <= Math.min(Number(last), Number(first) + 100_000); trial++) found.add(trial);
  return found;
}

const onScreen = () => route().parts[0] === "e" ? route().parts[1] : null;

function of(name) {
  const kept = read(KEPT);
  if (onScreen() === name) {
    const here = route().params.get("sel") ?? "";
    if ((kept[name] ?? "") !== here) write(KEPT, { ...kept, [name]: here });
    return here;
  }
  return kept[name] ?? "";
}

function change(name, trials) {
  const text = ranges(trials);
  write(KEPT, { ...read(KEPT), [name]: text });
  if (onScreen() === name) setParams({ sel: text });
  else tell();
}

addSelection(of);

export function useSelection(name) {
  useRoute();
  const chosen = parsed(of(name));
  return {
    chosen,
    has: trial => chosen.has(trial),
    toggle: trial => change(name, chosen.has(trial) ? [...chosen].filter(each => each !== trial) : [...chosen, trial]),
    set: trials => change(name, trials),
    add: trials => change(name, new Set([...chosen, ...trials])),
    clear: () => change(name, []),
  };
}

// All that is selected, as [experiment, trial].
export function all() {
  if (onScreen()) of(onScreen());
  return Object.entries(read(KEPT)).flatMap(([name, text]) => [...parsed(text)].map(trial => [name, trial]));
}

export function clearAll() {
  write(KEPT, {});
  write(LOOKS, {});
  if (onScreen()) setParams({ sel: null });
  tell();
}

// ------------------------------------------------------------------ looks
// A trial keeps its colour as long as it is selected.
function look(name, trial) {
  const looks = read(LOOKS), key = `${trial}:${name}`;
  if (!(key in looks)) {
    const taken = new Set(Object.values(looks));
    let free = 0;
    while (taken.has(free)) free += 1;
    looks[key] = free;
    write(LOOKS, looks);
  }
  return looks[key];
}

export const colourOf = (name, trial) => COLOURS[look(name, trial) % COLOURS.length];
export const dashOf = (name, trial) => DASHES[Math.floor(look(name, trial) / COLOURS.length + look(name, trial)) % DASHES.length];
