// Trials of one or several experiments side by side: their metrics, values, configs and code.

import { html, useEffect, useMemo, useState } from "./lib/preact.js";
import { Smoothing, axisOf } from "./curves.js";
import { Poll, Refused, experiment, get, useData } from "./data.js";
import { Diff } from "./lines.js";
import { Check, Crumbs, Empty, Select, Skeleton, State } from "./parts.js";
import { label as labelOf, named, useLabels } from "./names.js";
import { Lines, smoothed, xOf } from "./plot.js";
import { MOST_COMPARED, Swatch, colourOf, dashOf, pick } from "./selection.js";
import { LIVE } from "./states.js";
import { address, go, useRoute } from "./url.js";
import { capital, count, duration, metricName, number, plural, shown } from "./values.js";

const EVERY_MS = 5000, POINTS = 400, MOST_PLOTS = 6;
const ALONG = ["batches", "epochs", "time"];

// ------------------------------------------------------------------ data
// Of each trial its fields (`about`), its metrics, and what differs from the first (`text`); or an `error`.
function useTrials(asked) {
  const [found, setFound] = useState({}), key = JSON.stringify(asked);
  useEffect(() => {
    let known = [];
    const poll = new Poll(async signal => {
      const ask = async ([name, trial], at) => {
        if (known[at]?.about && !LIVE.includes(known[at].about.state)) return known[at];
        const path = `${experiment(name)}/trials/${trial}`, [first, a] = asked[0];
        const against = `${experiment(first)}/comparison?${new URLSearchParams({ a, b: trial, ...name === first ? {} : { with: name } })}`;
        try {
          const [about, { metric, series }] = await Promise.all([get(path, signal), get(`${path}/metrics?points=${POINTS}`, signal)]);
          const text = at && await get(against, signal).then(it => it.text, error => error.message);  // it may not have validated
          return { name, trial, about, metric, series, text };
        } catch (error) {
          if (error.status === 404) return { name, trial, error };
          throw error;
        }
      };
      const now = await Promise.all(asked.map(ask));
      if (now.some((each, at) => !known[at] || each.about !== known[at].about || each.series !== known[at].series)) setFound({ key, trials: now });
      known = now;
    }, EVERY_MS);
    return () => poll.stop();
  }, [key]);
  return found.key === key ? found.trials : null;
}

// The metrics of all trials, the searcher's first: [name, series for each trial that has it], over batches, epochs or time.
function metricsOf(trials, along, label) {
  const found = new Map(), first = metricName("validation", trials[0]?.metric ?? "");
  for (const each of trials)
    for (const series of each.series) {
      const name = metricName(series.kind, series.name);
      if (!found.has(name)) found.set(name, []);
      found.get(name).push({
        x: xOf(series, along, each.about.started), y: series.values, label: label(each),
        log: series.log, colour: colourOf(each.name, each.trial), dash: dashOf(each.name, each.trial), width: 2, trial: each.trial,
      });
    }
  const order = name => `${name === first ? 0 : name.startsWith("validation") ? 1 : 2}${name}`;
  return [...found].sort(([one], [other]) => order(one) < order(other) ? -1 : 1);
}

// ------------------------------------------------------------------ parts
function Plots({ trials, label }) {
  const { params } = useRoute(), along = ALONG.find(each => each === params.get("x")) ?? "batches", [all, setAll] = useState(false);
  const weight = Math.min(Math.max(Number(params.get("smooth")) || 0, 0), 0.999);
  const [plots, unit] = useMemo(() => {
    const every = metricsOf(trials, along, label), most = Math.max(...every.flatMap(([, lines]) => lines.flatMap(({ x }) => x.at(-1) ?? 0)), 0);
    const [divisor, unit] = axisOf(along, most);
    return [every.map(([name, lines]) => [name, smoothed(lines.map(each => ({ ...each, x: each.x.map(x => x / divisor) })), weight)]), unit];
  }, [trials, along, weight, trials.map(label).join()]);
  if (!plots.length) return html`<${Empty}>No metrics yet.</${Empty}>`;
  return html`<div class="controls">
      <${Select} name="x" label="along" options=${ALONG.map(each => [each, each])} />
      <${Select} name="scale" label="scale" options=${[["", "automatic"], ["log", "logarithmic"], ["all", "linear"]]} /><${Smoothing} /></div>
    <div class="grid plots">${plots.slice(0, all ? Infinity : MOST_PLOTS).map(([name, lines]) => html`
      <${Lines} key=${name} series=${lines} x=${unit} y=${name} log=${params.get("scale") === "log" || params.get("scale") !== "all" && lines.every(each => each.log)} height=${240} sync="compare" label=${`${name} of ${plural(trials.length, "trial")}`} />`)}</div>
    ${plots.length > MOST_PLOTS && html`<button onclick=${() => setAll(!all)}>${all ? "Fewer metrics" : `All ${plots.length} metrics`}</button>`}`;
}

