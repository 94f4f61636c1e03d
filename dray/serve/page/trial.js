// One trial: how it stands, its metrics, its use of the machine, checkpoints and logs.

import { html, useEffect, useMemo } from "./lib/preact.js";
import { axisOf, Scale, Smoothing } from "./curves.js";
import { experiment, useData } from "./data.js";
import { useKeys } from "./keys.js";
import { NotFound } from "./notfound.js";
import { Check, Copy, Crumbs, Empty, Select, Skeleton, State, Tabs, Tiles, Trouble, Waiting, lazy, useSeen } from "./parts.js";
import { Legend, Lines, finite, lost, smoothed, xOf } from "./plot.js";
import { useSelection } from "./selection.js";
import { LIVE } from "./states.js";
import { address, go, useParam } from "./url.js";
import { bytes, clean, clock, count, duration, metricName, number, plural, shown } from "./values.js";
import { askForkTrial, askStopTrial } from "./verbs.js";

const EVERY_MS = 3000, POINTS = 400;
const COLOURS = { training: "#2f86d1", validation: "#9a4fc4", best: "#d81b60", machine: "#12a07a" }, GREY = "#6f7d8f";
const PHASES = { starting: ["starting", "#e3a400"], training: ["training", "#12a07a"], data: ["waiting for data", "#7cc576"], validating: ["validating", "#2f86d1"], checkpointing: ["checkpointing", "#9a4fc4"], waiting: ["waiting for the search", "#d5493a"] };

const Logs = lazy(() => import("./logs.js").then(it => it.Log)), Changes = lazy(() => import("./code.js").then(it => it.Changes));

export function Trial({ name, trial, tab }) {
  const path = `${experiment(name)}/trials/${trial}`, { data: it, error } = useData(path, { every: EVERY_MS });
  const { has, toggle } = useSelection(name), to = step => address(name, trial + step, tab);
  const before = trial > 0, after = it && trial + 1 < it.trials;
  useEffect(() => { document.title = `trial ${trial} · ${name} · dray`; }, [name, trial]);
  useKeys([["[", "previous trial", () => before && go(to(-1))], ["]", "next trial", () => after && go(to(1))], ["x", "select the trial", () => toggle(trial)],
    ["f", "fork the trial", () => it?.submitted && it.checkpoints.length > 0 && askForkTrial(name, it)]]);
  const tabs = [["", "Overview"], ["metrics", "Metrics"], ["utilization", "Utilization"], ["checkpoints", "Checkpoints", it?.checkpoints.length], ["logs", "Logs"]];
  useKeys(tabs.map(([key, text], at) => [String(at + 1), text, () => go(address(name, trial, key))]));
  if (!tabs.some(([key]) => key === tab) || error?.status === 404) return html`<${NotFound} what=${error?.message ?? location.hash} name=${error?.message.includes("no trial") ? name : null} />`;
  const View = { "": Overview, metrics: Metrics, utilization: Utilization, checkpoints: Checkpoints, logs: Logs }[tab];
  return html`<${Crumbs} places=${[["Experiments", "#/"], [name, address(name)], ["trials", address(name, null, "trials")], [`trial ${trial}`]]} />
    <div class="top"><h1>Trial ${trial} ${it && html`<${State} state=${it.state} by=${it.ended_by ?? null} trial />`}</h1>
      <span class="neighbours"><label class="inline"><input type="checkbox" checked=${has(trial)} onchange=${() => toggle(trial)} /> selected</label>
        ${before && html`<a href=${to(-1)}>‹ trial ${trial - 1}</a>`} ${after && html`<a href=${to(1)}>trial ${trial + 1} ›</a>`}</span></div>
    <${Tabs} label="Views of the trial" tabs=${tabs} at=${tab} href=${key => address(name, trial, key)} />
    ${it ? html`<${View} key=${tab} name=${name} trial=${trial} path=${path} it=${it} />` : html`<${Waiting} error=${error} />`}`;
}

const label = each => metricName(each.kind, each.name);
const useMetrics = path => useData(`${path}/metrics?points=${POINTS}`, { every: EVERY_MS });

