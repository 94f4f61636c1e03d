// The columns of tables of trials.

import { html } from "./lib/preact.js";
import { State } from "./parts.js";
import { address } from "./url.js";
import { ago, alike, clean, count, duration, metricName, number, shown } from "./values.js";

const MOST_HPARAMS = 12;  // shown before columns are chosen

const after = value => /^-?\d+\.?(\d*)$/.exec(number(value))?.[1].length ?? NaN;  // the point

// A number whose point is below those of others, such as one that is known.
function Aligned({ value, other = 0.12345 }) {
  const mine = after(value), pad = Math.min(after(other) + 2, 8) - mine;
  return html`<span class="aligned" data-pad=${pad > 0 ? `${mine ? "" : "."}${"0".repeat(pad)}` : ""}>${number(value)}</span>`;
}

const FIELDS = [
  { key: "state", label: "state", width: "150px", cell: it => html`<${State} trial state=${it.state} by=${it.ended_by} />` },
  { key: "batches", label: "batches", width: "95px", align: "end", cell: it => count(it.batches) },
  { key: "metric", label: "last", width: "110px", align: "end", cell: (it, best) => html`${alike(it.metric, best)}${it.nan_since === null ? "" : html` <span class="nan">NaN since ${count(it.nan_since)}</span>`}` },
  { key: "best_metric", label: "best", width: "110px", align: "end", cell: (it, best) => html`<b>${alike(it.best_metric, best)}</b>` },
  { key: "best_batches", label: "best at", title: "the batch of its best validation", width: "95px", align: "end", cell: it => it.best_batches === null ? "–" : count(it.best_batches) },
  { key: "duration", label: "time", width: "120px", align: "end", cell: it => duration(it.started && (it.ended ?? Date.now() / 1000) - it.started) },
  { key: "started", label: "started", width: "110px", cell: it => ago(it.started) },
  { key: "ended", label: "ended", width: "110px", cell: it => ago(it.ended) },
  { key: "restarts", label: "restarts", width: "95px", align: "end", cell: it => it.restarts },
  { key: "nan_since", label: "NaN since", title: "the batch since which a loss is NaN", width: "105px", align: "end", cell: it => it.nan_since === null ? "–" : count(it.nan_since) },
  { key: "code", label: "code", title: "the variant of the code that it runs", width: "140px" },
];
const FIRST = ["state", "batches", "metric", "best_metric"];

// A value that may be long: all of it when one points at it.
const clipped = value => html`<span title=${shown(value)}>${shown(value)}</span>`;
const files = (all, most = 2) => all.length > most ? `${all.slice(0, most).join(", ")} and ${all.length - most} more` : all.join(", ");

// The code of single trials, by the files that it changes, and where several change the same ones, its name.
export function codeName(about, code) {
  const told = each => clean(files(about.variants[each] ?? [])), mine = told(code);
  return !mine ? code : Object.keys(about.variants).filter(each => told(each) === mine).length > 1 ? `${mine} (${code.slice(0, 4)})` : mine;
}

// All columns that there are, and the keys of those that are shown unless others are chosen.
export function columnsOf(about, name) {
  const hparam = name => {
    const best = about.best_hparams?.[name], isNumber = typeof best === "number";
    return { key: `hparams.${name}`, label: name, width: `${Math.min(Math.max(isNumber ? 120 : 110, 40 + 7 * name.length), 240)}px`, align: isNumber ? "end" : "",
      cell: ({ hparams: { [name]: value } }) => isNumber && !Number.isInteger(best) && typeof value === "number" ? html`<${Aligned} value=${value} other=${best} />` : clipped(value) };
  };
  const hparams = about.varying.map(hparam);
  const metrics = about.metrics.filter(name => name !== `validation.${about.metric}`).map(name => ({
    key: `metrics.${name}`, label: metricName(...name.split(/\.(.*)/s)), title: `the last ${name}`, width: "140px", align: "end", cell: it => html`<${Aligned} value=${it.metrics?.[name]} />`,
  }));
  const others = about.objectives.filter(name => name !== about.metric).map(name => `metrics.validation.${name}`);
  const code = it => it.code === null ? "–" : html`<a href=${address(name, null, "code", { variant: it.code, show: "changes" })} title=${it.code}>${codeName(about, it.code)}</a>`;
  const fields = FIELDS.map(each => each.key === "code" ? { ...each, cell: code }
    : each.key.endsWith("metric") ? { ...each, title: `the ${each.label} ${about.metric}`, cell: it => each.cell(it, about.best_metric) } : each);
  return {
    every: [...fields, ...metrics, ...hparams].map(each => ({ ...each, sort: true })),
    first: [...FIRST, ...metrics.map(each => each.key).filter(key => others.includes(key)), ...hparams.slice(0, MOST_HPARAMS).map(each => each.key)],
  };
}

export function Marks({ it, about }) {
  const marks = [
    it.trial === about.best_trial && ["★ best", `the best ${about.metric}`, "best"],
    it.trial !== about.best_trial && about.front?.includes(it.trial) && ["◆ front", "no trial is better in every objective"],
    it.repeat_of !== null && [`repeat of ${it.repeat_of}`, `trial ${it.repeat_of} again, with seed ${it.repeat}`],
    it.source_trial !== null && [`from ${it.source_trial}`, `began from the checkpoint of trial ${it.source_trial} at batch ${count(it.source_batches)}`],
  ].filter(Boolean);
  return marks.map(([text, title, kind = ""]) => html` <span key=${text} class="mark ${kind}" title=${title}>${text}</span>`);
}

// A table of the best trials.
export const BestTrials = ({ name, about, trials, columns }) => html`<div class="wide" tabindex="0"><table class="best-trials" aria-label="The best trials">
  <thead><tr><th scope="col">trial</th>${columns.map(each => html`<th key=${each.key} scope="col" title=${each.title} class=${each.align}>${each.label}</th>`)}</tr></thead>
  <tbody>${trials.map(it => html`<tr key=${it.trial}><td><a href=${address(name, it.trial)}>${it.trial}</a><${Marks} it=${it} about=${about} /></td>${columns.map(each => html`<td key=${each.key} class=${each.align}>${each.cell(it)}</td>`)}</tr>`)}</tbody></table></div>`;
