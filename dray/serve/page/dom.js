// Elements and how values are written. Text only ever becomes text: there is no HTML from strings on this page.

export function h(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (key in element && !["list", "form", "width", "height"].includes(key)) element[key] = value;
    else if (value !== null && value !== false) element.setAttribute(key, value);
  }
  element.append(...children.flat(Infinity).filter(child => child !== null && child !== undefined && child !== false));
  return element;
}

export function put(element, text) {
  if (element.textContent !== text) element.textContent = text;
  return element;
}

// Makes the rows of a table body those of `items`; rows that stay are changed in place, so that focus stays too.
export function rows(body, items, key, make, fill) {
  const known = new Map([...body.children].map(row => [row.dataset.key, row]));
  let place = body.firstElementChild;
  for (const item of items) {
    const name = String(key(item));
    let row = known.get(name);
    known.delete(name);
    if (!row) {
      row = make(item);
      row.dataset.key = name;
    }
    if (row === place) place = place.nextElementSibling;
    else body.insertBefore(row, place);
    fill(row, item);
  }
  for (const row of known.values()) row.remove();
}

// ------------------------------------------------------------------ values
export function number(value) {
  if (value === null || value === undefined) return "–";
  if (typeof value !== "number") return { nan: "NaN", inf: "∞", "-inf": "−∞" }[value] ?? String(value);
  if (Number.isInteger(value) && Math.abs(value) < 1e15) return String(value);
  return String(Number(value.toPrecision(5)));
}

export function shown(value) {
  if (value === null || value === undefined) return "–";
  if (typeof value === "number") return number(value);
  return typeof value === "string" ? value : JSON.stringify(value);
}

export const count = value => value.toLocaleString("en");
export const plural = (value, noun) => `${count(value)} ${noun}${value === 1 ? "" : "s"}`;
const two = value => String(value).padStart(2, "0");

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  const whole = Math.round(seconds);
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${two(whole % 60)} s`;
  return `${count(Math.floor(whole / 3600))} h ${two(Math.floor(whole / 60) % 60)} min`;
}

export function clock(seconds) {
  if (!seconds) return "–";
  const at = new Date(seconds * 1000);
  return `${at.getFullYear()}-${two(at.getMonth() + 1)}-${two(at.getDate())} ${two(at.getHours())}:${two(at.getMinutes())}`;
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

export const badge = state => h("span", { className: `state ${state.toLowerCase()}` }, state.toLowerCase().replaceAll("_", " "));
export const address = (name, trial) => `#/e/${encodeURIComponent(name)}` + (trial === undefined ? "" : `/t/${trial}`);
// "validation accuracy"; but "validation_loss", whose name says it.
export const metricName = (kind, name) => name.startsWith(kind) ? name : `${kind} ${name}`;
