// One experiment: its frame, with tabs. Each tab is loaded when it is first shown.

import { html, useEffect, useState } from "./lib/preact.js";
import { experiment, send, useData } from "./data.js";
import { ask, say } from "./dialogs.js";
import { useKeys } from "./keys.js";
import { Menu } from "./menu.js";
import { NotFound } from "./notfound.js";
import { Overview } from "./overview.js";
import { Crumbs, Empty, State, Tabs, Waiting, lazy } from "./parts.js";
import { askShare } from "./share.js";
import { ENDED } from "./states.js";
import { address, go } from "./url.js";
import { VERBS, allowed, askExtend, askFork, askNotes, askVerb, refusal } from "./verbs.js";

const FIRST_MS = 2500, QUIET = 4;
const TABS = {
  "": ["Overview", Overview],
  trials: ["Trials", lazy(() => import("./trials.js").then(it => it.Trials))],
  curves: ["Curves", lazy(() => import("./curves.js").then(it => it.Curves))],
  analysis: ["Analysis", lazy(() => import("./analysis.js").then(it => it.Analysis))],
  failures: ["Failures", lazy(() => import("./failures.js").then(it => it.Failures))],
  logs: ["Logs", lazy(() => import("./logs.js").then(it => it.Log))],
  code: ["Config and code", lazy(() => import("./code.js").then(it => it.Code))],
};

export function Experiment({ name, tab }) {
  const [every, setEvery] = useState(FIRST_MS);
  const { data: about, error } = useData(experiment(name), { every }), { data: me } = useData("/token");
  useEffect(() => { TABS[tab]?.[1]?.load?.(); }, [tab]);  // while the server reads the experiment
  const best = about?.best_trial ?? null;
  useKeys([...Object.entries(TABS).map(([key, [label]], at) => [String(at + 1), label, () => go(address(name, null, key))]),
    ["b", "the best trial", () => best !== null && go(address(name, best))]]);
  useEffect(() => { document.title = `${about?.title ?? name} · dray`; }, [about?.title]);
  const pace = about?.pace ? 1000 * about.pace * (about.verbs.includes("delete") ? QUIET : 1) : FIRST_MS;
  useEffect(() => setEvery(pace), [pace]);
  if (!Object.hasOwn(TABS, tab)) return html`<${NotFound} what=${`An experiment has no tab ${tab}.`} />`;
  if (error?.status === 404) return html`<${NotFound} what=${error.message} />`;
  const [, View] = TABS[tab], crumbs = html`<${Crumbs} places=${[["Experiments", "#/"], [`${about?.number ? `#${about.number} ` : ""}${name}`]]} />`;
  if (!about) return html`${crumbs}<h1>${name}</h1><${Waiting} error=${error?.status && error} />`;
  return html`${crumbs}
    <div class="frame"><h1>${about.title}</h1><${State} state=${about.state} why=${about.why ?? about.reason} />${me && html`<${Actions} name=${name} about=${about} me=${me} />`}</div>
    <${Tabs} label="Views of the experiment" at=${tab} href=${key => address(name, null, key)}
      tabs=${Object.entries(TABS).map(([key, [label]]) => [key, label, key === "failures" ? about.failures : 0])} />
    ${about.states || ["", "code"].includes(tab) ? html`<${View} key=${tab} name=${name} about=${about} me=${me} />` : html`<${Empty}>It has not begun.<//>`}`;
}

// What one may do with it: by its state, and by the scope of one's token.
function Actions({ name, about, me }) {
  const { submitted } = about, owner = submitted?.owner, mine = me.scope === "operate" || (me.scope === "submit" && owner === me.name);
  const button = (label, act, danger = false) => html`<button key=${label} class=${danger ? "danger" : ""} onclick=${act}>${label}</button>`;
  const fork = button("Fork", () => askFork(name, about.title).catch(error => say(error.message)));
  if (!mine) {
    const may = me.scope === "submit" ? "change only what it has submitted" : "only look";
    return html`<div class="actions">${me.scope === "submit" && fork}<span class="quiet">${owner && `Submitted by ${owner}. `}Your token, ${me.name}, may ${may}.</span></div>`;
  }
  const can = allowed(about, me), verb = each => can.includes(each) && button(VERBS[each][0], () => askVerb(name, each).catch(error => say(error.message)), VERBS[each][1]);
  return html`<div class="actions">
    ${["stop", "pause", "activate"].map(verb)}
    ${submitted && !refusal(about, "extend", me) && button("Extend", () => askExtend(about))}
    ${fork}
    <${Menu} kind="verbs" title="More" label="What else can be done">
      ${submitted && !ENDED.includes(about.state) && button("Share…", () => askShare(about))}
      ${submitted && button("Tags and notes", () => askNotes(about))}
      ${me.scope === "operate" && button("TensorBoard, optuna-dashboard", () => ask({ title: "TensorBoard and optuna-dashboard", yes: "Close", body: html`<${Boards} name=${name} />` }))}
      ${["kill", "delete"].map(verb)}<//>
    ${!submitted && html`<span class="quiet">${about.state === "RUNNING" ? "Not submitted to this server: the command that runs it can stop it." : "Run by a command, not by this server."}</span>`}</div>`;
}

// Pages of other programs, which the server starts.
function Boards({ name }) {
  const [found, set] = useState(null), [trouble, setTrouble] = useState("");
  useEffect(() => { send("POST", `${experiment(name)}/boards`).then(set, error => setTrouble(error.message)); }, []);
  const link = (label, to, why) => html`<p>${to ? html`<a href=${to} target="_blank" rel="noreferrer">${label}</a>` : `${label} ${why}.`}</p>`;
  return html`<div role="status">${trouble || (found ? html`${link("TensorBoard", found.tensorboard, "can't be started")}${link("optuna-dashboard", found.optuna_dashboard, "is not installed")}` : "Starting both …")}</div>
    <p class="quiet">They listen on the server's own machine: from elsewhere, forward their ports with ssh -L.</p>`;
}
