// What can be done with experiments and trials, and what each of it does: what is lost, what is kept, whether it can be
// undone.

import { html, useState } from "./lib/preact.js";
import { experiment, get, Refused, send } from "./data.js";
import { ask, say } from "./dialogs.js";
import { word } from "./states.js";
import { address, go } from "./url.js";
import { bytes, plural } from "./values.js";

// [label, whether it takes something away, what it does with one or several experiments, the past tense]
export const VERBS = {
  stop: ["Stop", true, "Running trials save a checkpoint first, so nothing is lost, and their slots become free. Activate continues where it was.", "stopped"],
  pause: ["Pause", false, "As Stop: running trials save a checkpoint first, so nothing is lost. Also one that is still queued. It waits until it is activated.", "paused"],
  activate: ["Activate", false, "Queued again, with its priority. It continues from its journal; trials go on from their last checkpoints.", "activated"],
  kill: ["Kill", true, "The processes end at once, without saving: what running trials have trained since their last checkpoints is lost. Checkpoints, metrics and logs are kept, and Activate continues from them. Use it where Stop takes too long.", "killed"],
  delete: ["Delete", true, "Gone for good, also in the object store: the config, code, metrics, logs and all checkpoints. This can't be undone. Forks of it keep their own.", "deleted"],
};
// Why a verb ("tag" and "extend" too) can't be used on an experiment of the list with one's token (`me`); "" if it can.
export function refusal(it, verb, me) {
  const owner = it.submitted?.owner;
  if (me && me.scope !== "operate" && !(me.scope === "submit" && owner === me.name))
    return me.scope === "read" ? "your token may only look" : owner ? `it is ${owner}'s` : "it is the operator's";
  if (it.is_local) return "it is a local run";
  if (verb === "tag" ? it.submitted : it.verbs.includes(verb)) return "";
  if (verb === "delete") return `it is ${word(it.state)}; stop it first`;
  if (!it.submitted) return `it was not submitted to this server${it.state === "RUNNING" ? "; the command that runs it can stop it" : ""}`;
  return `it is ${word(it.state)}`;
}
export const allowed = (it, me) => Object.keys(VERBS).filter(verb => !refusal(it, verb, me));

const MOST_NAMES = 6, MOST_SIZES = 40;
const Names = ({ all }) => html`<ul class="names">${all.slice(0, MOST_NAMES).map(([it, why]) => html`<li key=${it.name}><b>${it.title}</b>${it.title !== it.name && html` <span class="quiet">${it.name}</span>`}${why && `: ${why}`}</li>`)}
  ${all.length > MOST_NAMES && html`<li class="quiet">and ${plural(all.length - MOST_NAMES, "other")}</li>`}</ul>`;

// What deleting takes away, which is asked for while the dialog is open.
function Size({ all }) {
  const [found, set] = useState(null);
  useState(() => {
    if (all.length > MOST_SIZES) return;
    Promise.all(all.map(it => get(`${experiment(it.name)}/checkpoints`)))
      .then(each => set([each.reduce((sum, it) => sum + it.checkpoints, 0), each.reduce((sum, it) => sum + it.bytes, 0)]), () => {});
  });
  return found && html`<p>${plural(found[0], "checkpoint")}, ${bytes(found[1])}.</p>`;
}

// Does something with several experiments, after a dialog that says with which, and with which not and why. `act(it, form)`
// does it with one of them; refusals are told one by one.
function askAll({ title, what, verb, past, danger, rows, me, act, body, more }) {
  const all = rows.map(it => [it, refusal(it, verb, me)]), will = all.filter(([, why]) => !why), not = all.filter(([, why]) => why);
  const one = rows.length === 1, told = one ? rows[0].title : plural(will.length, "experiment");
  ask({
    title: will.length ? `${title} ${told}?` : `${title}: not possible`, danger: danger && will.length > 0, yes: will.length ? title : "Close", act: will.length ? run : null,
    body: html`${will.length > 0 && html`<p>${what}</p>${!one && html`<${Names} all=${will} />`}${body?.(will.map(([it]) => it))}`}
      ${not.length > 0 && html`<p>${one ? "Not possible:" : `Left out, ${plural(not.length, "experiment")}:`}</p><${Names} all=${not} />`}`,
  });

  async function run(form, progress) {
    const refused = [];
    for (const [at, [it]] of will.entries()) {
      if (will.length > 1) progress(`${at + 1} of ${will.length} …`);
      try {
        await act(it, form);
      } catch (error) {
        if (will.length === 1) throw error;
        refused.push([it, error.status ? error.message : "the server did not answer"]);
      }
    }
    const done = will.length - refused.length;
    say(one ? `${rows[0].title} is ${past}` : `${plural(done, "experiment")} ${past}`);
    more?.();
    if (!refused.length) return null;
    return html`<p>${plural(done, "experiment")} ${past}; the server has refused ${plural(refused.length, "other")}:</p>
      <ul class="names">${refused.map(([it, why]) => html`<li key=${it.name}><b>${it.title}</b>: ${why}</li>`)}</ul>`;
  }
}

