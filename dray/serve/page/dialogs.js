// What is asked before something is done.

import { Refused, experiment, get, send } from "./api.js";
import { address, h, plural, put } from "./dom.js";

const KEYS = [
  ["/", "search"], ["j, k", "next and previous row"], ["Enter", "open the row"], ["x", "pick the trial to compare"],
  ["c", "compare the picked trials"], ["Esc", "leave the search; one level up"], ["?", "this help"],
];

export function say(text) {
  const place = document.getElementById("said");
  put(place, text).hidden = false;
  clearTimeout(say.timer);
  say.timer = setTimeout(() => { place.hidden = true; }, 6000);
}

// A dialog with a form; `act` is called when it is confirmed, and the dialog stays open if that is refused.
export function ask({ title, body = [], yes, danger = false, act }) {
  const trouble = h("div", { className: "trouble", role: "alert" });
  const confirm = h("button", { type: "submit", className: danger ? "danger" : "primary" }, yes);
  const dialog = h("dialog", { "aria-labelledby": "asked" },
    h("form", { method: "dialog" },
      h("h2", { id: "asked" }, title), ...body, trouble,
      h("div", { className: "buttons" },
        act ? h("button", { type: "button", onclick: () => dialog.close() }, "Cancel") : null, confirm)));
  dialog.querySelector("form").addEventListener("submit", async event => {
    if (!act) return;
    event.preventDefault();
    confirm.disabled = true;
    trouble.replaceChildren();
    try {
      await act();
      dialog.close();
    } catch (error) {
      if (!(error instanceof Refused)) console.error(error);
      trouble.replaceChildren(h("p", {}, error.status ? error.message : "The server does not answer."),
        h("ul", {}, ...(error.faults ?? []).map(([field, fault]) => h("li", {}, h("b", {}, field), `: ${fault}`))));
    }
    confirm.disabled = false;
  });
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
  return dialog;
}

export function showHelp() {
  ask({
    title: "Keyboard", yes: "Close",
    body: [h("dl", {}, ...KEYS.flatMap(([key, what]) => [h("dt", {}, h("kbd", {}, key)), h("dd", {}, what)]))],
  });
}

// ------------------------------------------------------------------ an experiment's verbs
export const VERBS = {
  stop: ["Stop", "Its running trials save a checkpoint first. It can be activated again.", true],
  pause: ["Pause", "Its running trials save a checkpoint first. It waits until it is activated.", false],
  activate: ["Activate", "It is queued again, and continues from its journal.", false],
  kill: ["Kill", "Its process ends at once; work since the last checkpoints is lost.", true],
};
const ALLOWED = {
  QUEUED: ["pause", "stop", "kill"], RUNNING: ["pause", "stop", "kill"], STOPPING: ["kill"],
  PREEMPTED: ["pause", "stop", "kill"], RESTARTING: ["pause", "stop", "kill"],
  PAUSED: ["activate", "stop"], STOPPED: ["activate"], ERROR: ["activate"], COMPLETED: [], PARTLY_FAILED: [],
};
export const allowed = it => it.submitted ? ALLOWED[it.state] ?? [] : [];

export function askVerb(name, verb, done) {
  const [label, what, danger] = VERBS[verb];
  ask({
    title: `${label} ${name}?`, yes: label, danger, body: [h("p", {}, what)],
    act: async () => {
      const now = await send("POST", `${experiment(name)}/${verb}`);
      say(`${name} is ${now.state.toLowerCase()}`);
      done();
    },
  });
}

export function askShare(it, done) {
  const { priority, weight, max_slots } = it.submitted.share;
  const field = (label, hint, attributes) => h("label", {}, label, h("input", { type: "number", ...attributes }), h("small", {}, hint));
  const inputs = [
    field("Priority", "1 to 99; smaller numbers go first", { name: "priority", min: 1, max: 99, step: 1, required: true, value: priority }),
    field("Weight", "its share among those of the same priority", { name: "weight", min: 0.001, step: "any", required: true, value: weight }),
    field("Most slots", "empty: no limit", { name: "max_slots", min: 1, step: 1, value: max_slots ?? "" }),
  ];
  const value = place => inputs[place].querySelector("input").value;
  ask({
    title: `Slots of ${it.name}`, yes: "Change", body: inputs,
    act: async () => {
      await send("PATCH", experiment(it.name), {
        priority: Number(value(0)), weight: Number(value(1)), max_slots: value(2) === "" ? null : Number(value(2)),
      });
      say("Changed; groups move at the ends of trials");
      done();
    },
  });
}

export function askNotes(it, done) {
  const tags = h("input", { value: it.submitted.tags.join(", "), autocomplete: "off" });
  const notes = h("textarea", { rows: 8, value: it.submitted.notes });
  ask({
    title: `Tags and notes of ${it.name}`, yes: "Save",
    body: [h("label", {}, "Tags", tags, h("small", {}, "separated by commas")), h("label", {}, "Notes", notes)],
    act: async () => {
      const found = tags.value.split(",").map(tag => tag.trim()).filter(Boolean);
      await send("PATCH", experiment(it.name), { tags: [...new Set(found)], notes: notes.value });
      done();
    },
  });
}

