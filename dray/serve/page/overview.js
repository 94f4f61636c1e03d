// An experiment at a glance.

import { html } from "./lib/preact.js";
import { BestTrials, columnsOf } from "./columns.js";
import { Place, Trials, useFailures } from "./failures.js";
import { SAVED, experiment, useData } from "./data.js";
import { Figure } from "./figures.js";
import { Copy, Rows, Skeleton, Tiles, useNarrow, word } from "./parts.js";
import { ENDED } from "./states.js";
import { address, go } from "./url.js";
import { capital, clean, clock, count, duration, number, plural, shown, singular } from "./values.js";

const counted = states => Object.entries(states ?? {}).map(([state, times]) => `${count(times)} ${word(state, null, true)}`).join(", ");

export function Overview({ name, about }) {
  const { submitted, standing } = about, tags = [...(submitted?.tags ?? []), ...(about.labels ?? [])];
  return html`<${Sentence} name=${name} standing=${standing} />
    ${about.why && !standing?.sentence.includes(about.why) && html`<p class="trouble">${clean(about.why)}</p>`}
    ${about.unread && html`<p class="trouble">${clean(about.unread)}</p>`}
    ${about.diverged && html`<p class="trouble">${capital(clean(about.diverged))}.</p>`}
    ${about.stragglers && html`<p class="trouble">${capital(clean(about.stragglers))}.</p>`}
    ${(about.damaged ?? []).map(line => html`<p key=${line} class="trouble">${clean(line)}</p>`)}
    ${tags.length + (about.description ? 1 : 0) + (submitted?.notes ? 1 : 0) > 0 && html`<div class="notes">${tags.map(tag => html`<span key=${tag} class="tag">${tag}</span>`)}
      ${about.description && html`<p>${about.description}</p>`}${submitted?.notes && html`<p class="text">${submitted.notes}</p>`}</div>`}
    <${Tiles} tiles=${tilesOf(name, about)} />
    ${!SAVED && html`<${Failed} name=${name} about=${about} />`}
    ${!SAVED && html`<div class="columns"><${SoFar} name=${name} about=${about} /><${Leaders} name=${name} about=${about} /></div>`}
    <div class="columns"><${Best} name=${name} about=${about} /><${Search} about=${about} /></div>
    <${Repeats} name=${name} about=${about} />
    <${Searched} name=${name} />
    <${Alerts} alerts=${about.alerts} />
    ${about.path && html`<p class="quiet path stored">Stored in ${about.path}</p>`}`;
}

// The sentence that the command prints too, with links.
function Sentence({ name, standing }) {
  const parts = standing?.parts ?? [], best = /trial (\d+)/;
  const linked = ({ about, text }) => about === "failed" ? html`<a class="bad" href=${address(name, null, "failures")}>${text}</a>`
    : about === "best" && best.test(text) ? html`${text.split(best)[0]}<a href=${address(name, best.exec(text)[1])}>trial ${best.exec(text)[1]}</a>${text.slice(best.exec(text).index + best.exec(text)[0].length)}` : text;
  return html`<p class="standing" role="status">${parts.map((part, at) => html`${at > 0 && "; "}${linked(at ? part : { ...part, text: capital(part.text) })}`)}.</p>`;
}

function tilesOf(name, it) {
  const trial = it.best_trial ?? null, failed = it.states ? (it.states.ERRORED ?? 0) + (it.states.OUT_OF_MEMORY ?? 0) : it.failed;
  const live = it.state === "RUNNING" && it.last ? Math.max(0, Date.now() / 1000 - it.last) : 0;  // it is told by the journal's last event
  const tiles = [
    { value: number(it.best_metric), label: `best ${it.metric ?? ""}`, more: trial !== null && html`<a href=${address(name, trial)}>trial ${trial}</a>${it.repeats?.length ? `, ${it.best_by}` : ""}${it.lowest_trial !== null && html`, ${it.smaller_is_better ? "lowest" : "highest"} ${number(it.lowest_metric)} of <a href=${address(name, it.lowest_trial)}>trial ${it.lowest_trial}</a>`}` },
    { value: `${count(it.ended)} / ${count(it.total)}`, label: "trials ended", more: counted(it.states), bad: failed > 0 },
    { value: duration(it.ran_s + live), label: "time", more: it.began ? `since ${clock(it.began)}` : "" },
  ];
  if (it.usage) tiles.push({ value: it.usage, label: "budget", more: it.standing?.budget_left === null ? "" : `${Math.round(100 * it.standing.budget_left)}% left` });
  if (it.front?.length)
    tiles.splice(1, 0, { value: count(it.front.length), label: "on the Pareto front", more: html`trial ${it.front.slice(0, 6).map((each, at) => html`${at > 0 && ", "}<a href=${address(name, each)}>${each}</a>`)}${it.front.length > 6 && ", …"}` });
  if (it.submitted && !ENDED.includes(it.state)) {
    const { share, slots, waiting } = it.submitted;
    tiles.push({
      value: `${number(slots)} of ${number(it.status?.slots ?? 0)}`, label: "slots",
      more: `priority ${share.priority}, weight ${number(share.weight)}${share.max_slots === null ? "" : `, ${share.max_slots} at most`}${waiting ? `; ${plural(waiting, "trial")} waiting` : ""}`,
    });
  }
  return tiles;
}