export function askVerbs(rows, verb, me, more) {
  const [title, danger, what, past] = VERBS[verb];
  askAll({
    title, what, verb, past, danger, rows, me, more,
    act: it => verb === "delete" ? send("DELETE", experiment(it.name)) : send("POST", `${experiment(it.name)}/${verb}`),
    body: verb === "delete" ? will => html`<${Size} all=${will} />` : null,
  });
}

// One experiment's verb, from its page; `done` once it is done.
export async function askVerb(name, verb, done) {
  askVerbs([await get(experiment(name))], verb, await get("/token"), done ?? (verb === "delete" ? () => go("#/") : undefined));
}

const tagsIn = text => [...new Set(text.split(",").map(tag => tag.trim()).filter(Boolean))];

export function askTags(rows, me, more) {
  const there = [...new Set(rows.flatMap(it => it.submitted?.tags ?? []))].sort();
  askAll({
    title: "Tag", what: "Tags are kept by the server, for its list; nothing else changes.", verb: "tag", past: "tagged", rows, me, more,
    body: () => html`<label>Add <input name="add" autocomplete="off" /><small>separated by commas</small></label>
      ${there.length > 0 && html`<fieldset><legend>Remove</legend>${there.map(tag => html`<label key=${tag} class="inline"><input type="checkbox" name="remove" value=${tag} /> ${tag}</label>`)}</fieldset>`}`,
    act: (it, form) => {
      const gone = new Set(form.getAll("remove"));
      const tags = [...new Set([...it.submitted.tags.filter(tag => !gone.has(tag)), ...tagsIn(form.get("add"))])];
      return send("PATCH", experiment(it.name), { tags });
    },
  });
}

export function askNotes(it, done) {
  ask({
    title: `Tags and notes of ${it.title}`, yes: "Save",
    body: html`<label>Tags <input name="tags" value=${it.submitted.tags.join(", ")} autocomplete="off" /><small>separated by commas</small></label>
      <label>Notes <textarea name="notes" rows="8">${it.submitted.notes}</textarea></label>`,
    act: async form => {
      await send("PATCH", experiment(it.name), { tags: tagsIn(form.get("tags")), notes: form.get("notes") });
      done?.();
    },
  });
}

// `it`: the experiment in full.
export function askExtend(it, done) {
  const budget = Object.keys(it.budget ?? {}), more = ["more trials", "longer ones", ...budget.length ? ["a larger budget"] : []];
  ask({
    title: `Extend ${it.title}`, yes: "Extend",
    body: html`<p>It is queued again with ${more.slice(0, -1).join(", ")} or ${more.at(-1)}. What it has found is kept, and trials go on from the checkpoints that they still have. A larger number can't be taken back, but the experiment can be stopped at any time.</p>
      <label>Trials in all <input type="number" name="max_trials" min="1" step="1" placeholder=${it.max_trials ?? it.trials} /></label>
      <label>Length of a trial, in ${it.unit ?? "its unit"} <input type="number" name="max_length" min="1" step="1" placeholder=${it.max_length ?? ""} /></label>
      ${budget.map(name => html`<label key=${name}>Budget: ${name} in all <input name="budget.${name}" placeholder=${name === "time" ? "4h" : it.budget[name].total} /></label>`)}`,
    act: async form => {
      const wanted = {};
      for (const name of ["max_trials", "max_length"]) if (form.get(name)) wanted[name] = Number(form.get(name));
      for (const name of budget)
        if (form.get(`budget.${name}`)) wanted.budget = { ...wanted.budget, [name]: name === "time" ? form.get("budget.time") : Number(form.get(`budget.${name}`)) };
      await send("POST", `${experiment(it.name)}/extend`, wanted);
      say(`${it.title} is queued`);
      done?.();
    },
  });
}

