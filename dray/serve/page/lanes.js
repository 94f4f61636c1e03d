// What each slot did: a row for a slot, a bar for a trial, over time.

import { html, useEffect, useRef, useState } from "./lib/preact.js";
import { label as labelOf } from "./names.js";
import { COLOURS } from "./selection.js";
import { useResize, word } from "./parts.js";
import { address, go } from "./url.js";
import { duration, plural, runs, timeOfDay } from "./values.js";

const STEPS_S = [5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10_800, 21_600];
const AXIS = 22, GAP = 3, TICK = 84, MIN_WIDTH = 560, LETTER = 7.2;
const MOST_UNUSED = 2;  // rows of slots that nothing used; further ones are counted
const ENDS = { interrupted: "left its slot: it continues later", errored: "failed", invalid_hp: "had invalid hyperparameters", "": "its processes ended" };

const places = new Map();
// An experiment's colour on this page, as long as the page is open.
export const colourOf = name => {
  if (!places.has(name)) places.set(name, places.size);
  return COLOURS[places.get(name) % COLOURS.length];
};

// Times of a scale that are round on the clock.
function ticks(from, to, width) {
  const step = STEPS_S.find(each => (to - from) / each * TICK < width) ?? 43_200, shift = new Date().getTimezoneOffset() * 60, found = [];
  for (let at = Math.ceil((from - shift) / step) * step + shift; at < to; at += step) found.push(at);
  return found.map(at => [at, timeOfDay(at, step < 60)]);
}

const keyOf = bar => `${bar.kind}-${bar.lanes[0]}-${bar.part}-${bar.began}`;
const slotOf = (kind, lane, both) => `${both ? `${kind.toUpperCase()} slot` : "slot"} ${lane + 1}`;

const titled = bar => `${labelOf(bar.experiment)}, ${bar.trials > 1 ? `${bar.trials} short trials` : `trial ${bar.trial}`}`;

function described(bar, now, both) {
  const where = `${slotOf(bar.kind, bar.lanes[0], both)}${bar.lanes.length > 1 ? ` and ${bar.lanes.length - 1} more` : ""}${bar.parts > 1 ? ` (1/${bar.parts} of it)` : ""}`;
  const end = bar.ended === null ? "trains now" : ENDS[bar.outcome] ?? word(bar.outcome);
  return `${titled(bar)}${bar.trials > 1 ? ` from ${bar.trial}` : ""}, on ${where}: ${timeOfDay(bar.began)} to ${bar.ended === null ? "now" : timeOfDay(bar.ended)} (${duration((bar.ended ?? now) - bar.began)}), ${end}`;
}

