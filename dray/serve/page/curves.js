// Learning curves: bands of all trials by rung, single trials on demand, and the selection in its colours.

import { html, useEffect, useMemo, useState } from "./lib/preact.js";
import { SAVED, experiment, queried, useData } from "./data.js";
import { Several } from "./menu.js";
import { Empty, Select, Waiting, useSeen } from "./parts.js";
import { Legend, Lines, lost, smoothed, timeUnit } from "./plot.js";
import { colourOf, dashOf, ranges, useSelection } from "./selection.js";
import { address, listed, useParam } from "./url.js";
import { count, metricName, number, plural } from "./values.js";

const EVERY_MS = 3000, HEAD_MS = 20_000, MOST_CHOSEN = 200;
const WEIGHTS = ["0", "0.3", "0.6", "0.8", "0.9", "0.95", "0.99"];

export const Smoothing = () => html`<${Select} name="smooth" label="smoothing" options=${WEIGHTS.map(weight => [weight, weight === "0" ? "none" : weight])} />`;

// The scale of the y-axis that the parameter asks for, of those that the server offers: [name, logarithmic, range].
function scaleOf({ scales, scale }, wanted) {
  const names = Object.keys(scales), asked = { log: names.find(name => scales[name].type === "log"), all: names.find(name => name === "linear" || name.endsWith("all values")),
    most: names.find(name => scales[name].range && scales[name].type !== "log") }[wanted];
  const name = asked ?? scale, { type, range = null } = scales[name], log = type === "log";
  return [name, log, log && range ? range.map(each => 10 ** each) : range];
}
export const Scale = () => html`<${Select} name="scale" label="scale" options=${[["", "automatic"], ["log", "logarithmic"], ["all", "linear"], ["most", "linear, without the worst"]]} />`;

const LABELS = { batches: "batches", epochs: "epochs", time: "time since its start", "slot-time": "slot time" };
// The x-axis: [the divisor of its values, its title].
export function axisOf(along, most) {
  if (along !== "time" && along !== "slot-time") return [1, along];
  const [seconds, unit] = timeUnit(most);
  return [seconds, along === "time" ? `${unit} since the trial's start` : `slot-${unit}`];
}

export function Curves({ name }) {
  const [asked] = useParam("metric"), [along] = useParam("x"), [show, setShow] = useParam("show", "bands"), [entries, setEntries] = useState([]);
  const metrics = listed(asked), first = useData(pathOf(name, { along, show }), { every: HEAD_MS, keep: true });
  if (!first.data) return html`<${Waiting} error=${first.error} />`;
  const { data } = first, options = [[`validation ${data.metric}`, data.metric], ...data.metrics.map(each => [each, metricName(...each.split(/ (.*)/s))])];
  if (!data.of) return html`<${Empty}>No trial has validated yet.<//>`;
  const shown = metrics.length ? metrics : [options[0][0]];
  const radio = (value, text) => html`<label class="inline"><input type="radio" name="show" checked=${show === value} onchange=${() => setShow(value)} /> ${text}</label>`;
  return html`<div class="controls">
      <${Several} name="metric" label="metric" options=${options} />
      ${data.alongs.length > 1 && html`<${Select} name="x" label="along" options=${[["", LABELS[data.along]], ...data.alongs.filter(each => each !== (along ? "" : data.along)).map(each => [each, LABELS[each]])]} />`}
      <${Scale} /><${Smoothing} />
      <span role="radiogroup" aria-label="what is drawn">${radio("bands", "bands")} ${radio("individual", "single trials")}</span>
    </div>
    <div class=${shown.length > 1 ? "curve-grid" : ""}>${shown.map((metric, at) => html`<${MetricCurves} key=${metric} name=${name} metric=${metric === options[0][0] ? "" : metric} along=${along} show=${show} one=${shown.length === 1} legend=${at === 0 && setEntries} />`)}</div>
    <${Legend} entries=${entries} />`;
}

// Of "epochs~2~8" the stretch, if it is one of this axis.
function zoomOf(text, title) {
  const [axis, ...ends] = text.split("~"), [from, to] = ends.map(Number);
  return axis === title && from < to ? [from, to] : null;
}

const pathOf = (name, parameters) => queried(`${experiment(name)}/curves`, parameters);