export function askExtend(it, done) {
  const trials = h("input", { type: "number", min: 1, step: 1, placeholder: it.max_trials ?? it.trials });
  const length = h("input", { type: "number", min: 1, step: 1, placeholder: it.max_length ?? "" });
  const budget = Object.keys(it.budget ?? {}).map(name => [name, h("input", { placeholder: name === "time" ? "4h" : it.budget[name].total })]);
  ask({
    title: `Extend ${it.name}`, yes: "Extend",
    body: [h("p", {}, "Trials that were kept go on from their checkpoints."), h("label", {}, "Trials in all", trials),
      h("label", {}, `Length of a trial, in ${it.unit ?? "its unit"}`, length),
      ...budget.map(([name, input]) => h("label", {}, `Budget: ${name} in all`, input))],
    act: async () => {
      const wanted = {};
      if (trials.value) wanted.max_trials = Number(trials.value);
      if (length.value) wanted.max_length = Number(length.value);
      for (const [name, input] of budget)
        if (input.value) wanted.budget = { ...wanted.budget, [name]: name === "time" ? input.value : Number(input.value) };
      await send("POST", `${experiment(it.name)}/extend`, wanted);
      say(`${it.name} is queued`);
      done();
    },
  });
}

// How many lines of the new text are not in the old one, counting each as often as it is there.
export function changedLines(before, after) {
  const left = new Map();
  for (const line of before.split("\n")) left.set(line, (left.get(line) ?? 0) + 1);
  let changed = 0;
  for (const line of after.split("\n")) {
    const there = left.get(line) ?? 0;
    if (there) left.set(line, there - 1);
    else changed += 1;
  }
  const gone = [...left.values()].reduce((sum, each) => sum + each, 0);
  return Math.max(changed, gone);
}

export async function askFork(name) {
  const { config } = await get(`${experiment(name)}/config`);
  const text = h("textarea", { className: "code", rows: 22, spellcheck: false, value: config, "aria-label": "Config, as YAML" });
  const changes = h("p", { className: "quiet", role: "status" }, "No line is changed.");
  text.addEventListener("input", () => {
    const lines = changedLines(config, text.value);
    put(changes, lines ? `${plural(lines, "changed line")}.` : "No line is changed.");
  });
  text.addEventListener("keydown", event => {
    if (event.key !== "Tab" || event.shiftKey) return;  // Shift+Tab leaves the text
    event.preventDefault();
    text.setRangeText("  ", text.selectionStart, text.selectionEnd, "end");
  });
  ask({
    title: "Again, with these changes", yes: "Create the experiment",
    body: [h("p", {}, "A new experiment with the code of ", h("b", {}, name), " and this config:"), text, changes],
    act: async () => {
      const made = await send("POST", `${experiment(name)}/fork`, { config: text.value });
      say(`${made.name} is ${made.state.toLowerCase()}`);
      location.hash = address(made.name);
    },
  }).classList.add("wide");
  text.setSelectionRange(0, 0);
  text.scrollTop = 0;
}

// ------------------------------------------------------------------ a trial's verbs
export function askStopTrial(name, trial, done) {
  ask({
    title: `Stop trial ${trial}?`, yes: "Stop", danger: true,
    body: [h("p", {}, "It ends after its current batch and keeps its checkpoints. The search continues with the others.")],
    act: async () => {
      const { trial: stopped } = await send("POST", `${experiment(name)}/trials/${trial}/stop`);
      say(stopped === null ? `Trial ${trial} stops when ${name} runs` : `Trial ${trial} is stopped`);
      done();
    },
  });
}

export function askForkTrial(name, it) {
  const at = h("select", {}, new Option("best"), new Option("latest"));
  const text = value => typeof value === "string" ? value : JSON.stringify(value);
  const fields = Object.entries(it.drawn).map(([key, value]) => [key, value, h("input", { name: key, value: text(value), autocomplete: "off" })]);
  ask({
    title: `Fork trial ${it.trial}`, yes: "Fork",
    body: [h("p", {}, "A new trial begins from a checkpoint of this one, with these hyperparameters."), h("label", {}, "Checkpoint", at),
      ...fields.map(([key, , input]) => h("label", {}, key, input))],
    act: async () => {
      const changed = fields.filter(([, value, input]) => input.value !== text(value)).map(([key, value, input]) => [key, parsed(key, value, input.value)]);
      const { trial } = await send("POST", `${experiment(name)}/trials/${it.trial}/fork`, { at: at.value, hparams: Object.fromEntries(changed) });
      if (trial === null) return say(`The fork starts when ${name} runs`);
      say(`Trial ${trial} is a fork of trial ${it.trial}`);
      location.hash = address(name, trial);
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
