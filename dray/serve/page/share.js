// What a change of an experiment's place or share would do, shown before it is done.

import { html, useState } from "./lib/preact.js";
import { experiment, Refused, send, useData } from "./data.js";
import { ask, say } from "./dialogs.js";
import { label, named, useLabels } from "./names.js";
import { number } from "./values.js";

const EVERY_MS = 4000;
const PATIENCE = 60;  // how often to look for the answer about what was typed last
const FIELDS = { priority: "priority", weight: "weight", max_slots: "most slots" };

// `found.current` is the answer for what is shown; see `GET /queue/preview`.
export function Preview({ query, found, entries }) {
  const { data, error, fresh } = useData(`/queue/preview?${query}`, { every: EVERY_MS, keep: true });
  useLabels([...entries.map(each => each.name), ...data?.order ?? []]);
  found.current = fresh && !error ? data : null;
  const share = Object.fromEntries(entries.map(each => [each.name, each.share]));
  const changes = Object.entries(data?.changes ?? {}).flatMap(([name, change]) => Object.entries(change).map(
    ([field, value]) => `${label(name)}: ${FIELDS[field]} ${number(share[name]?.[field] ?? "no limit")} → ${number(value ?? "no limit")}`));
  return html`<div class="preview" role="status" aria-live="polite">
    ${error?.status ? html`<p class="trouble">${error.message}</p>` : !data ? html`<p class="quiet">Asking the server what this does…</p>` : html`
    <ul>${data.lines.map(line => html`<li key=${line}>${named(line)}</li>`)}</ul>
    ${changes.length > 0 && html`<p class="quiet">${changes.join("; ")}</p>`}
    ${data.refused && html`<p class="trouble">Not allowed: ${data.refused}</p>`}`}</div>`;
}

// Carries out what was previewed.
async function apply(found) {
  for (let tries = 0; tries < PATIENCE && !found.current; tries++) await new Promise(next => setTimeout(next, 50));
  if (!found.current) throw new Refused(400, { error: "there is no answer yet about what this does; try again" });
  const { changes, refused } = found.current;
  if (refused) throw new Refused(403, { error: refused });
  for (const [name, change] of Object.entries(changes)) await send("PATCH", experiment(name), change);
  say(Object.keys(changes).length ? "Changed." : "It is so already.");
}

export function askToMove(name, before, entries) {
  const query = new URLSearchParams({ name, before: before ?? "" }), found = { current: null };
  ask({
    title: before === null ? `Move ${label(name)} to the end?` : `Move ${label(name)} before ${label(before)}?`, yes: "Move", sure: true,
    body: html`<${Preview} query=${query} found=${found} entries=${entries} />`, act: () => apply(found),
  });
}

function ShareFields({ entry, found }) {
  const { share } = entry, [asked, set] = useState({ priority: share.priority, weight: share.weight, max_slots: share.max_slots ?? "" });
  const query = new URLSearchParams({ name: entry.name, ...asked, max_slots: asked.max_slots === "" ? "none" : asked.max_slots });
  const field = (name, label, limits, more) => html`<label>${label}<input type="number" name=${name} value=${asked[name]} ...${limits}
    oninput=${event => set({ ...asked, [name]: event.target.value })} /><small>${more}</small></label>`;
  return html`${field("priority", "Priority", { min: 1, max: 99, required: true }, "1 to 99; smaller numbers go first, and take slots of others at once")}
    ${field("weight", "Weight", { min: 0, step: "any", required: true }, "its part of the slots among experiments of the same priority")}
    ${field("max_slots", "Most slots at a time", { min: 1 }, "empty: no limit")}
    <${Preview} query=${query} found=${found} entries=${[entry]} />`;
}

// `it`: an experiment that was submitted, as in the list.
export function askShare({ submitted, title }, done) {
  const found = { current: null };
  ask({
    title: `Share of ${title}`, yes: "Change", body: html`<${ShareFields} entry=${submitted} found=${found} />`,
    act: async () => { await apply(found); done?.(); },
  });
}
