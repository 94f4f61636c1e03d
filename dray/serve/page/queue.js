// The queue: what the slots do, who waits and why, and the order, which can be changed.

import { html, useRef, useState } from "./lib/preact.js";
import { useData } from "./data.js";
import { useKeys } from "./keys.js";
import { colourOf, Lanes } from "./lanes.js";
import { label, named, useLabels } from "./names.js";
import { Empty, Select, Skeleton, State } from "./parts.js";
import { askShare, askToMove, Preview } from "./share.js";
import { address, useParam } from "./url.js";
import { duration, number, plural } from "./values.js";

const EVERY_MS = 4000;
const SPANS = [["3600", "1 hour"], ["600", "10 minutes"], ["21600", "6 hours"], ["86400", "24 hours"]];
const MOST = 100;  // how many experiments are listed at first

// ------------------------------------------------------------------ the list
function slotsOf({ slots, waiting, share }) {
  const has = share.max_slots ? `${number(slots)} of at most ${plural(share.max_slots, "slot")}` : plural(Number(number(slots)), "slot");
  return html`${has}${waiting > 0 && html`<span class="quiet"> · ${plural(waiting, "trial")} waiting</span>`}`;
}

function Row({ entry, place, next, refused, locked, entries, active, drag }) {
  const { name, share } = entry, moves = place >= 0, at = active.findIndex(each => each.name === name), why = refused && `You can't change it: ${refused}`;
  const button = (text, label, off, act) => html`<button class="plain" aria-label=${label} title=${why || label} disabled=${Boolean(refused) || off} onclick=${act}>${text}</button>`;
  return html`<li data-name=${name} class="entry ${drag.over === at && moves && drag.name ? "over" : ""} ${drag.name === name ? "dragged" : ""}">
    <span class="handle" aria-hidden="true" title=${why || "Drag to move it"} ...${moves && !refused ? drag.handle(name) : { hidden: true }}>⠿</span>
    <span class="place">${moves ? place + 1 : ""}</span>
    <span class="who"><i class="square" style=${{ background: colourOf(name) }} /><a class="open" href=${address(name)} title=${name}>${label(name)}</a>
      ${next && html`<span class="tag">next</span>`}${entry.owner && html`<span class="quiet"> · ${entry.owner}</span>`}${locked && html`<span class="quiet" title=${why}> · not yours</span>`}</span>
    <span class="is"><${State} state=${entry.state} why=${entry.error || entry.why} /></span>
    <span class="share">priority ${share.priority}${share.weight !== 1 && ` · weight ${number(share.weight)}`}</span>
    <span class="has">${slotsOf(entry)}</span>
    <span class="why quiet">${named([entry.why, entry.error].filter(Boolean).join("; "))}</span>
    ${(!refused || locked) && html`<span class="verbs">${moves && html`${button("↑", `Move ${label(name)} up`, at === 0, () => askToMove(name, active[at - 1].name, entries))}
      ${button("↓", `Move ${label(name)} down`, at === active.length - 1, () => askToMove(name, active[at + 2]?.name ?? null, entries))}`}
      ${button("Share…", `Change the share of ${label(name)}`, false, () => askShare({ submitted: entry, title: label(name) }))}</span>`}
  </li>`;
}

// Dragging by a handle, with a mouse, a pen or a finger. `drop(name, at)`: before the entry at this place.
function useDrag(active, drop) {
  const [state, set] = useState({ name: null, over: null }), list = useRef(null), now = useRef(state);
  now.current = state;
  const placeAt = y => {
    const rows = [...list.current.querySelectorAll("li.entry")].filter(row => active.some(each => each.name === row.dataset.name));
    const found = rows.findIndex(row => y < row.getBoundingClientRect().top + row.offsetHeight / 2);
    return found < 0 ? rows.length : found;
  };
  const end = event => {
    const { name, over } = now.current;
    set({ name: null, over: null });
    const at = active.findIndex(each => each.name === name);
    if (event.type === "pointerup" && name && over !== null && over !== at && over !== at + 1) drop(name, over);
  };
  useKeys([["Escape", "", () => Boolean(now.current.name) && set({ name: null, over: null })]]);
  return [list, {
    ...state,
    handle: name => ({
      onpointerdown: event => { event.preventDefault(); event.currentTarget.setPointerCapture(event.pointerId); set({ name, over: null }); },
      onpointermove: event => { if (now.current.name) set({ name, over: placeAt(event.clientY) }); },
      onpointerup: end, onpointercancel: end,
    }),
  }];
}