// The fields of a YAML text of plain sections and lists, by path.
function fieldsOf(text) {
  const found = new Map(), above = [];
  for (const [, indent, items, key, value] of text.matchAll(/^( *)((?:- +)*)(?:([^\s#"'{[][^:\n]*):(?= |$))? *(.*)$/gm)) {
    const depth = indent.length + items.length;
    while (above.length && above.at(-1)[0] >= depth) above.pop();
    if (key) above.push([depth, key]);
    const path = above.map(([, name]) => name).join(".");
    if (path && value && value[0] !== "#") found.set(path, [...found.get(path) ?? [], value]);
  }
  return found;
}

// What differs between two configs, a line for each field.
function changes(before, after) {
  const [old, now] = [before, after].map(fieldsOf), of = values => values?.join(", ") ?? null;
  return [...new Set([...old.keys(), ...now.keys()])].map(path => [path, of(old.get(path)), of(now.get(path))]).filter(([, was, is]) => was !== is)
    .map(([path, was, is]) => is === null ? `${path}: no longer set` : was === null ? `${path}: ${is}` : `${path}: ${was} → ${is}`);
}

const LIKE = /^(searcher:\n(?: .*\n)*?)  like:(?: \[.*\]|(?:\n  - .*)+)\n/m;

// `before`: what is set; `all`: with all defaults.
function Config({ before, all }) {
  const [text, set] = useState(before), lines = changes(before, text);
  const tab = event => {
    if (event.key !== "Tab" || event.shiftKey) return;  // Shift+Tab leaves the text
    event.preventDefault();
    event.target.setRangeText("  ", event.target.selectionStart, event.target.selectionEnd, "end");
  };
  const learn = ({ target }) => {
    const place = target.form.config, names = target.value.split(/[\s,]+/).filter(Boolean);
    place.value = place.value.replace(LIKE, "$1").replace(/^searcher:\n/m, names.length ? `$&  like: ${JSON.stringify(names).replaceAll("$", "$$$$")}\n` : "$&");
    set(place.value);
  };
  return html`${LIKE.test(all) && html`<label>Learn the first points from <input onchange=${learn} autocomplete="off" placeholder="numbers, names or patterns of earlier experiments, such as digits-*" /></label>`}
    <textarea name="config" class="code" rows=${Math.min(22, before.split("\n").length)} spellcheck=${false} aria-label="Config, as YAML" onkeydown=${tab}
    oninput=${event => set(event.target.value)}>${before}</textarea>
    <div class="quiet" role="status">${lines.length ? html`<ul class="names">${lines.map(line => html`<li key=${line}>${line}</li>`)}</ul>` : "Nothing is changed yet. Fields that are not here have their defaults."}</div>`;
}

export async function askFork(name, title) {
  const { written, config } = await get(`${experiment(name)}/config`);
  ask({
    title: `Fork ${title}`, yes: "Fork", wide: true,
    body: html`<p>A new experiment begins from nothing, with the code of <b>${title}</b> and this config. <b>${title}</b> stays as it is.</p><${Config} before=${written} all=${config} />`,
    act: async form => {
      const made = await send("POST", `${experiment(name)}/fork`, { config: form.get("config").replaceAll("\r\n", "\n") });
      const missing = made.missing_secrets.join(", ");
      say(`${made.name} is ${word(made.state)}${missing && `, without ${missing}, which belong to another token: fork again, with your own in the config`}`);
      go(address(made.name));
    },
  });
}

// ------------------------------------------------------------------ a trial's verbs
export function askStopTrial(name, trial, done) {
  ask({
    title: `Stop trial ${trial}?`, yes: "Stop", danger: true,
    body: html`<p>It ends after its current batch, and does not continue. Its checkpoints, metrics and logs are kept, so that it can be forked. The search goes on with the others, and ranks it last at its next rung.</p>`,
    act: async () => {
      const { trial: stopped } = await send("POST", `${experiment(name)}/trials/${trial}/stop`);
      say(stopped === null ? `Trial ${trial} stops when ${name} runs` : `Trial ${trial} is stopped`);
      done?.();
    },
  });
}

// `it`: the trial in full.
export function askForkTrial(name, it) {
  const text = value => typeof value === "string" ? value : JSON.stringify(value), fields = Object.entries(it.drawn);
  ask({
    title: `Fork trial ${it.trial}`, yes: "Fork",
    body: html`<p>A new trial of the same search begins from a checkpoint of this one, or from the beginning, with these hyperparameters. It does not count for the number of trials; this one stays as it is.</p>
      <label>Checkpoint <select name="at"><option value="best">best</option><option value="latest">latest</option>${it.code === null && html`<option value="none">none: from the beginning</option>`}</select></label>
      ${fields.map(([key, value]) => html`<label key=${key}>${key} <input name=${`hparams.${key}`} value=${text(value)} autocomplete="off" data-hparam=${key} /></label>`)}`,
    act: async form => {
      const changed = fields.filter(([key, value]) => form.get(`hparams.${key}`) !== text(value)).map(([key, value]) => [key, parsed(key, value, form.get(`hparams.${key}`))]);
      const hparams = Object.fromEntries(changed), at = form.get("at");
      const { trial } = await (at === "none" ? send("POST", `${experiment(name)}/trials`, { hparams: { ...it.drawn, ...hparams } })
        : send("POST", `${experiment(name)}/trials/${it.trial}/fork`, { at, hparams }));
      if (trial === null) return say(`It starts when ${name} runs`);
      say(at === "none" ? `Trial ${trial} begins` : `Trial ${trial} is a fork of trial ${it.trial}`);
      return go(address(name, trial));
    },
  });
}

// The value that was typed for a hyperparameter: text where it was text, else JSON.
function parsed(key, before, typed) {
  if (typeof before === "string") return typed;
  try {
    return JSON.parse(typed);
  } catch {
    throw new Refused(400, { error: `${key}: must be a value like ${JSON.stringify(before)}, got ${typed}` });
  }
}
