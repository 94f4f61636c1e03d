// The columns of tables of trials.

import { html } from "./lib/preact.js";
import { State } from "./parts.js";
import { ago, count, duration, metricName, number, shown } from "./values.js";

const MOST_HPARAMS = 12;  // shown before columns are chosen

const FIELDS = [
  { key: "state", label: "state", width: "150px", cell: it => html`<${State} trial state=${it.state} by=${it.ended_by} />` },
  { key: "batches", label: "batches", width: "95px", align: "end", cell: it => count(it.batches) },
  { key: "metric", label: "last", width: "110px", align: "end", cell: it => html`${number(it.metric)}${it.nan_since === null ? "" : html` <span class="nan">NaN since ${count(it.nan_since)}</span>`}` },
  { key: "best_metric", label: "best", width: "110px", align: "end", cell: it => html`<b>${number(it.best_metric)}</b>` },
  { key: "best_batches", label: "best at", title: "the batch of its best validation", width: "95px", align: "end", cell: it => it.best_batches === null ? "–" : count(it.best_batches) },
  { key: "duration", label: "time", width: "120px", align: "end", cell: it => duration(it.started && (it.ended ?? Date.now() / 1000) - it.started) },
  { key: "started", label: "started", width: "110px", cell: it => ago(it.started) },
  { key: "ended", label: "ended", width: "110px", cell: it => ago(it.ended) },
  { key: "restarts", label: "restarts", width: "95px", align: "end", cell: it => it.restarts },
  { key: "nan_since", label: "NaN since", title: "the batch since which a loss is NaN", width: "105px", align: "end", cell: it => it.nan_since === null ? "–" : count(it.nan_since) },
  { key: "code", label: "code", title: "the variant of the code that it runs", width: "120px", cell: it => it.code ?? "–" },
];
const FIRST = ["state", "batches", "metric", "best_metric"];

// A value that may be long: all of it when one points at it.
const clipped = value => html`<span title=${shown(value)}>${shown(value)}</span>`;
const isNumber = value => typeof value === "number";

// All columns that there are, and the keys of those that are shown unless others are chosen.
export function columnsOf(about) {
  const hparams = about.varying.map(name => ({ key: `hparams.${name}`, label: name, width: `${Math.min(Math.max(110, 40 + 7 * name.length), 240)}px`, align: isNumber(about.best_hparams?.[name]) ? "end" : "", cell: it => clipped(it.hparams[name]) }));
  const metrics = about.metrics.filter(name => name !== `validation.${about.metric}`).map(name => ({
    key: `metrics.${name}`, label: metricName(...name.split(/\.(.*)/s)), title: `the last ${name}`, width: "140px", align: "end", cell: it => number(it.metrics?.[name]),
  }));
  const others = about.objectives.filter(name => name !== about.metric).map(name => `metrics.validation.${name}`);
  const fields = FIELDS.map(each => each.key.endsWith("metric") ? { ...each, title: `the ${each.label} ${about.metric}` } : each);
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
