// States: each has a word, a shape and a sentence of its own. Colour only repeats what the shape says.

import { html } from "./lib/preact.js";

const SHAPES = {
  check: "M2 6.5l3 3 5-7", cross: "M2.5 2.5l7 7m0-7l-7 7", play: "M3.5 2l6 4-6 4z", bars: "M4 2.5v7M8 2.5v7", square: "M3 3h6v6H3z",
  clock: "M6 1.5a4.5 4.5 0 1 0 .01 0M6 3.5V6l2 1.5", dots: "M2 6h.01M6 6h.01M10 6h.01", turn: "M9.5 4A4 4 0 1 0 10 6.5M9.8 1.5v2.7H7.1",
  eject: "M6 2l4 4.5H2zM2 9.5h8", down: "M6 1.5V8M3.5 5.5L6 8l2.5-2.5M2 10.5h8", wave: "M1 9l2.5-6L6 9l2.5-6L11 9", slash: "M6 1.5a4.5 4.5 0 1 0 .01 0M3 9l6-6",
  full: "M2 2.5h8v7H2zM4.5 2.5v7M7.5 2.5v7", half: "M2 6.5l2 2M4 8.5l3-4.5M9 7l2.5 2.5m0-2.5L9 9.5", question: "M4 4a2 2 0 1 1 2.8 1.9Q6 6.3 6 7.2M6 9.6h.01", warning: "M6 1.5L11 10.5H1zM6 5v2.4M6 9h.01",
  broken: "M1.5 6h3l1-2.5M6.5 8.5L7.5 6h3", leave: "M3 3h6v6H3zM6 1.2v3M6 7.8v3",
};

// [word, shape, tone, what it means]
const EXPERIMENT = {
  QUEUED: ["queued", "clock", "wait", "It waits for its first slots."],
  RUNNING: ["running", "play", "now", "It trains."],
  PREEMPTED: ["preempted", "eject", "wait", "Experiments that go first have its slots. It continues by itself."],
  RESTARTING: ["restarting", "turn", "wait", "Its processes or those of its trials start again. It continues from its checkpoints."],
  STOPPING: ["stopping", "leave", "wait", "Its running trials save a checkpoint, and leave."],
  PAUSED: ["paused", "bars", "wait", "Somebody has paused it. It continues when it is activated."],
  STOPPED: ["stopped", "square", "wait", "Somebody has stopped it, or no process runs it. It continues when it is activated or resumed."],
  COMPLETED: ["completed", "check", "good", "Its search has ended."],
  PARTLY_FAILED: ["partly failed", "half", "bad", "Its search has ended, but some of its trials failed."],
  ERROR: ["failed", "cross", "bad", "It has ended without a completed trial."],
  UNKNOWN: ["unknown", "question", "", "Its end is not recorded."],
  DAMAGED: ["damaged", "warning", "bad", "Its files can't be read."],
};
const TRIAL = {
  PENDING: ["waiting", "dots", "wait", "It waits for workers."],
  RUNNING: ["running", "play", "now", "It trains."],
  PAUSED: ["paused", "bars", "wait", "The search has paused it, and may continue it."],
  COMPLETED: ["completed", "check", "good", "It has trained as long as the search lets trials train, or ended by itself."],
  PRUNED: ["pruned", "down", "", "The search has ended it: others are better."],
  CANCELED: ["stopped", "square", "wait", "Somebody has stopped it."],
  ERRORED: ["failed", "cross", "bad", "It failed too often."],
  OUT_OF_MEMORY: ["out of memory", "full", "bad", "Its hyperparameters need more memory than there is."],
  INVALID_HP: ["invalid", "slash", "", "Its code has refused its hyperparameters, and the search draws others."],
};
const BY = {
  divergence: ["diverged", "wave", "bad", "Its loss was NaN or infinite, so it was ended."],
  interruption: ["interrupted", "broken", "wait", "Its experiment was stopped or ended while it ran. It is the first to go on when the experiment does."],
};

function of(state, by, trial) {
  return BY[by] ?? (trial ? TRIAL[state] : EXPERIMENT[state]) ?? EXPERIMENT[state] ?? TRIAL[state] ?? [state.toLowerCase().replaceAll("_", " "), "question", "", ""];
}

export const ENDED = ["COMPLETED", "PARTLY_FAILED", "ERROR"];  // states of experiments whose search has ended
export const LIVE = ["PENDING", "RUNNING", "PAUSED"];  // states of trials that have not ended
export const word = (state, by, trial) => of(state, by, trial)[0];
export const meaning = (state, by, trial) => of(state, by, trial)[3];

// `trial`: whether it is a trial's state, not an experiment's; `by`: the trial's `ended_by`; `why`: what is known besides.
export function State({ state, by = null, trial = by !== null, why }) {
  const [text, shape, tone, what] = of(state, by, trial);
  return html`<span class="state ${tone} ${state.toLowerCase()}" title=${why ? `${what} ${why}` : what}>
    <svg viewBox="0 0 12 12" width="12" height="12" aria-hidden="true" data-shape=${shape}><path d=${SHAPES[shape]} /></svg>${text}</span>`;
}
