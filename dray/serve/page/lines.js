// Numbered lines of a log or a file, of which only those that are seen are drawn; and differences of code.

import { html, useEffect, useLayoutEffect, useRef, useState } from "./lib/preact.js";
import { useResize } from "./parts.js";
import { useParam } from "./url.js";
import { clean, count } from "./values.js";

const HEIGHT = 20, AHEAD = 20, NEAR = 40;
const MOST = 800_000;  // lines at a time: browsers limit the height of an element
const LONGEST = 2000;  // letters of a line that are drawn
const STAMP = /^(\d{4}-\d\d-\d\dT)(\d\d:\d\d:\d\d)(\.\d{3}Z) /;  // of a rank's line; see dray/records/logs.py
const ESCAPES = /\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)/g;  // colours and titles of a terminal

// As a terminal would show it: without colours, and of a line that was overwritten the last text. It is never HTML.
export const printed = line => clean(line.replace(ESCAPES, "").replace(/\r+$/, "").split("\r").at(-1));

// The text with what is searched for marked.
export function marked(text, wanted) {
  if (!wanted) return text;
  const lower = text.toLowerCase(), looked = wanted.toLowerCase(), found = [];
  let done = 0;
  for (let at = lower.indexOf(looked); at >= 0; at = lower.indexOf(looked, done)) {
    found.push(text.slice(done, at), html`<mark>${text.slice(at, at + looked.length)}</mark>`);
    done = at + looked.length;
  }
  return [...found, text.slice(done)];
}

// A narrow screen shows only the time of day.
function told(text, find) {
  const [stamp, day, time, rest] = STAMP.exec(text) ?? [""];
  return stamp ? html`<span class="day">${day}</span>${time}<span class="day">${rest}</span> ${marked(text.slice(stamp.length), find)}` : marked(text, find);
}

// `total` lines; `line(i)`: {text, number: beside it, at: its parameters in the address, kind}, undefined while it is
// loading; `range(first, last)` says which are wanted; `target`: the line in the address, from 0, -1: none; `follow`: whether
// new lines are scrolled to, `onfollow` when that changes.
export function TextLines({ label, total, line, range, target = -1, follow = false, onfollow, find = "", onpick }) {
  const box = useRef(null), reached = useRef(-1);
  const base = total <= MOST ? 0 : Math.max(0, Math.min(total - MOST, (target < 0 ? total : target) - MOST / 2)), rows = Math.min(total, MOST);
  const [seen, setSeen] = useState([0, 60]);
  const first = Math.max(0, Math.min(seen[0], rows - 1) - AHEAD), last = Math.min(rows, seen[1] + AHEAD);

  const look = () => {
    const it = box.current, from = Math.floor(it.scrollTop / HEIGHT), to = from + Math.ceil(it.clientHeight / HEIGHT);
    if (from !== seen[0] || to !== seen[1]) setSeen([from, to]);
  };
  const scroll = () => {
    const it = box.current;
    look();
    onfollow?.(it.scrollHeight - it.scrollTop - it.clientHeight < NEAR);
  };
  useLayoutEffect(() => {
    const it = box.current;
    if (target >= 0 && target < total && reached.current !== target) {
      reached.current = target;
      const y = (target - base) * HEIGHT;
      if (y < it.scrollTop || y + 2 * HEIGHT > it.scrollTop + it.clientHeight) it.scrollTop = y - it.clientHeight / 3;
    } else if (target < 0 && follow) it.scrollTop = it.scrollHeight;
    look();
  }, [total, target, follow]);
  useResize(box, look);
  useEffect(() => { if (last > first) range?.(base + first, base + last); }, [base, first, last, total, range]);

  const drawn = [];
  for (let i = base + first; i < base + last; i++) {
    const it = line(i), text = it && (it.text.length > LONGEST ? `${it.text.slice(0, LONGEST)} …` : it.text);
    drawn.push(html`<div key=${i} class="line ${it?.kind ?? ""} ${i === target ? "target" : ""}">
      ${it && html`<a class="no" href=${hashWith(it.at)} aria-label="line ${it.number}" onclick=${event => { event.preventDefault(); onpick(it.at); }}>${it.number}</a>`}
      <span class="said">${it === undefined ? "…" : told(text, find)}</span></div>`);
  }
  const wide = String(total ? line(base + Math.min(last, rows) - 1)?.number ?? total : "").length;
  return html`<div class="log" ref=${box} tabindex="0" role="region" aria-label=${label} onscroll=${scroll} style=${{ "--rows": Math.min(total, 34), "--no": `${wide + 1}ch` }}>
    <div style=${{ height: rows * HEIGHT }}><div style=${{ transform: `translateY(${first * HEIGHT}px)` }}>${drawn}</div></div></div>`;
}

// The address with some parameters changed, for a link.
function hashWith(changes) {
  const [path, query = ""] = location.hash.split("?"), params = new URLSearchParams(query);
  for (const [name, value] of Object.entries(changes)) params.set(name, value);
  return `${path}?${params}`;
}

// A unified diff, as text.
export function Diff({ text, more = 0, label = "Difference of the code" }) {
  const lines = clean(text).trimEnd().split("\n"), [at, set] = useParam("diff"), kind = line => line.startsWith("+") ? "added" : line.startsWith("-") ? "removed" : line.startsWith("@@") || line.startsWith("diff ") ? "quiet" : "";
  return html`<${TextLines} label=${label} total=${lines.length} target=${Number(at || 0) - 1} onpick=${it => set(it.diff)}
    line=${i => ({ text: lines[i], number: i + 1, at: { diff: String(i + 1) }, kind: kind(lines[i]) })} />
    ${more > 0 && html`<p class="quiet">${count(more)} more characters are left out.</p>`}`;
}
