// The page: the frame around the views, and which one is shown.

import { html, render, useEffect, useState } from "./lib/preact.js";
import { Compare } from "./compare.js";
import { onTrouble, ROOT, useData } from "./data.js";
import { showHelp } from "./dialogs.js";
import { Experiment } from "./experiment.js";
import { useKeys } from "./keys.js";
import { List } from "./list.js";
import { NotFound } from "./notfound.js";
import { Queue } from "./queue.js";
import { all, clearAll, compareAddress } from "./selection.js";
import { SignIn } from "./signin.js";
import { Trial } from "./trial.js";
import { address, go, route, useRoute } from "./url.js";
import { duration, number, plural } from "./values.js";

const STATUS_MS = 10_000;

// What an address shows: [view, its properties].
function viewOf([first, name, third, fourth, fifth = "", ...more]) {
  if (first === undefined) return [List, {}];
  if (first === "queue" && name === undefined) return [Queue, {}];
  if (first === "compare" && name === undefined) return [Compare, {}];
  if (first === "e" && name && third === "t" && /^\d{1,9}$/.test(fourth ?? "") && !more.length) return [Trial, { name, trial: Number(fourth), tab: fifth }];
  if (first === "e" && name && third !== "t" && fourth === undefined) return [Experiment, { name, tab: third ?? "" }];
  return [NotFound, { what: location.hash }];
}

function up() {
  const { parts } = route();
  if (parts[0] === "e" && parts[2] === "t") go(address(parts[1], null, "trials"));
  else if (parts.length) go("#/");
}

// What is selected, in all experiments.
function Tray() {
  const found = all(), places = new Set(found.map(([name]) => name)).size;
  useKeys([["c", "compare the selected trials", () => found.length > 0 && go(compareAddress(found))]]);
  if (!found.length || location.hash.startsWith("#/compare")) return null;
  return html`<aside id="picked" aria-label="Selected trials">${plural(found.length, "trial")} selected${places > 1 ? ` in ${plural(places, "experiment")}` : ""}
    <a href=${compareAddress(found)}>Compare</a><button class="plain" onclick=${clearAll}>Clear</button></aside>`;
}

function App() {
  const { parts } = useRoute(), [trouble, setTrouble] = useState(null);
  const signedOut = trouble?.status === 401, { data: status } = useData(signedOut ? null : "/status", { every: STATUS_MS });
  useEffect(() => onTrouble(error => setTrouble(before => before?.message === error?.message ? before : error)), []);
  useKeys([["Escape", "leave the search; one level up", up], ["Enter", "open the row", () => false], ["q", "the queue", () => go("#/queue")], ["?", "this help", showHelp]]);
  const [View, properties] = viewOf(parts);
  return html`<header class="bar">
      <a class="brand" href="#/"><img src=${`${ROOT}static/icon.svg`} alt="" width="20" height="20" />dray</a>
      <nav aria-label="Views"><a href="#/" aria-current=${View === List ? "page" : null}>Experiments</a>
        <a href="#/queue" aria-current=${View === Queue ? "page" : null}>Queue</a></nav>
      <span id="server" class="quiet" title=${status && `dray ${status.version} on ${status.cluster}, up for ${duration(Date.now() / 1000 - status.since)}; results in ${status.results}`}>
        ${status && (status.slots ? `${number(status.busy)} of ${number(status.slots)} slots busy` : status.cluster)}</span>
      <span id="trouble" role="status">${trouble && !signedOut && ![404, 409].includes(trouble.status) && (trouble.status ? trouble.message : "The server does not answer; trying again.")}</span>
      <button id="help" class="plain" aria-label="Keyboard shortcuts" onclick=${showHelp}>?</button>
    </header>
    <main id="main" tabindex="-1">${signedOut ? html`<${SignIn} done=${() => setTrouble(null)} />` : html`<${View} key=${[View.name, properties.name, properties.trial].join()} ...${properties} />`}</main>
    <${Tray} key=${location.hash} />`;
}

render(html`<${App} />`, document.getElementById("app"));