// ------------------------------------------------------------------ overview
function Overview({ name, trial, path, it }) {
  const { data: metrics } = useMetrics(path), ran = it.started ? (it.ended ?? Date.now() / 1000) - it.started : null;
  const tiles = [
    { value: number(it.best_metric), label: `best ${metrics?.metric ?? ""}`, more: [it.repeated && `${number(it.repeated.mean)}: mean of ${plural(it.repeated.runs, "seed")}`, it.rank !== null && `rank ${count(it.rank)} of ${count(it.of)}`].filter(Boolean).join("; ") },
    { value: number(it.metric), label: `last ${metrics?.metric ?? ""}`, more: it.nan_since === null ? "" : `NaN since batch ${count(it.nan_since)}`, bad: it.nan_since !== null },
    { value: count(it.batches), label: "batches", more: it.best_batches === null ? "" : `best at ${count(it.best_batches)}` },
    { value: duration(ran), label: "time", more: it.started ? `since ${clock(it.started)}${it.restarts ? `, ${plural(it.restarts, "restart")}` : ""}` : "not started" },
  ];
  const live = LIVE.includes(it.state);
  return html`<${Tiles} tiles=${tiles} />
    ${it.straggler && html`<p class="trouble">R${clean(it.straggler).slice(1)}.</p>`}
    ${it.submitted && (live || it.checkpoints.length > 0) && html`<p class="actions">
      ${live && html`<button class="danger" onclick=${() => askStopTrial(name, trial)}>Stop</button>`}
      ${it.checkpoints.length > 0 && html`<button onclick=${() => askForkTrial(name, it)}>Fork</button>`}</p>`}
    <${Lineage} name=${name} it=${it} />
    <div class="columns">
      <section><h2>Hyperparameters</h2><${Hparams} name=${name} it=${it} /></section>
      <section><h2>Last metrics</h2>${!metrics ? html`<${Skeleton} rows=${3} />` : !metrics.series.length ? html`<${Empty}>No metrics yet.<//>`
        : html`<table class="last" aria-label="Last metrics"><tbody>${metrics.series.map(each => html`<tr key=${label(each)}><th scope="row">${label(each)}</th><td>${number(each.values.at(-1))}</td>
          <td class="quiet">at batch ${count(each.batches.at(-1))}</td></tr>`)}</tbody></table>`}</section>
    </div>
    ${metrics?.series.length > 0 && searchedFirst(metrics)[0].of > 1 && html`<section><div class="top"><h2>Metrics</h2><a href=${address(name, trial, "metrics")}>all ${plural(metrics.series.length, "metric")}</a></div>
      <${Metric} each=${searchedFirst(metrics)[0]} trial=${trial} started=${metrics.started} along="batches" height=${300} /></section>`}
    ${it.failures.length > 0 && html`<section><h2>Failures</h2>${it.failures.map((each, at) => html`<details key=${at} open=${at === it.failures.length - 1}>
      <summary>${clock(each.time)}: ${clean(lastLine(each.error))}<span class="quiet"> · ${each.again ? "restarted" : `given up${each.why ? `: ${each.why}` : ""}`}</span></summary>
      <pre tabindex="0">${clean(each.error ?? "")}</pre></details>`)}</section>`}
    ${it.code !== null && html`<section><h2>Code</h2><p>What this trial changes in the experiment's code (${it.code}):</p>
      <${Changes} path=${`${experiment(name)}/variants/${encodeURIComponent(it.code)}`} /></section>`}`;
}

const lastLine = error => (error ?? "").trim().split("\n").at(-1) || "no reason given";

function Lineage({ name, it }) {
  const link = each => html`<a href=${address(name, each.trial)}>trial ${each.trial}</a>`, { ancestors, children, repeats } = it.lineage;
  const list = (all, more) => all.map((each, at) => html`${at > 0 && ", "}${link(each)}${more(each)}`);
  const at = each => each.batches === null ? "" : ` at batch ${count(each.batches)}`;
  const [source, ...earlier] = ancestors;
  return html`<div class="lineage">
    ${it.repeat_of !== null && html`<p>Repeat of ${link({ trial: it.repeat_of })}, seed ${it.repeat}.</p>`}
    ${source && html`<p>Forked from ${link(source)}${at(source)}${earlier.length > 0 && html`, itself forked from ${list(earlier, at)}`}.</p>`}
    ${children.length > 0 && html`<p>Forked into ${list(children, at)}.</p>`}
    ${repeats.length > 0 && html`<p>Trained again as ${list(repeats, each => `, seed ${each.seed}`)}.</p>`}</div>`;
}

// Beside those of the best trial, with what differs marked.
function Hparams({ name, it }) {
  const [all] = useParam("all"), best = it.best && it.best.trial !== it.trial ? it.best : null, mine = it.hparams, names = Object.keys({ ...mine, ...best?.hparams });
  if (!Object.keys(mine).length)
    return html`<${Empty}>${it.repeat_of !== null ? "Those of the trial that it repeats." : it.source_trial === null ? "Drawn when it starts." : "Its source's, except those that were set; shown when it starts."}<//>`;
  const differs = key => best && JSON.stringify(mine[key]) !== JSON.stringify(best.hparams[key]), rows = all === "1" || !best ? names : [...names.filter(differs), ...names.filter(key => !differs(key))];
  return html`${it.best?.trial === it.trial && html`<p class="quiet">This is the best trial.</p>`}
    <div class="wide"><table class="beside" aria-label="Hyperparameters">${best && html`<thead><tr><td></td><th scope="col">this trial</th><th scope="col"><a href=${address(name, best.trial)}>trial ${best.trial}</a>, the best</th></tr></thead>`}
    <tbody>${rows.map(key => html`<tr key=${key} class=${differs(key) ? "differs" : ""}><th scope="row">${key}</th><td>${shown(mine[key])}</td>
      ${best && html`<td>${differs(key) ? html`<span aria-label="differs">≠</span> ` : ""}${shown(best.hparams[key])}</td>`}</tr>`)}</tbody></table></div>`;
}