const HISTORY_MS = 10_000, LEADERS = 5, MOST_HPARAMS = 3;
const NONE = { chosen: new Set(), looks: null };

// The best value so far; a click on a trial leads to it.
function SoFar({ name, about }) {
  const shows = about.curve.length > 1 && about.trials > 1;
  const { data } = useData(shows ? `${experiment(name)}/figures/history` : null, { every: about.state === "RUNNING" ? HISTORY_MS : 0, on: about.state, keep: true });
  const figure = data?.figures.history;
  if (!shows || data && !figure) return null;
  return html`<section aria-label="The best so far"><h2>The best so far</h2>
    ${figure ? html`<${Figure} figure=${figure} height=${240} picked=${{ ...NONE, choose: () => {}, toggle: trial => go(address(name, trial)) }} label="Best value of each trial, and best so far, over time" />`
      : html`<div style=${{ height: 240 }}><${Skeleton} rows=${5} /></div>`}</section>`;
}

function Leaders({ name, about }) {
  const { data } = useData(about.trials > 1 && about.best_trial !== null ? `${experiment(name)}/trials?sort=rank&limit=${LEADERS}` : null, { on: about.version, keep: true });
  const mean = trial => about.repeats.find(each => each.trial === trial)?.mean;  // which ranks it
  const { every } = columnsOf(about, name), keys = ["best_metric", ...useNarrow() ? [] : ["batches"], ...about.varying.slice(0, MOST_HPARAMS).map(each => `hparams.${each}`)];
  if (!data || data.trials.length < 2) return null;
  return html`<section><h2>${data.trials.length === LEADERS ? "The five best trials" : "The best trials"}</h2>
    <${BestTrials} name=${name} about=${about} trials=${data.trials.map(it => ({ ...it, best_metric: mean(it.trial) ?? it.best_metric }))} columns=${every.filter(each => keys.includes(each.key))} />
    <p><a href=${address(name, null, "trials")}>All ${plural(about.trials, "trial")}</a></p></section>`;
}

function Best({ name, about }) {
  const trial = about.best_trial ?? null;
  if (trial === null) return null;
  const place = SAVED ? quoted(about.path) : name;  // a report may be read elsewhere
  return html`<section aria-label="The best trial"><h2>Best: <a href=${address(name, trial)}>trial ${trial}</a></h2>
    <table aria-label="Its hyperparameters"><tbody>${Object.entries(about.best_hparams ?? {}).map(([key, value]) => html`<tr key=${key}><th scope="row">${clean(key)}</th><td>${clean(shown(value))}</td></tr>`)}</tbody></table>
    <p class="quiet">Its checkpoint, verified and copied here; its weights alone, for use without dray; or its trial in Python:</p>
    <${Copy} text="dray checkpoint download ${place} best" /><${Copy} text="dray checkpoint export ${place} best -o model" />
    <${Copy} text=${`dray.Result(${JSON.stringify(SAVED ? about.path : name)}).load_best_trial()`} /></section>`;
}

const quoted = text => /^[\w@%+=:,./-]+$/.test(text) ? text : `'${text.replaceAll("'", `'"'"'`)}'`;  // for a shell

// "1 epoch", "4 batches"
const length = (value, unit) => `${count(value)} ${value === 1 ? singular(unit) : unit}`;

