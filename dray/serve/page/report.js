// The report: all that an experiment's views show, in one document that needs no server.

import { html, render } from "./lib/preact.js";
import { Analysis } from "./analysis.js";
import { BestTrials, columnsOf } from "./columns.js";
import { Curves } from "./curves.js";
import { SAVED, experiment, useData } from "./data.js";
import { Failures } from "./failures.js";
import { Overview } from "./overview.js";
import { State } from "./parts.js";
import { clean, clock } from "./values.js";

function Report({ name }) {
  const path = experiment(name), { data: about } = useData(path), { data: { config } } = useData(`${path}/config`), { data: { at } } = useData(`${path}/figures/slots`);
  return html`<main>
    <div class="frame"><h1>${about.title}</h1><${State} state=${about.state} why=${about.why ?? about.reason} /></div>
    <p class="quiet">${about.began && `Created ${clock(about.began)}. `}As of ${clock(at)}.</p>
    <${Overview} name=${name} about=${about} />
    <${Best} name=${name} path=${path} about=${about} />
    <section><h2>Learning curves</h2><${Curves} name=${name} /></section>
    <section><${Analysis} name=${name} about=${about} /></section>
    <section><h2>Failures</h2><${Failures} name=${name} about=${about} /></section>
    <section><h2>Config</h2><details><summary>experiment.yaml, with all defaults</summary><pre tabindex="0">${clean(config)}</pre></details></section>
    <p class="quiet">Written by dray ${SAVED.dray}.</p></main>`;
}

const MORE = ["best_batches", "code"];  // columns beside those that the page's table has at first

function Best({ name, path, about }) {
  const { data: { trials } } = useData(`${path}/trials?sort=rank`), { every, first } = columnsOf(about, name);
  const columns = every.filter(each => first.includes(each.key) || MORE.includes(each.key) && trials.some(it => it[each.key] !== null));
  return trials.length > 1 && html`<section><h2>The ${trials.length} best</h2><${BestTrials} name=${name} about=${about} trials=${trials} columns=${columns} /></section>`;
}

render(html`<${Report} name=${SAVED.name} />`, document.getElementById("app"));