// ------------------------------------------------------------------ metrics
function searchedFirst({ metric, series }) {
  const place = each => each.kind !== "validation" ? 2 : each.name === metric ? 0 : 1;
  return [...series].sort((one, other) => place(one) - place(other));
}

function Metrics({ name, trial, path, it }) {
  const { data } = useMetrics(path), [along] = useParam("x", "batches"), [beside] = useParam("best");
  const best = it.best && it.best.trial !== trial ? it.best.trial : null;
  const { data: other } = useData(beside === "1" && best !== null ? `${experiment(name)}/trials/${best}/metrics?points=${POINTS}` : null, { every: 4 * EVERY_MS });
  if (!data) return html`<${Skeleton} />`;
  if (!data.series.length) return html`<${Empty}>No metrics yet.<//>`;
  const epochs = data.series.every(each => each.epochs.every(value => typeof value === "number"));
  const thin = Math.max(...data.series.map(each => each.of)) > POINTS;
  return html`<div class="controls"><${Select} name="x" label="along" options=${[["batches", "batches"], ...epochs ? [["epochs", "epochs"]] : [], ["time", "time since its start"]]} />
      <${Scale} /><${Smoothing} />${best !== null && html`<${Check} name="best" label=${`trial ${best}, the best, beside`} />`}</div>
    ${beside === "1" && best !== null && html`<${Legend} entries=${[{ label: `trial ${trial}`, colour: COLOURS.validation }, { label: `trial ${best}, the best`, colour: COLOURS.best, dash: [6, 4], href: address(name, best, "metrics") }]} />`}
    <div class="metric-grid">${searchedFirst(data).map(each => html`<${Metric} key=${label(each)} each=${each} trial=${trial} started=${data.started} along=${along === "epochs" && !epochs ? "batches" : along}
      other=${other && { ...other.series.find(one => one.kind === each.kind && one.name === each.name), trial: best, began: other.started }} sync=${`${name} ${trial}`} />`)}</div>
    <p class="quiet" role="status">${plural(data.series.length, "metric")}.${thin && ` Metrics with more than ${POINTS} points are thinned; spikes and NaN are kept.`} ${lost(data.series.map(each => ({ y: each.values })))}</p>`;
}

function Metric({ each, trial, started, along, other, sync, height = 210 }) {
  const [weight] = useParam("smooth", "0"), [scale] = useParam("scale"), [place, seen] = useSeen(), xs = xOf(each, along, started), positive = each.values.some(value => value > 0);
  const log = positive && (scale === "log" || (scale === "" && each.log)), [divisor, title] = axisOf(along, xs.at(-1)), over = values => finite(values).map(value => value === null ? null : value / divisor);
  const series = useMemo(() => smoothed([
    ...other?.values ? [{ x: over(xOf(other, along, other.began)), y: other.values, label: `trial ${other.trial}, the best`, colour: COLOURS.best, dash: [6, 4], width: 1.5 }] : [],
    { x: over(xs), y: each.values, label: `trial ${trial}`, colour: COLOURS[each.kind], width: 2 },
  ], Number(weight) || 0), [each, other?.values, along, weight]);
  const last = each.values.at(-1), gist = `${label(each)} along ${title}: ${plural(each.of, "point")}, at last ${number(last)}. ${lost(series)}`;
  return html`<section ref=${place} data-metric=${label(each)}><h2><span title=${label(each)}>${label(each)}</span> <span class="quiet">${number(last)}</span></h2>
    ${each.of === 1 && !other?.values ? null : seen ? html`<${Lines} series=${series} x=${title} y="" log=${log} height=${height} label=${gist} sync=${sync} />` : html`<div style=${{ height }} />`}</section>`;
}