// What the search does now: how many trials have come how far.
function Search({ about }) {
  const { rungs = [], search = "" } = about.standing ?? {}, most = Math.max(...rungs.map(each => each.reached)), paused = rungs.some(each => each.paused), running = rungs.some(each => each.running);
  const sum = of => about.repeats.reduce((sum, each) => sum + of(each), 0), reached = about.repeats?.length ? sum(each => each.seeds) : 0;
  const again = reached ? [{ name: "repeats", length: about.max_length, reached, running: sum(each => each.trials.length - each.seeds - each.failed), paused: 0 }] : [];
  const table = rungs.length > 1 && (most > 0 || running);
  if (!search && !table) return null;
  const heads = [about.searcher === "pbt" ? "generation" : "rung", "length", "reached by", running && "on their way", paused && "paused there"].filter(Boolean);
  return html`<section aria-label="The search"><h2>${about.state === "RUNNING" ? "The search now" : "How far trials came"}</h2>
    ${search && html`<p>${capital(search)}.</p>`}
    ${table && html`<div class="wide"><table class="rungs" aria-label="Rungs"><thead><tr>${heads.map(each => html`<th key=${each} scope="col">${each}</th>`)}</tr></thead>
      <tbody>${[...rungs.map((each, at) => ({ ...each, name: at + 1 })), ...again].map(each => html`<tr key=${each.name}><td>${each.name}</td><td>${length(each.length, about.unit)}</td>
        <td><span class="share"><i style=${{ width: `${100 * each.reached / Math.max(most, 1)}%` }} /></span> ${count(each.reached)}</td>
        ${running && html`<td>${each.running ? count(each.running) : "–"}</td>`}${paused && html`<td>${each.paused ? count(each.paused) : "–"}</td>`}</tr>`)}</tbody></table></div>`}</section>`;
}

// What it searches: the same as long as it lives.
function Searched({ name }) {
  const { data } = useData(`${experiment(name)}/config`);
  return data && html`<section aria-label="What is searched"><h2>What is searched</h2>
    <div class="columns"><dl>${data.facts.map(([fact, value], at) => html`<dt key=${at}>${fact}</dt><dd>${clean(value)}</dd>`)}</dl>
      <${Rows} label="Values of the hyperparameters" table=${[["hyperparameter", "values"], ...data.space]} /></div></section>`;
}

const MOST_CAUSES = 3;
function Failed({ name, about }) {
  const { data } = useFailures(name, about);
  if (!about.failures || !data) return null;
  const more = data.groups.length - MOST_CAUSES;
  return html`<section aria-label="What failed"><h2>What failed, and why</h2><ul class="causes">${data.groups.slice(0, MOST_CAUSES).map(group => html`
    <li key=${`${group.file} ${group.line} ${group.error}`}><b>${clean(group.error)}</b>${group.file && html` at <${Place} name=${name} group=${group} />`}<br /><span class="quiet">${plural(group.count, "failure")}: <${Trials} name=${name} group=${group} most=${6} /></span></li>`)}</ul>
    <p><a href=${address(name, null, "failures")}>${more > 0 ? `${plural(more, "other cause")}, with tracebacks` : "Tracebacks"}</a></p></section>`;
}

// What `notify:` has told people last.
const MOST_ALERTS = 5;
const Alerts = ({ alerts }) => alerts?.length > 0 && html`<section aria-label="Alerts"><h2>Alerts</h2><ul class="causes">${alerts.slice(-MOST_ALERTS).reverse().map(each => html`
  <li key=${`${each.time} ${each.text}`}><span class="quiet">${clock(each.time)}</span> ${clean(each.text)}${each.error && html` <span class="trouble">not sent: ${clean(each.error)}</span>`}</li>`)}</ul></section>`;

function Repeats({ name, about: it }) {
  if (!it.repeats?.length) return null;
  const ends = it.repeats.flatMap(each => [each.low ?? each.mean, each.high ?? each.mean]).filter(each => typeof each === "number");
  const [least, most] = [Math.min(...ends), Math.max(...ends)], at = value => most > least ? 100 * (value - least) / (most - least) : 50;
  const bar = each => typeof each.mean === "number" && html`<div class="interval" title=${each.text}>
    <i style=${{ left: `${at(each.low ?? each.mean)}%`, right: `${100 - at(each.high ?? each.mean)}%` }} /><b style=${{ left: `${at(each.mean)}%` }} /></div>`;
  const heads = ["trial", `${it.metric} over seeds, 95% interval`, "", "seeds", "difference from the best", "repeats"];
  return html`<section><h2>Trained again with other seeds</h2><p>${capital(it.repeats_summary)}.</p>
    <div class="wide"><table aria-label="Trained again with other seeds"><thead><tr>${heads.map(each => html`<th key=${each} scope="col">${each || html`<span class="hidden">interval</span>`}</th>`)}</tr></thead>
      <tbody>${it.repeats.map(each => html`<tr key=${each.trial}><td class="number"><a href=${address(name, each.trial)}>${each.trial}</a></td><td>${each.text}</td><td>${bar(each)}</td>
        <td>${each.seeds} of ${each.of}${each.failed ? `, ${each.failed} failed` : ""}</td><td>${each.difference_text}</td>
        <td>${each.trials.map((trial, place) => html`${place > 0 && ", "}<a href=${address(name, trial)}>${trial}</a>`)}</td></tr>`)}</tbody></table></div></section>`;
}
