// The Analysis tab: the report's figures, linked by the one selection.

import { html, useEffect, useMemo, useRef, useState } from "./lib/preact.js";
import { OWN_LOOK } from "./canvas.js";
import { SAVED, experiment, get, refresh, useData } from "./data.js";
import { Figure } from "./figures.js";
import { Parallel } from "./parallel.js";
import { Empty, Rows, Select, Skeleton, Trouble, useSeen } from "./parts.js";
import { colourOf, dashOf, ranges, useSelection } from "./selection.js";
import { address, returning, setParams, useParam } from "./url.js";
import { duration, number, plural, timeOfDay } from "./values.js";

const INPUTS = ["wheel", "touchmove", "keydown", "pointerdown"];
const EVERY_MS = 10_000, MOST_INCLUDED = 100;
const OF_TRIALS = ["front", "history", "parallel", "slices"];  // figures that show trials, and not always all

// The selection, for figures: {chosen, looks (of few trials: their colours and dashes), choose(trials, more, where), toggle}.
function usePicked(name) {
  const selection = useSelection(name), key = ranges(selection.chosen);
  const { chosen, looks } = useMemo(() => ({
    chosen: selection.chosen,
    looks: selection.chosen.size > OWN_LOOK ? null : new Map([...selection.chosen].map(trial => [trial, { colour: colourOf(name, trial), dash: dashOf(name, trial) }])),
  }), [name, key]);
  const choose = (trials, more = false, where = "") => {
    if (more) selection.add(trials);
    else selection.set(trials);
    setParams({ where });  // the conditions that chose them, if any did
  };
  return { chosen, looks, choose, toggle: selection.toggle };
}

const trialsOf = found => new Set(Object.values(found?.figures ?? {}).flatMap(figure => (figure.data ?? []).flatMap(trace => trace.customdata ?? [])));