function Now({ data }) {
  const { entries, refused } = data, active = entries.filter(each => each.state !== "PAUSED"), paused = entries.filter(each => each.state === "PAUSED");
  const [list, drag] = useDrag(active, (name, at) => askToMove(name, active[at]?.name ?? null, entries));
  const [most, setMost] = useState(MOST);
  const here = () => document.activeElement?.closest?.("li.entry")?.dataset.name, place = name => active.findIndex(each => each.name === name);
  const step = by => {
    const links = [...list.current.querySelectorAll("a.open")], at = links.findIndex(link => link.closest("li").contains(document.activeElement));
    links[Math.min(Math.max(at + by, 0), links.length - 1)]?.focus();
  };
  const move = by => {
    const at = place(here());
    if (at < 0 || refused[here()] || at + by < 0 || at + by >= active.length) return false;
    askToMove(here(), active[by < 0 ? at - 1 : at + 2]?.name ?? null, entries);
  };
  useKeys([
    ["j", "next", () => step(1)], ["k", "previous", () => step(-1)],
    ["Alt+ArrowUp", "move the experiment up", () => move(-1)], ["Alt+ArrowDown", "move the experiment down", () => move(1)],
  ]);
  if (!entries.length) return html`<${Empty}>No experiment runs or waits. Submit one with: dray experiment create CONFIG DIRECTORY<//>`;
  const all = entries.every(each => refused[each.name]);
  const row = (entry, number) => html`<${Row} key=${entry.name} entry=${entry} place=${number} next=${entry.name === data.next} refused=${refused[entry.name]} locked=${!all && refused[entry.name]}
    entries=${entries} active=${active} drag=${drag} />`;
  const over = drag.name && drag.over !== null && ![place(drag.name), place(drag.name) + 1].includes(drag.over) ? drag.over : null;
  const rows = active.slice(0, most).flatMap((entry, at) => {
    const mates = active.filter(each => each.share.priority === entry.share.priority).length, first = active[at - 1]?.share.priority !== entry.share.priority;
    return [first && mates > 1 && html`<li key=${`p${entry.share.priority}`} class="level quiet">${mates} of priority ${entry.share.priority}: they share the slots by weight</li>`, row(entry, at)];
  });
  return html`${all && html`<p class="quiet">You can look, but not change the order: ${refused[entries[0].name]}.</p>`}
    <ol class="entries ${drag.name ? "dragging" : ""}" ref=${list} aria-label="Experiments in the order of their turns">${rows}
      ${active.length > most && html`<li class="level"><button onclick=${() => setMost(Infinity)}>Show ${plural(active.length - most, "more experiment")}</button></li>`}
      ${drag.over === active.length && html`<li class="end" />`}
      ${paused.length > 0 && html`<li key="paused" class="level quiet">Paused: they wait for nobody's slots</li>`}${paused.map(entry => row(entry, -1))}</ol>
    ${over !== null && html`<aside class="dropping" aria-label="What dropping it here does"><b>${active[over] ? `${label(drag.name)} before ${label(active[over].name)}` : `${label(drag.name)} at the end`}</b>
      <${Preview} query=${new URLSearchParams({ name: drag.name, before: active[over]?.name ?? "" })} found=${{}} entries=${entries} /></aside>`}`;
}

function summary({ lanes, entries, next }) {
  const all = lanes.lanes, idle = all.filter(each => each.state === "idle"), trains = all.filter(each => each.state === "training").length;
  if (!all.length) return "No node with slots is up.";
  const longest = idle.length && Math.max(...idle.map(each => lanes.now - each.since)), waits = entries.filter(each => ["QUEUED", "PREEMPTED"].includes(each.state)).length;
  return [`${trains} of ${plural(all.length + lanes.more_lanes, "slot")} busy`, idle.length && `${idle.length} idle, the longest for ${duration(longest)}`,
    waits && `${plural(waits, "experiment")} ${waits === 1 ? "waits" : "wait"} for slots`, next && `the next free slot goes to ${label(next)}`].filter(Boolean).join(" · ");
}

export function Queue() {
  const [span] = useParam("span", SPANS[0][0]), { data, error } = useData(`/queue?seconds=${encodeURIComponent(span)}`, { every: EVERY_MS, keep: true });
  useLabels(data ? [...data.entries.map(each => each.name), ...data.lanes.bars.map(each => each.experiment)] : []);
  if (!data) return html`<h1>Queue</h1>${error?.status ? html`<p class="trouble">${error.message}</p>` : html`<${Skeleton} />`}`;
  return html`<div class="top"><h1>Queue</h1><${Select} name="span" label="Slots over the last" options=${SPANS} /></div>
    <p class="quiet" id="summary">${summary(data)}</p>
    ${data.lanes.lanes.length > 0 && html`<${Lanes} view=${data.lanes} />`}
    <section><h2>Now</h2><${Now} data=${data} /></section>`;
}