// A trial's line, its link, and a button that takes it away.
const Name = ({ it, label, drop }) => html`<span class="named"><${Swatch} name=${it.name} trial=${it.trial} /><a href=${address(it.name, it.trial)} title=${label(it)}>${label(it)}</a>
  <button class="plain drop" aria-label=${`Remove ${label(it)}`} title="Remove" onclick=${() => drop(it)}>×</button></span>`;

// [name, what is shown, whether the row is left out where all have the same].
const FACTS = [
  ["state", it => html`<${State} trial state=${it.about.state} by=${it.about.ended_by} />`], ["metric", it => it.metric, true], ["best", it => number(it.about.best_metric)],
  ["last", it => number(it.about.metric)], ["rank", it => it.about.rank === null ? "–" : `${count(it.about.rank)} of ${count(it.about.of)}`],
  ["batches", it => count(it.about.batches)], ["time", it => duration(it.about.started && (it.about.ended ?? Date.now() / 1000) - it.about.started)],
  ["restarts", it => count(it.about.restarts), true], ["code", it => it.about.code ? html`<a href=${address(it.name, null, "code", { variant: it.about.code, show: "changes" })} title=${it.about.code}>changed</a>` : "the experiment's own", true],
];

function Values({ trials, label, drop }) {
  const { params } = useRoute(), onlyDiffering = params.get("only") === "1";
  const names = [...new Set(trials.flatMap(each => Object.keys(each.about.hparams)))];
  const text = (each, name) => name in each.about.hparams ? shown(each.about.hparams[name]) : "–";
  const differs = name => new Set(trials.map(each => text(each, name))).size > 1;
  const facts = FACTS.filter(([, show, may]) => !may || new Set(trials.map(show)).size > 1);
  const same = names.filter(name => !differs(name)).length;
  return html`<div class="controls"><${Check} name="only" label="only what differs" /><span>${trials.length > 1 && `${plural(names.length - same, "hyperparameter")} of ${count(names.length)} differ${names.length - same === 1 ? "s" : ""}, marked.`}</span></div>
    <div class="wide"><table class="compare" aria-label="Trials compared"><thead><tr><td />${trials.map(each => html`<th key=${label(each)} scope="col"><${Name} it=${each} label=${label} drop=${drop} /></th>`)}</tr></thead>
      <tbody>${facts.map(([name, show]) => html`<tr key=${name}><th scope="row">${name === "best" && !facts.some(([each]) => each === "metric") ? `best ${trials[0].metric}` : name}</th>${trials.map(each => html`<td key=${label(each)}>${show(each)}</td>`)}</tr>`)}
        ${names.filter(name => !onlyDiffering || differs(name)).map(name => html`<tr key=${`hparam ${name}`} class=${differs(name) ? "differs" : ""}><th scope="row">${name}</th>
          ${trials.map(each => html`<td key=${label(each)} title=${text(each, name)}><span class="clip">${text(each, name)}</span></td>`)}</tr>`)}</tbody></table></div>`;
}

function Difference({ one, other, label }) {
  const [open, setOpen] = useState(false), side = { with: other.name, a_trial: one.trial, b_trial: other.trial };
  const { data, error } = useData(open ? `${experiment(one.name)}/difference?${new URLSearchParams(side)}` : null);
  const fields = data ? [...data.config, ...data.versions, ...data.data] : [], value = (each, at) => at in each ? shown(each[at]) : "–";
  return html`<details ontoggle=${event => setOpen(event.target.open)}><summary>Config and code: ${label(one)} and ${label(other)}</summary>
    ${error ? html`<p class="trouble">${error.message}</p>` : !data ? open && html`<${Skeleton} rows=${3} />` : html`
      ${fields.length ? html`<div class="wide"><table aria-label="Differences of the configs"><thead><tr><th scope="col">field</th><th scope="col">${label(one)}</th><th scope="col">${label(other)}</th></tr></thead>
        <tbody>${fields.map(each => html`<tr key=${each.path}><th scope="row">${each.path}</th><td class="path">${value(each, "a")}</td><td class="path">${value(each, "b")}</td></tr>`)}</tbody></table></div>`
        : html`<p class="quiet">The configs are the same.</p>`}
      ${data.diff ? html`<${Diff} text=${data.diff} more=${data.more} />` : html`<p class="quiet">The code is the same.</p>`}`}</details>`;
}