// ------------------------------------------------------------------ a section
function Section({ kind, title, name, about, picked, view: View, least, nothing }) {
  // Of a figure that leaves out trials: those that it has anyway.
  const [place, seen] = useSeen(), usual = useRef(null), [made, setMade] = useState(""), [trouble, setTrouble] = useState("");
  const wanted = usual.current ? [...picked.chosen].filter(trial => !usual.current.has(trial)).slice(0, MOST_INCLUDED) : [];
  const path = `${experiment(name)}/figures/${kind}`, asked = `${path}${wanted.length ? `?include=${wanted}` : ""}`;
  const { data, error, fresh } = useData(asked, { every: EVERY_MS, when: seen && made !== `${asked} ${about.version}`, keep: true });
  const trials = useMemo(() => trialsOf(data), [data]);
  useEffect(() => { if (fresh) setMade(`${asked} ${data.version}`); }, [data, fresh, asked]);
  const figures = data && Object.keys(data.figures).length ? data.figures : null, note = figures && Object.values(figures)[0].note;
  if (data) usual.current = note && OF_TRIALS.includes(kind) ? new Set([...trials].filter(trial => !data.included.includes(trial))) : null;
  const anew = async () => {
    try {
      await get(`${asked}${wanted.length ? "&" : "?"}now=1`);
      setTrouble("");
      refresh();
    } catch (failed) {
      setTrouble(failed.message);
    }
  };
  const hidden = figures && OF_TRIALS.includes(kind) ? [...picked.chosen].filter(trial => !trials.has(trial)).length : 0;
  return html`<section id=${kind} ref=${place} class="analysed">
    <div class="top"><h2>${title}</h2>${!SAVED && html`<span class="quiet">${data && `as of ${timeOfDay(data.at)}`} <button class="plain" onclick=${anew}>Refresh</button></span>`}</div>
    ${(trouble || error) && html`<${Trouble}>${trouble || error.message}<//>`}
    ${figures ? html`<${View} figures=${figures} name=${name} picked=${picked} />` : html`<div style=${{ minHeight: data ? 0 : least }}>${data ? html`<${Empty}>${nothing}<//>` : html`<${Skeleton} rows=${Math.floor(least / 40)} />`}</div>`}
    ${(note || hidden > 0) && html`<p class="quiet">${note} ${hidden > 0 && `${plural(hidden, "selected trial")} ${hidden === 1 ? "is" : "are"} not shown.`}</p>`}
  </section>`;
}

// Scales have the numbers of hidden values in their names; the address has only which it is.
const keyOf = scale => scale.startsWith("log") ? "log" : scale.endsWith("hidden") ? "most" : "all";
function useScale(figure) {
  const [at] = useParam("scale"), names = Object.keys(figure.scales).sort((one, other) => (other === figure.scale) - (one === figure.scale));
  const choice = names.length > 1 && html`<p class="controls"><${Select} name="scale" label="scale" options=${names.map(each => [keyOf(each), each])} /></p>`;
  return [names.find(each => keyOf(each) === at) ?? figure.scale, choice];
}

const Squares = ({ of }) => html`<p class="legend">${of.map(([text, colour]) => html`<span key=${text}><i style=${{ background: colour }} />${text}</span>`)}</p>`;

function Points({ figure, label, picked }) {
  const [scale, choice] = useScale(figure), points = new Set(figure.data.flatMap(each => each.x.map((x, at) => `${x} ${each.y[at]}`)));
  if (points.size === 1) return html`<p class="numbers"><b>${number(figure.data[0].y[0])}</b></p>`;
  return html`<div class="top"><${Squares} of=${figure.data.map(trace => [trace.name, trace.marker?.color ?? trace.line.color])} />${choice}</div>
    <${Figure} figure=${figure} scale=${scale} label=${label} picked=${picked} />`;
}

const Front = ({ figures: { front }, picked }) => html`<${Points} figure=${front} picked=${picked} label="Pareto front: the first objective over the second" />
  <p>${plural(front.table.length - 1, "trial")}: no other one is at least as good in all objectives, and better in one.</p>
  <${Rows} label="Trials of the Pareto front" table=${front.table} />`;
const History = ({ figures, picked }) => html`<${Points} figure=${figures.history} picked=${picked} label="Best value of each trial, and best so far, over time" />`;

const Lines = ({ figures, picked }) => html`<${Parallel} figure=${figures.parallel} picked=${picked}
  label=${`Parallel coordinates of ${plural(figures.parallel.data[0].customdata.length, "trial")}: ${figures.parallel.data[0].dimensions.map(each => each.label).join(", ")}`} />`;

function Slices({ figures, picked }) {
  const all = Object.entries(figures), [, first] = all[0], [scale, choice] = useScale(first);
  const colours = first.data.map(trace => [trace.name, trace.marker.color]), differ = new Set(colours.map(([, colour]) => colour)).size > 1;
  return html`<div class="top">${differ ? html`<${Squares} of=${colours} />` : html`<span />`}${choice}</div>
    <div class="grid">${all.map(([key, figure]) => html`<${Figure} key=${key} figure=${figure} height=${250} picked=${picked} label=${`Values over ${figure.layout.xaxis.title.text}`}
      scale=${Object.keys(figure.scales).find(each => keyOf(each) === keyOf(scale)) ?? figure.scale} />`)}</div>`;
}

function Importance({ figures: { importance } }) {
  const [bars] = importance.data ?? [];
  return bars && html`<table class="importance" aria-label="Importance of hyperparameters"><tbody>${bars.y.map((name, at) => html`
    <tr key=${name}><th scope="row" title=${name}><span>${name}</span></th><td><i style=${{ width: `${100 * bars.x[at]}%` }} /></td><td class="end">${bars.text[at]}</td></tr>`).reverse()}</tbody></table>`;
}

const Rungs = ({ figures }) => html`<${Rows} label="Rungs" table=${figures.rungs.table} />
  <p class="quiet">The rank correlation of the values at a rung with those at the next, for all trials of the rung: near 0, the rung does not predict the next. Estimated from the trials that reached both.</p>`;

// Dragging along the time shows a part of it.
function useTime(figures) {
  const [text, set] = useParam("time"), range = text.split("-").map(Number), isOne = range.length === 2 && range[0] < range[1];
  const zoomed = useMemo(() => figures.map(figure => figure && (isOne ? { ...figure, layout: { ...figure.layout, xaxis: { ...figure.layout.xaxis, range } } } : figure)), [text, ...figures]);
  const onrange = (low, high) => set([low, high].map(end => Number(Math.max(end, 0).toPrecision(6))).join("-"));
  return [zoomed, onrange, isOne && html`<button onclick=${() => set("")}>Show all the time</button>`];
}

function Slots({ figures, picked }) {
  const [[shares, groups], onrange, whole] = useTime([figures.shares, figures.groups]);
  return html`<div class="wide"><table class="phases" aria-label="Phases"><thead><tr><th scope="col">phase</th><th scope="col">share</th><th scope="col">slot time</th><td></td></tr></thead>
      <tbody>${shares.phases.map(each => html`<tr key=${each.name}><th scope="row"><i class="square" style=${{ background: each.colour }} />${each.name}</th>
        <td>${(100 * each.share).toFixed(1)}%</td><td>${each.time}</td><td class="quiet">${each.meaning}</td></tr>`)}</tbody></table></div>
    ${shares.gpu_types.length > 0 && html`<${Rows} label="Types of GPU" table=${shares.gpu_types} />`}
    ${shares.before > 0 && html`<p class="quiet">Before the first worker group was started: ${duration(shares.before)}.</p>`}
    <p class="controls">${whole || html`<span>Drag along the time to see a part of it.</span>`}</p>
    <${Figure} figure=${shares} picked=${picked} onrange=${onrange} label="Slots in each phase, over time" />
    ${groups ? html`<h3>Each worker group</h3><${Figure} figure=${groups} height=${groups.layout.height} picked=${picked} label="Phases of each worker group, over time" />`
      : html`<p class="quiet">There are too many intervals to show each worker group's.</p>`}
    ${shares.machine.length > 0 && html`<h3>Resource usage of trials</h3><${Rows} label="Resource usage of trials" table=${shares.machine} />`}`;
}

// ------------------------------------------------------------------ the tab
const NONE = "No trial has validated yet.", NONE_VARIES = "No trial has validated yet, or no hyperparameter varies.";
const SECTIONS = [  // kind, title, view, height before it is drawn, what is said if there is nothing
  ["front", "Pareto front", Front, 400, NONE], ["history", "Best value over time", History, 400, NONE], ["parallel", "Parallel coordinates", Lines, 520, NONE_VARIES],
  ["importance", "Importance of hyperparameters", Importance, 160, NONE_VARIES], ["slices", "Hyperparameters one by one", Slices, 320, NONE_VARIES],
  ["rungs", "How well each rung ranks", Rungs, 160, "No estimate yet: it needs trials that have reached two rungs of an ASHA search."], ["slots", "Use of slot time", Slots, 700, "No worker group has started yet."],
];

const Picked = ({ name, picked }) => picked.chosen.size > 0 && picked.looks && html`<span class="legend">${[...picked.looks].map(([trial, { colour }]) => html`
  <a key=${trial} href=${address(name, trial)}><i style=${{ background: colour }} />trial ${trial}</a>`)}</span>`;

// The section in the address: the page stays at it while those above it are drawn, until somebody scrolls; then it follows.
function useSection(kinds) {
  const [section, setSection] = useParam("section", kinds[0]), mine = useRef({ aims: !returning(), touched: false });
  Object.assign(mine.current, { section, setSection });
  useEffect(() => {
    const { current } = mine, aim = () => current.aims && current.section !== kinds[0] && document.getElementById(current.section)?.scrollIntoView();
    const sizes = new ResizeObserver(aim);
    const spy = new IntersectionObserver(entries => {
      const at = entries.find(each => each.isIntersecting)?.target.id;
      if (at && current.touched) current.setSection(at);
    }, { rootMargin: "-110px 0px -60% 0px" });
    for (const kind of kinds) for (const watch of [sizes, spy]) watch.observe(document.getElementById(kind));
    const touch = () => { Object.assign(current, { aims: false, touched: true }); };
    for (const what of INPUTS) addEventListener(what, touch, true);
    return () => {
      sizes.disconnect();
      spy.disconnect();
      for (const what of INPUTS) removeEventListener(what, touch, true);
    };
  }, [kinds.join()]);
  const go = kind => {
    setSection(kind);
    Object.assign(mine.current, { aims: true, touched: false });
    document.getElementById(kind).scrollIntoView();
  };
  return [section, go];
}

export function Analysis({ name, about }) {
  const picked = usePicked(name), shown = SECTIONS.filter(([kind]) => kind === "front" ? about.objectives?.length > 1 : kind !== "rungs" || about.standing.rungs.length > 1 && about.objectives.length < 2);
  const [section, go] = useSection(shown.map(([kind]) => kind));
  return html`<div class="jump"><nav aria-label="Sections">${shown.map(([kind, title]) => html`
      <button key=${kind} class="plain" aria-current=${kind === section ? "true" : null} onclick=${() => go(kind)}>${title}</button>`)}</nav>
      <${Picked} name=${name} picked=${picked} /></div>
    ${shown.map(([kind, title, view, least, nothing]) => html`<${Section} key=${kind} kind=${kind} title=${title} view=${view} least=${least} nothing=${nothing} name=${name} about=${about} picked=${picked} />`)}`;
}