function MetricCurves({ name, metric, along, show, one, legend }) {
  const { chosen, toggle, add } = useSelection(name), [weight] = useParam("smooth", "0"), [wanted] = useParam("scale"), [place, seen] = useSeen();
  const ids = ranges([...chosen].slice(0, MOST_CHOSEN)), asked = { every: EVERY_MS, when: seen, keep: true };
  const { data, error } = useData(pathOf(name, { metric, along, show }), asked), [zoomed, setZoomed] = useParam("zoom");
  const mine = useData(ids ? pathOf(name, { metric, along, ...SAVED ? { show: "individual" } : { trials: ids } }) : null, asked);
  const drawn = useMemo(() => data && seriesOf(name, data, ids ? mine.data : null, chosen, Number(weight) || 0), [data, mine.data, ids, weight]);
  const [scale, log, range] = data ? scaleOf(data, wanted) : [], limits = useMemo(() => wanted !== "most" && ids ? null : range, [String(range), wanted, ids]);
  useEffect(() => { if (legend && drawn) legend(drawn.entries); }, [drawn]);
  if (!data) return html`<section class="curves" ref=${place}><${Waiting} error=${error} /></section>`;
  const { series, bands, title } = drawn, best = data.curves.find(each => each.trial === data.best);
  const all = data.how === "all", counted = data.of === 1 ? "The only trial that has validated" : data.shown === data.of ? `All ${plural(data.of, "trial")} that have validated`
    : all ? `${count(data.shown)} of ${count(data.of)} trials have reported it` : `${count(data.shown)} of ${count(data.of)} trials: ${data.how}`;
  const notes = [`${counted}${bands.length ? `; ${data.curves.length === 1 && best ? "the best has a line" : `${plural(data.curves.length, "trial")} as lines`}` : ""}.`, ...data.notes, limits && scale.includes("hidden") && `The scale is ${scale}.`,
    Number(weight) > 0 && "Lines of trials are smoothed, with the thin raw line behind.", lost(series), chosen.size > MOST_CHOSEN && `Of the selection, the first ${MOST_CHOSEN} are drawn.`].filter(Boolean);
  const gist = `${data.metric} along ${title}: ${counted}${bands.length ? ` in ${plural(bands.length, "band")}` : ""}${best ? `; the best is trial ${data.best}, at last ${number(best.y.at(-1))}` : ""}`;
  return html`<section class="curves" ref=${place} data-metric=${data.metric} data-shown=${data.shown}>
    ${!one && html`<h2>${data.metric}</h2>`}
    <${Lines} series=${series} bands=${bands} x=${title} y=${data.metric} log=${log} range=${limits} height=${one ? 470 : 270} label=${gist}
      zoom=${zoomOf(zoomed, title)} onzoom=${to => setZoomed(to ? [title, ...to.map(at => Number(at.toPrecision(6)))].join("~") : "", { push: true })}
      onpoint=${line => toggle(line.trial)} onbrush=${lines => lines.length && add(lines.map(line => line.trial))} sync=${one ? null : `curves ${name}`} />
    ${one ? html`<p class="quiet" role="status">${notes.join(" ")} <span class="hint">Click a line to select its trial; drag to zoom, double-click to see all again; with Shift, drag to select.</span></p>`
      : html`<p class="quiet" role="status">${notes[0]}</p>`}</section>`;
}

// What is drawn: [series, bands, title of the x-axis, legend].
function seriesOf(name, data, mine, chosen, weight) {
  const ends = [...data.bands, ...data.curves, ...mine?.curves ?? []].map(each => each.x.at(-1) ?? 0);
  const [divisor, title] = axisOf(data.along, Math.max(0, ...ends)), over = xs => divisor === 1 ? xs : xs.map(each => each === null ? null : each / divisor);
  const line = (curve, look) => ({ x: over(curve.x), y: curve.y, trial: curve.trial, label: `trial ${curve.trial}`, ...look });
  const selected = (mine?.curves ?? []).filter(each => chosen.has(each.trial)), picked = new Set(selected.map(each => each.trial));
  const others = data.curves.map((curve, at) => [curve, data.groups[data.group_of[at]]]).filter(([curve]) => !picked.has(curve.trial)).reverse();
  const bands = data.bands.map(band => ({ ...band, x: over(band.x), colour: data.groups[band.group].colour, label: data.groups[band.group].name, alpha: picked.size ? 0.6 : 1 }));
  const series = [
    ...others.filter(([curve]) => curve.trial !== data.best).map(([curve, group]) => line(curve, { colour: group.colour, width: 1.3, alpha: picked.size ? 0.3 : 0.7, group: group.name })),
    ...others.filter(([curve]) => curve.trial === data.best).map(([curve]) => line(curve, { colour: data.best_colour, width: 2.8, label: `trial ${curve.trial}, the best` })),
    ...selected.map(curve => line(curve, { colour: colourOf(name, curve.trial), dash: dashOf(name, curve.trial), width: 2.6, halo: true, label: `trial ${curve.trial}${curve.trial === data.best ? ", the best" : ""}` })),
  ];
  const entries = [
    ...data.groups.map(({ name: label, colour, trials }, at) => ({ label: `${label} (${count(trials)})`, colour, band: data.bands.some(band => band.group === at) })),
    ...series.filter(each => each.width > 2).map(({ label, colour, dash, trial }) => ({ label, colour, dash, href: address(name, trial) })),
  ];
  return { series: smoothed(series, weight), bands, title, entries };
}