// "digits-1 12", "digits-1", or "12" for a trial of the first experiment.
async function meant(text, asked, experiments) {
  const named = experiments.find(each => each.name === text), [, before = text, trial] = named ? [] : /^(.*?)[\s:]*(\d{1,9})$/.exec(text) ?? [];
  if (!before && asked.length) return [asked[0][0], Number(trial)];
  const exact = name => experiments.find(each => each.name === name) ?? experiments.findLast(each => each.title === name);
  const it = exact(text) ?? exact(before) ?? experiments.findLast(each => each.name.includes(text));
  if (!it) throw new Refused(404, { error: `there is no experiment ${text.slice(0, 80)}` });
  if (trial !== undefined && it.name !== text) return [it.name, Number(trial)];
  const { best_trial: best } = await get(experiment(it.name));
  if (best === null) throw new Refused(404, { error: `${it.name} has no best trial yet; give a number too: ${it.name} 0` });
  return [it.name, best];
}

function Add({ asked, add }) {
  const [focused, setFocused] = useState(false), [trouble, setTrouble] = useState(""), { data } = useData(focused ? "/experiments" : null);
  const submit = async event => {
    event.preventDefault();
    const input = event.target.elements.trial, text = input.value.trim();
    if (!text) return;
    try {
      const [name, trial] = await meant(text, asked, (data ?? await get("/experiments")).experiments);
      if (asked.some(each => each[0] === name && each[1] === trial)) throw new Refused(409, { error: `trial ${trial} of ${name} is here already` });
      await get(`${experiment(name)}/trials/${trial}`);
      input.value = "";
      setTrouble("");
      add([name, trial]);
    } catch (error) {
      setTrouble(error.message);
    }
  };
  return html`<form class="add" onsubmit=${submit}>
    <input name="trial" type="search" list="experiments" autocomplete="off" aria-label="Add a trial" placeholder="Add NAME, or NAME 12" onfocus=${() => setFocused(true)} />
    <datalist id="experiments">${(data?.experiments ?? []).filter(each => each.best_trial !== null).map(each => html`<option key=${each.name} value=${each.name}>${each.title}: ${number(each.best_metric)}</option>`)}</datalist>
    <button type="submit">Add</button> <span class="trouble" role="alert">${trouble}</span></form>`;
}

// ------------------------------------------------------------------ the view
export function Compare() {
  const { params } = useRoute();
  const given = params.getAll("t").map(each => /^(\d{1,9}):(.+)$/s.exec(each)).filter(Boolean).map(([, trial, name]) => [name, Number(trial)]);
  const asked = given.slice(0, MOST_COMPARED), of = Math.max(given.length, Number(params.get("of")) || 0), found = useTrials(asked);
  const several = new Set(asked.map(([name]) => name)).size > 1, label = ({ name, trial }) => several ? `${trial} of ${labelOf(name)}` : `trial ${trial}`;
  useLabels(several ? asked.map(([name]) => name) : []);
  useEffect(() => { document.title = "Compare · dray"; }, []);
  const show = (trials, [name, trial], on) => {
    const query = new URLSearchParams([...trials.map(each => ["t", `${each[1]}:${each[0]}`]), ...[...params].filter(([key]) => !["t", "of"].includes(key))]);
    pick(name, trial, on);
    go(`#/compare?${query}`);
  };
  const drop = it => show(given.filter(([name, trial]) => name !== it.name || trial !== it.trial), [it.name, it.trial], false);
  const trials = useMemo(() => (found ?? []).filter(each => !each.error), [found]), lost = (found ?? []).filter(each => each.error), [first] = trials;
  const differing = trials.slice(1).filter(each => each.name !== first.name || each.about.code !== first.about.code);
  return html`<${Crumbs} places=${[["Experiments", "#/"], ["compare"]]} />
    <div class="top"><h1>Compare</h1>${asked.length < MOST_COMPARED && html`<${Add} asked=${asked} add=${it => show([...given, it], it, true)} />`}</div>
    ${of > asked.length && html`<p class="quiet" role="status">The first ${MOST_COMPARED} of ${plural(of, "trial")}.</p>`}
    ${lost.map(each => html`<p key=${label(each)} class="trouble">${each.error.message} <button class="plain" onclick=${() => drop(each)}>Remove</button></p>`)}
    ${!asked.length ? html`<${Empty}>Select trials in the tables of experiments, with their boxes or with x; or add some here.</${Empty}>`
      : !found ? html`<${Skeleton} rows=${10} />` : trials.length > 0 && html`
    <section><h2>Metrics</h2><ul class="legend">${trials.map(each => html`<li key=${label(each)}><${Name} it=${each} label=${label} drop=${drop} /></li>`)}</ul>
      <${Plots} trials=${trials} label=${label} /></section>
    <section><h2>Values</h2><ul class="differences">${trials.filter(each => each.text && !found[0].error).map(each => html`<li key=${label(each)}>${capital(named(each.text))}.</li>`)}</ul>
      <${Values} trials=${trials} label=${label} drop=${drop} /></section>
    ${differing.length > 0 && html`<section><h2>Config and code</h2>${differing.map(each => html`<${Difference} key=${label(each)} one=${first} other=${each} label=${label} />`)}</section>`}`}`;
}
