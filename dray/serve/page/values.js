// How values are written.

export function number(value) {
  if (value === null || value === undefined) return "–";
  if (typeof value !== "number") return { nan: "NaN", inf: "∞", "-inf": "−∞" }[value] ?? String(value);
  if (Number.isInteger(value) && Math.abs(value) < 1e15) return String(value);
  return String(Number(value.toPrecision(5)));
}

// How many places after the point a number has that is written with five digits.
const places = value => Number.isInteger(value) || !Number.isFinite(value) ? null : Math.max(0, 4 - Math.floor(Math.log10(Math.abs(value))));

// A number in a column, to as many places as another one of it.
export function alike(value, other) {
  const to = places(other), text = typeof value === "number" && to !== null ? value.toFixed(to) : null;
  return text === null || to > 12 || value !== 0 && Number(text) === 0 ? number(value) : text;
}

export function shown(value) {
  if (value === null || value === undefined) return "–";
  if (typeof value === "number") return number(value);
  return typeof value === "string" ? value : JSON.stringify(value);
}

const WHOLE = new Intl.NumberFormat("en");
export const count = value => WHOLE.format(value);
export const capital = text => text[0].toUpperCase() + text.slice(1);
export const plural = (value, noun) => `${count(value)} ${noun}${value === 1 ? "" : "s"}`;
export const singular = unit => unit.replace(/^(\w+?)(?:(?<=ch)es|s)\b/, "$1");  // "epochs", "seconds since the start"
const two = value => String(value).padStart(2, "0");

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  const whole = Math.round(seconds);
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${two(whole % 60)} s`;
  return `${count(Math.floor(whole / 3600))} h ${two(Math.floor(whole / 60) % 60)} min`;
}

export const timeOfDay = (seconds, fine = true) => new Date(seconds * 1000).toTimeString().slice(0, fine ? 8 : 5);

export function clock(seconds) {
  if (!seconds) return "–";
  const at = new Date(seconds * 1000);
  return `${at.getFullYear()}-${two(at.getMonth() + 1)}-${two(at.getDate())} ${timeOfDay(seconds, false)}`;
}

export function ago(seconds) {
  if (!seconds) return "–";
  const passed = Date.now() / 1000 - seconds;
  if (passed < 60) return "just now";
  if (passed < 3600) return `${Math.floor(passed / 60)} min ago`;
  if (passed < 86400) return `${Math.floor(passed / 3600)} h ago`;
  return clock(seconds).slice(0, 10);
}

export function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let place = 0;
  while (value >= 1024 && place < units.length - 1) [value, place] = [value / 1024, place + 1];
  return `${place ? value.toFixed(1) : value} ${units[place]}`;
}

// Stretches of consecutive numbers: {1, 2, 3, 7} as [[1, 3], [7, 7]].
export function runs(numbers) {
  const found = [];
  for (const each of [...numbers].sort((one, other) => one - other)) {
    const last = found.at(-1);
    if (last && last[1] === each - 1) last[1] = each;
    else found.push([each, each]);
  }
  return found;
}

// "validation accuracy"; but "validation_loss", whose name says it.
export const metricName = (kind, name) => name.startsWith(kind) ? name : `${kind} ${name}`;

// Text of others with characters that would hide code, or change its order, made visible; see `dray/text.py`.
const CONTROLS = /[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]|\r(?!\n)/g;
export const clean = text => text.replace(CONTROLS, it => `\\u${it.charCodeAt(0).toString(16).padStart(4, "0")}`);
