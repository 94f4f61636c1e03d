// What failed and why: failures by their cause, with the line of the user's code.

import { html } from "./lib/preact.js";
import { SAVED, experiment, useData } from "./data.js";
import { Empty, Waiting } from "./parts.js";
import { address } from "./url.js";
import { clean, clock, count, plural } from "./values.js";

const FEW = 12;

// They are read again when there are more.
export const useFailures = (name, about) =>
  useData(about.failures ? `${experiment(name)}/failures` : null, { keep: true, on: about.failures });

// The line of the user's code, which leads to it.
export const Place = ({ name, group }) => group.file && html`<a href=${address(name, null, "code", { file: group.file, line: group.line })}>${clean(group.file)}:${group.line}</a>${group.function && ` in ${clean(group.function)}`}`;

export const Trials = ({ name, group, most = FEW }) => html`${group.trials.slice(0, most).map(([trial, times], at) => html`${at > 0 && ", "}<a href=${address(name, trial)}>${at === 0 ? "trial " : ""}${trial}</a>${times > 1 ? ` ${count(times)}×` : ""}`)}${group.num_trials > most ? ` and ${count(group.num_trials - most)} more` : ""}`;

const outcome = group => [
  group.restarted ? `restarted ${plural(group.restarted, "time")}` : "", group.given_up ? `given up ${plural(group.given_up, "time")}` : "",
  group.kept.length ? `in the extension, so still ${group.kept.join(" or ").toLowerCase()}` : "",
].filter(Boolean).join(", ");

const when = ({ first, last }) => !first ? "" : clock(first) === clock(last) ? clock(last) : `${clock(first)} to ${clock(last)}`;

export function Failures({ name, about }) {
  const { data, error } = useFailures(name, about);
  if (!about.failures) return html`<${Empty}>No trial has failed.</${Empty}>`;
  if (!data) return html`<${Waiting} error=${error} />`;
  const several = data.groups.length > 1 ? `, with ${count(data.groups.length)} causes` : "";
  return html`<p class="quiet">${plural(data.failures, "failure")}${several}. A trial that fails is restarted from its last checkpoint, up to max_restarts times.</p>
    ${data.groups.map((group, at) => html`<article key=${`${group.file} ${group.line} ${group.error}`} class="failure">
      <h2><span class="times">${count(group.count)}×</span> ${clean(group.error)}</h2>
      ${group.file && html`<p><${Place} name=${name} group=${group} /></p>${group.code && html`<pre>${clean(group.code)}</pre>`}`}
      <p><${Trials} name=${name} group=${group} /></p>
      <p class="quiet">${[outcome(group), when(group), group.batches === null ? "" : `last after ${plural(group.batches, "batch").replace("batchs", "batches")}`].filter(Boolean).join(" · ")}</p>
      ${group.why && html`<p class="quiet">Last given up because ${clean(group.why)}.</p>`}
      <details open=${data.groups.length === 1}><summary>Traceback of trial ${group.trials[0][0]}${group.count > 1 ? ", the last" : ""}</summary><pre tabindex="0">${clean(group.traceback)}</pre></details>
      ${!SAVED && html`<p><a href=${address(name, group.trials[0][0], "logs")}>Log of trial ${group.trials[0][0]}</a></p>`}
    </article>`)}`;
}