// `view`: the lanes of `GET /queue`.
export function Lanes({ view }) {
  const place = useRef(null), [width, setWidth] = useState(0), [at, setAt] = useState(null), [near, setNear] = useState(null);
  useResize(place, () => setWidth(Math.max(MIN_WIDTH, Math.floor(place.current.clientWidth))));
  const both = new Set(view.lanes.map(each => each.kind)).size > 1;
  const used = new Set(view.bars.flatMap(bar => bar.lanes.map(lane => `${bar.kind}-${lane}`)));
  const isUsed = each => used.has(`${each.kind}-${each.lane}`) || each.state !== "idle";
  const last = view.lanes.findLastIndex(isUsed), shown = view.lanes.slice(0, Math.max(last + 1 + MOST_UNUSED, 4)), more = view.lanes.length - shown.length + view.more_lanes;
  const row = new Map(shown.map((each, number) => [`${each.kind}-${each.lane}`, number]));
  const high = shown.length <= 16 ? 28 : shown.length <= 40 ? 20 : 12;
  const begin = Math.min(view.now - 30, view.from);
  const x = seconds => Math.round((seconds - begin) / (view.now - begin) * (width - 2) * 10) / 10, height = AXIS + shown.length * high;
  const bars = view.bars.filter(bar => row.has(`${bar.kind}-${bar.lanes[0]}`)), current = bars.find(bar => keyOf(bar) === (near ?? at)) ?? null;
  useEffect(() => { place.current.scrollLeft = place.current.scrollWidth; }, [width]);

  // Arrows go along a slot's bars, and from slot to slot.
  const move = event => {
    const step = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key], from = bars.find(bar => keyOf(bar) === at) ?? bars[0];
    if (!step || !from || event.altKey) return;
    event.preventDefault();
    const mid = bar => (bar.began + (bar.ended ?? view.now)) / 2, lane = bar => row.get(`${bar.kind}-${bar.lanes[0]}`);
    const there = step[0]
      ? bars.filter(bar => lane(bar) === lane(from) && bar.part === from.part && (bar.began - from.began) * step[0] > 0)
      : bars.filter(bar => (lane(bar) - lane(from)) * step[1] > 0);
    const far = bar => (step[0] ? 0 : Math.abs(lane(bar) - lane(from)) * 1e9) + Math.abs(mid(bar) - mid(from));
    const next = there.sort((one, other) => far(one) - far(other))[0];
    if (next) event.currentTarget.querySelector(`[data-key="${keyOf(next)}"]`)?.focus();
  };
  // The rectangles of a bar: one for each run of neighbouring lanes.
  const boxes = each => runs(each.lanes).map(([lane, last]) => {
    const left = Math.max(0, x(Math.max(each.began, begin))), tall = ((last - lane + 1) * high - GAP) / each.parts;
    return { left, tall, top: AXIS + row.get(`${each.kind}-${lane}`) * high + each.part * tall, wide: Math.max(1.5, x(each.ended ?? view.now) - left) };
  });
  const bar = each => {
    const key = keyOf(each), colour = colourOf(each.experiment), end = each.outcome === "errored" ? "bad" : each.outcome === "interrupted" ? "left" : "";
    const href = address(each.experiment, each.trials > 1 ? null : each.trial);
    return html`<a key=${key} data-key=${key} class="bar ${end}" href=${href} tabindex=${key === (at ?? keyOf(bars[0])) ? 0 : -1} aria-label=${described(each, view.now, both)}
        onfocus=${() => { setAt(key); setNear(null); }} onmouseenter=${() => setNear(key)} onmouseleave=${() => setNear(null)} onclick=${event => { event.preventDefault(); go(href); }}>
      ${boxes(each).map(({ left, top, wide, tall }) => html`
        <rect x=${left} y=${top} width=${wide} height=${Math.max(2, tall - (each.parts > 1 ? 1 : 0))} rx=${Math.min(3, wide / 3)} fill=${colour} fill-opacity=".26" stroke=${colour} />
        ${end && wide > 4 && html`<path class="end" d="M${left + wide - 1.5} ${top} v${tall}" />`}`)}</a>`;
  };
  const label = each => boxes(each).map(({ left, top, wide, tall }) => {
    const fits = Math.floor((wide - 10) / LETTER), name = titled(each).length > fits ? labelOf(each.experiment) : titled(each);
    return tall > 13 && fits >= 3 && html`<text key=${`${keyOf(each)}-${top}`} x=${left + 6} y=${top + tall / 2 + 4}>${name.length > fits ? `${name.slice(0, fits - 1)}…` : name}</text>`;
  });
  const idle = (each, number) => {
    const from = Math.max(begin, each.since ?? 0), wide = x(view.now) - x(from), text = `${each.state === "starting" ? "its process starts" : `idle for ${duration(view.now - each.since)}`}`;
    if (each.state === "training" || wide < 2) return null;
    return html`<g key=${`idle-${number}`} class=${`${each.state} ${high > 12 ? "" : "low"}`}><rect x=${x(from)} y=${AXIS + number * high + 1} width=${wide} height=${high - GAP - 2} rx="3" />
      ${high > 13 && wide > text.length * LETTER && html`<text x=${x(from) + 6} y=${AXIS + number * high + high / 2 + 3}>${text}</text>`}</g>`;
  };
  return html`<div class="lanes">
    <div class="slot-names" style=${{ paddingTop: `${AXIS}px` }}>${shown.map((each, number) => html`<span key=${`${each.kind}-${each.lane}`} style=${{ height: `${high}px` }}>${(high > 12 || number % 4 === 0) && slotOf(each.kind, each.lane, both)}</span>`)}</div>
    <div class="box" ref=${place} tabindex="0" role="region" aria-label="Slots over time">${width > 0 && html`<svg width=${width} height=${height} role="group" aria-label="What each slot trained, over time" onkeydown=${move}>
      ${ticks(begin, view.now, width).map(([seconds, text]) => html`<g key=${seconds} class="tick"><path d="M${x(seconds)} ${AXIS - 5} V${height}" />${x(seconds) + text.length * LETTER < width - 6 && html`<text x=${x(seconds) + 4} y="13">${text}</text>`}</g>`)}
      ${view.since > begin + 1 && html`<g class="server"><path d="M${x(view.since)} 0 V${height}" /><title>the server started at ${timeOfDay(view.since)}</title></g>`}
      ${shown.map(idle)}${bars.map(bar)}<g aria-hidden="true">${bars.map(label)}</g></svg>`}</div></div>
    <p class="quiet detail" role="status">${current ? described(current, view.now, both) : `${bars.length ? "A bar is a trial: point at it, or use the arrow keys; Enter opens it. A red end: it failed; a dashed one: it left its slot, and continues later." : "No trial has run in this time."}${more > 0 ? ` ${plural(more, "more slot")} ${more === 1 ? "is" : "are"} idle.` : ""}`}</p>`;
}