// ------------------------------------------------------------------ utilization
const rough = value => Math.abs(value) >= 100 ? count(Math.round(value)) : number(Number(value.toPrecision(3)));
const brief = seconds => seconds < 1 ? `${Math.round(1000 * seconds)} ms` : seconds < 10 ? `${seconds.toFixed(1)} s` : duration(seconds);
function Utilization({ trial, path, it, name }) {
  const { data } = useData(`${path}/system`, { every: EVERY_MS });
  if (!data) return html`<${Skeleton} />`;
  if (!data.figures.length && !Object.keys(data.phases).length) return html`<${Empty}>Nothing yet: a trial tells of its machine every five seconds, and at its end.<//>`;
  const names = data.figures.map(each => each.name), total = Object.values(data.phases).reduce((sum, each) => sum + each, 0);
  return html`${total > 0 && html`<section class="phases"><h2>Where its time went</h2>
      <div class="share-bar" role="img" aria-label=${Object.entries(data.phases).map(([phase, seconds]) => `${PHASES[phase]?.[0] ?? phase} ${(100 * seconds / total).toFixed(0)}%`).join(", ")}>
        ${Object.entries(data.phases).map(([phase, seconds]) => html`<i key=${phase} style=${{ width: `${100 * seconds / total}%`, background: PHASES[phase]?.[1] ?? GREY }} />`)}</div>
      <div class="legend">${Object.entries(data.phases).map(([phase, seconds]) => html`<span key=${phase}><i style=${{ background: PHASES[phase]?.[1] ?? GREY }} />${PHASES[phase]?.[0] ?? phase} ${(100 * seconds / total).toFixed(1)}%, ${brief(seconds)}</span>`)}</div></section>`}
    <div class="metric-grid">${data.figures.map(each => html`<${Figure} key=${each.name} each=${each} started=${it.started} sync=${`machine ${name} ${trial}`} />`)}</div>
    <p class="quiet" role="status">${names.includes("gpu_memory_gb") && !names.includes("gpu_percent") && "The workers' GPUs do not tell their utilization. "}
      Of all its ranks and their loaders, while it had its workers${data.figures.some(each => each.of > each.values.length) && "; longer figures are thinned to 400 points, spikes are kept"}.</p>`;
}

function Figure({ each, started, sync }) {
  const xs = xOf(each, "time", started), [divisor, title] = axisOf("time", xs.at(-1)), unit = each.unit || each.label, last = rough(each.values.at(-1));
  const series = useMemo(() => [{ x: xs.map(at => at / divisor), y: each.values, label: each.label, colour: COLOURS.machine, width: 2 }], [each]);
  const top = Math.max(...each.values.filter(Number.isFinite)), range = useMemo(() => each.name.endsWith("percent") ? [0, 100] : [0, top > 0 ? top * 1.08 : 1], [each.name, top]);
  return html`<section data-figure=${each.name}><h2><span>${each.label}${each.unit && `, ${each.unit}`}</span> <span class="quiet">${last}</span></h2>
    ${each.of > 1 && html`<${Lines} series=${series} x=${title} y="" range=${range} height=${200} label=${`${each.label} over time, ${unit}: at last ${last}`} sync=${sync} />`}</section>`;
}

// ------------------------------------------------------------------ checkpoints
function Checkpoints({ name, trial, it }) {
  if (it.checkpoints_error) return html`<${Trouble}>${it.checkpoints_error}<//>`;
  if (!it.checkpoints.length) return html`<${Empty}>None: checkpoint_policy says when they are saved, and checkpoint_storage which are kept.<//>`;
  const total = it.checkpoints.reduce((sum, each) => sum + each.size, 0), mark = each => [each.batches === it.best_batches ? "best" : "", each.complete ? "" : "incomplete"].filter(Boolean).join(", ");
  return html`<p class="quiet" role="status">${plural(it.checkpoints.length, "checkpoint")}, ${bytes(total)}.</p>
    <div class="wide"><table class="checkpoints" aria-label="Checkpoints"><thead><tr>${["batches", "size", "", "path, and the command that downloads it"].map(each => html`<th scope="col">${each}</th>`)}</tr></thead>
    <tbody>${[...it.checkpoints].reverse().map(each => html`<tr key=${each.batches}><td>${count(each.batches)}</td><td>${bytes(each.size)}</td><td>${mark(each)}</td>
      <td class="path">${each.path}${each.complete && html`<${Copy} text=${`dray checkpoint download ${name} ${trial} --batches ${each.batches}`} />`}</td></tr>`)}</tbody></table></div>`;
}
