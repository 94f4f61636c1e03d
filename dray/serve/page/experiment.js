// One experiment, live.

import { Poll, experiment, get, news, send } from "./api.js";
import { VERBS, allowed, ask, askExtend, askFork, askNotes, askShare, askVerb, say } from "./dialogs.js";
import { address, badge, clock, count, duration, h, metricName, number, plural, put } from "./dom.js";
import { draw, scaleChoice } from "./figures.js";
import { showStatus } from "./list.js";
import { parallel } from "./parallel.js";
import { trialTable } from "./trials.js";

const HEAD_MS = 2500, QUIET = 4;
const ENDED = ["COMPLETED", "PARTLY_FAILED", "STOPPED", "PAUSED", "ERROR"];

export function showExperiment(place, name) {
  document.title = `${name} · dray`;
  const path = experiment(name);
  let about = null, me = null, tabled = -1;
  const others = [];
  const title = h("h1", {}, name), state = h("span"), where = h("p", { className: "quiet path" }), trouble = h("p", { className: "trouble" });
  const actions = h("div", { className: "actions" }), tiles = h("div", { className: "tiles" }), notes = h("div", { className: "notes" });
  const table = trialTable(name);
  const curves = curvesOf(path, name);
  const front = figureOf(path, "front", "Pareto front", "front");
  const figures = [
    front, figureOf(path, "history", "Best value over time", "plot"), figureOf(path, "parallel", "Parallel coordinates", "parallel"),
    figureOf(path, "importance", "Importance of hyperparameters", "importance"), figureOf(path, "slices", "Hyperparameters one by one", "slices"),
    figureOf(path, "slots", "Use of slot time", "slots"),
  ];
  place.append(h("nav", { className: "crumbs", "aria-label": "Where this is" }, h("a", { href: "#/" }, "Experiments"), " / ", name),
    h("div", { className: "top" }, title, state), where, trouble, actions, tiles, notes);
  const repeats = h("section", { hidden: true }), later = h("div", { hidden: true }, repeats, curves.place, ...figures.slice(0, 2).map(each => each.place), table, ...figures.slice(2).map(each => each.place));
  place.append(later);

  function tell(it) {
    showStatus(it.status ?? { busy: 0, slots: 0 });
    put(title, it.title);
    state.replaceChildren(badge(it.state));
    put(where, `${it.number === null ? "" : `${it.number}: `}${it.name}${it.path ? ` in ${it.path}` : ""}${it.reason ? `; ended: ${it.reason}` : ""}`);
    front.place.hidden = !(it.objectives?.length > 1);
    put(trouble, it.why ?? "");
    trouble.hidden = !it.why;
    const failed = it.states ? (it.states.ERRORED ?? 0) + (it.states.OUT_OF_MEMORY ?? 0) : it.failed;
    const facts = [
      [it.best_metric === null ? "–" : number(it.best_metric), `best ${it.metric ?? ""}`, it.best_trial === null || it.best_trial === undefined ? null : address(name, it.best_trial),
        it.best_trial === null || it.best_trial === undefined ? "" : `trial ${it.best_trial}${it.repeats?.[0]?.compared ? ", mean over seeds" : ""}`],
      [`${count(it.ended)} / ${count(it.total)}`, "trials ended", null, counted(it.states)],
      // It is told by the journal's last event.
      [duration(it.ran_s + (it.state === "RUNNING" && it.last ? Math.max(0, Date.now() / 1000 - it.last) : 0)), "time", null, it.began ? `since ${clock(it.began)}` : ""],
    ];
    if (it.usage)
      facts.push([it.usage, "budget", null, ""]);
    if (it.front?.length)
      facts.splice(1, 0, [count(it.front.length), "on the Pareto front", null, `trial ${it.front.slice(0, 6).join(", ")}${it.front.length > 6 ? ", …" : ""}`]);
    if (it.submitted) {
      const { share, slots, waiting } = it.submitted;
      facts.push([`${number(slots)} of ${number(it.status?.slots ?? 0)}`, "slots", null,
        `priority ${share.priority}, weight ${number(share.weight)}${share.max_slots === null ? "" : `, ${share.max_slots} at most`}${waiting ? `; ${plural(waiting, "trial")} waiting` : ""}`]);
    }
    tiles.replaceChildren(...facts.map(([value, label, link, more]) => h("div", { className: failed && label === "trials ended" ? "bad" : "" },
      h("b", {}, value), h("span", {}, label), h("small", {}, link ? h("a", { href: link }, more) : more))));
    fillActions(it);
    fillNotes(it);
    fillRepeats(it);
  }

  function fillRepeats(it) {
    const wanted = JSON.stringify([it.repeats, it.metric]);
    if (repeats.dataset.of === wanted) return;
    repeats.dataset.of = wanted;
    repeats.hidden = !it.repeats?.length;
    if (repeats.hidden) return;
    const ends = it.repeats.flatMap(each => [each.low ?? each.mean, each.high ?? each.mean]).filter(each => typeof each === "number");
    const [least, most] = [Math.min(...ends), Math.max(...ends)], at = value => most > least ? 100 * (value - least) / (most - least) : 50;
    const bar = each => typeof each.mean !== "number" ? "" : h("div", { className: "interval", title: each.text },
      h("i", { style: `left: ${at(each.low ?? each.mean)}%; right: ${100 - at(each.high ?? each.mean)}%` }), h("b", { style: `left: ${at(each.mean)}%` }));
    const row = each => h("tr", {}, h("td", { className: "number" }, h("a", { href: address(name, each.trial) }, each.trial)), h("td", {}, each.text), h("td", {}, bar(each)),
      h("td", {}, `${each.seeds} of ${each.of}${each.failed ? `, ${each.failed} failed` : ""}`), h("td", {}, each.difference_text),
      h("td", {}, each.trials.flatMap((trial, place) => [place ? ", " : "", h("a", { href: address(name, trial) }, trial)])));
    repeats.replaceChildren(h("h2", {}, "Trained again with other seeds"), h("p", {}, `${it.repeats_summary[0].toUpperCase()}${it.repeats_summary.slice(1)}.`),
      h("div", { className: "wide" }, h("table", { "aria-label": "Trained again with other seeds" },
        h("thead", {}, h("tr", {}, ...["trial", `${it.metric} over seeds, 95% interval`, "", "seeds", "difference from the best", "repeats"].map(each => h("th", { scope: "col" }, each)))),
        h("tbody", {}, ...it.repeats.map(row)))));
  }

  function fillActions(it) {
    const wanted = JSON.stringify([it.state, it.submitted?.share, it.submitted?.tags, it.submitted?.notes, it.max_trials]);
    if (actions.dataset.of === wanted) return;
    actions.dataset.of = wanted;
    const button = (label, act, danger = false) => h("button", { className: danger ? "danger" : "", onclick: act }, label);
    const { scope } = me, owner = it.submitted?.owner, mine = scope === "operate" || (scope === "submit" && owner === me.name);
    if (!mine) {
      const may = scope === "submit" ? "change only what it has submitted" : "only look";
      actions.replaceChildren(
        scope === "submit" ? button("Again, with changes", () => askFork(name).catch(error => say(error.message))) : "",
        h("span", { className: "quiet" }, `${owner ? `Submitted by ${owner}. ` : ""}Your token, ${me.name}, may ${may}.`));
      return;
    }
    const again = () => poll.now();
    actions.replaceChildren(
      ...allowed(it).map(verb => button(VERBS[verb][0], () => askVerb(name, verb, again), VERBS[verb][2])),
      it.submitted && ENDED.includes(it.state) ? button("Extend", () => askExtend(about ?? it, again)) : "",
      it.submitted ? button("Slots", () => askShare(it, again)) : "",
      it.submitted ? button("Tags and notes", () => askNotes(it, again)) : "",
      button("Again, with changes", () => askFork(name).catch(error => say(error.message))),
      button("TensorBoard, optuna-dashboard", () => boards(path)),
      it.submitted ? "" : h("span", { className: "quiet" }, "Not submitted to this server: the command that runs it can stop it."));
  }

  function fillNotes(it) {
    const tags = [...(it.submitted?.tags ?? []), ...(it.labels ?? [])];
    notes.replaceChildren(...tags.map(tag => h("span", { className: "tag" }, tag)),
      it.description ? h("p", {}, it.description) : "", it.submitted?.notes ? h("p", { className: "text" }, it.submitted.notes) : "");
  }

  const poll = new Poll(async signal => {
    me ??= await get("/token", signal);
    const now = await news(path, signal) ?? (about ? null : await get(path, signal));
    if (!now) return;
    tell(now);
    const first = about === null;
    if (!now.states) return;  // it has not begun
    about = now;
    later.hidden = false;
    if (first) start();
    pace(ENDED.includes(now.state) ? QUIET * 1000 * now.pace : 1000 * now.pace);
  }, HEAD_MS);

  // The table and the curves less often, the figures still less: what asking costs the server is bounded.
  function pace(every) {
    poll.every = every;
    others.forEach((each, place) => { each.every = place < 2 ? 1.5 * every : 4 * every; });
  }

  function start() {
    others.push(new Poll(async signal => {
      if (about.version === tabled) return;
      await table.update(about, signal);
      tabled = about.version;
    }, 1.5 * HEAD_MS), curves.poll = new Poll(signal => curves.update(about, signal), 1.5 * HEAD_MS),
    ...figures.map(each => seen(each.place, signal => each.update(about, signal), 4 * HEAD_MS)));
  }
}

// A poll that only asks while its place is on the screen, or nearly.
function seen(place, ask, every) {
  let visible = false;
  const poll = new Poll(signal => visible && ask(signal), every);
  new IntersectionObserver(entries => {
    const before = visible;
    visible = entries.at(-1).isIntersecting;
    if (visible && !before && place.isConnected) poll.now();
  }, { rootMargin: "200px" }).observe(place);
  return poll;
}

const WORDS = { INVALID_HP: "with invalid hyperparameters", OUT_OF_MEMORY: "out of memory" };
const counted = states => Object.entries(states ?? {}).map(([state, number]) =>
  `${count(number)} ${WORDS[state] ?? state.toLowerCase()}`).join(", ");

// ------------------------------------------------------------------ curves
function curvesOf(path, name) {
  const plot = h("div", { className: "plot tall" }), told = h("p", { className: "quiet", role: "status" });
  const metric = h("select", { "aria-label": "Metric", onchange: () => { version = -1; mine.poll.now(); } });
  const scale = scaleChoice(() => show());
  const controls = h("p", { className: "controls", hidden: true }, h("label", {}, "metric ", metric), scale);
  const place = h("section", {}, h("h2", {}, "Learning curves"), controls, plot, told);
  const mine = { place };
  let version = -1, last = null;

  const show = () => {
    const figure = curveFigure(last);
    draw(plot, figure, { scale: scale.offer(figure), onpoint: point => { location.hash = address(name, point.customdata); } });
  };

  async function load(signal) {
    const chosen = metric.value;
    last = await get(`${path}/curves${chosen ? `?metric=${encodeURIComponent(chosen)}` : ""}`, signal);
    if (chosen !== metric.value) return;
    if (!chosen) offerMetrics(last);
    put(told, last.of === 0 ? "No trial has validated yet." : last.shown === last.of ? `All ${plural(last.of, "trial")} that have validated.`
      : last.how === "all" ? `${count(last.shown)} of ${count(last.of)} trials have reported it.`
        : `${count(last.shown)} of ${count(last.of)} shown: ${last.how}.`);
    plot.dataset.shown = last.shown;
    plot.hidden = last.shown === 0;
    controls.hidden = last.of === 0;
    if (last.shown) show();
  }

  function offerMetrics(found) {
    const names = ["", ...found.metrics];
    if (metric.options.length === names.length && names.every((each, place) => metric.options[place].value === each)) return;
    metric.replaceChildren(...names.map(each => new Option(each ? metricName(...each.split(/ (.*)/s)) : found.metric, each)));
  }

  mine.update = async (about, signal) => {
    if (about.version === version) return;
    await load(signal);
    version = last.version;
  };
  return mine;
}

function curveFigure(found) {
  const traces = found.groups.map(group => ({
    type: "scatter", mode: "lines", name: group.name, x: [], y: [], customdata: [], number: 0, opacity: 0.75,
    hovertemplate: `trial %{customdata}<br>%{x:.6g} ${found.along}: %{y:.5g}<extra></extra>`,
    line: { color: group.colour, width: 1.3 }, marker: { size: 4 },
  }));
  const best = { ...traces[0], name: `trial ${found.best}, the best`, x: [], y: [], customdata: [], opacity: 1, line: { color: found.best_colour, width: 2.8 } };
  found.curves.forEach((curve, place) => {
    const trace = curve.trial === found.best ? best : traces[found.group_of[place]];
    trace.number += 1;
    trace.x.push(...curve.x, null);
    trace.y.push(...curve.y, null);
    trace.customdata.push(...curve.x.map(() => curve.trial), null);
  });
  const drawn = traces.filter(trace => trace.number);
  if (best.number) drawn.push(best);
  const short = found.curves.length <= 40 || found.curves.every(curve => curve.x.length < 2);
  for (const trace of drawn) {
    if (short) trace.mode = "lines+markers";
    if (trace !== best) trace.name += ` (${trace.number})`;
    delete trace.number;
  }
  return {
    data: drawn, scales: found.scales, scale: found.scale,
    layout: { xaxis: { title: { text: found.along }, rangemode: "tozero" }, yaxis: { title: { text: found.metric } }, hovermode: "closest" },
  };
}

// ------------------------------------------------------------------ figures of the report
const PIECES = {
  plot: figures => figures.history && { plots: [["history", figures.history]], note: figures.history.note },
  front: figures => figures.front && { plots: [["front", figures.front]], note: figures.front.note },
  importance: figures => figures.importance && { plots: figures.importance.data ? [["importance", figures.importance]] : [], note: figures.importance.note },
  slices: figures => Object.keys(figures).length && { grid: true, plots: Object.entries(figures), note: Object.values(figures)[0].note },
  slots: figures => figures.shares && { plots: Object.entries(figures), phases: figures.shares.phases },
  parallel: figures => figures.parallel && { parallel: figures.parallel },
};

// A section that asks for its figures while it is on the screen.
function figureOf(path, kind, title, piece) {
  const body = h("div"), told = h("span", { className: "quiet" });
  const again = h("button", { className: "plain", onclick: () => load("?now=1").catch(error => say(error.message)) }, "Refresh");
  const place = h("section", {}, h("div", { className: "top" }, h("h2", {}, title), h("span", {}, told, " ", again)), body);
  const plots = new Map();
  let made = 0, asked = -1, lines = null;

  async function load(query = "", signal = undefined) {
    const found = await get(`${path}/figures/${kind}${query}`, signal);
    if (found.at === made) return;
    [made, asked] = [found.at, found.version];
    put(told, `as of ${new Date(found.at * 1000).toTimeString().slice(0, 8)}`);
    const pieces = PIECES[piece](found.figures);
    if (!pieces) {
      body.replaceChildren(h("p", { className: "quiet" }, "Nothing to show yet."));
      plots.clear();
      return;
    }
    if (pieces.parallel) {
      if (!lines) body.replaceChildren(lines = parallel());
      lines.offer({ ...pieces.parallel.data[0] }, pieces.parallel.note);
      return;
    }
    if (!plots.size) body.replaceChildren();
    if (plots.size === 0 || [...plots.keys()].join() !== pieces.plots.map(([name]) => name).join()) {
      plots.clear();
      const small = pieces.grid ? "plot small" : "plot";
      for (const [name] of pieces.plots) plots.set(name, h("div", { className: small }));
      const noteOf = h("p", { className: "quiet" }), legend = h("div", { className: "legend" });
      body.replaceChildren(legend, h("div", { className: pieces.grid ? "grid" : "" }, ...plots.values()), noteOf);
      body.note = noteOf;
      body.legend = legend;
    }
    put(body.note, pieces.note ?? "");
    body.legend.replaceChildren(...(pieces.phases ?? []).map(phase => {
      const square = h("i");
      square.style.background = phase.colour;
      return h("span", {}, square, `${phase.name} ${(100 * phase.share).toFixed(1)}%, ${phase.time}`);
    }));
    for (const [name, figure] of pieces.plots) {
      const spot = plots.get(name);
      if (kind === "importance") spot.style.height = `${90 + 34 * figure.data[0].y.length}px`;
      draw(spot, figure, { small: Boolean(pieces.grid) });
    }
  }

  const update = async (about, signal) => {
    if (asked === about.version) return;
    if (!made) body.replaceChildren(h("p", { className: "quiet" }, "Drawing …"));
    // While the server waits with new figures, it gives the last ones.
    await load("", signal);
  };
  return { place, update };
}

// ------------------------------------------------------------------ foreign pages
function boards(path) {
  const found = h("div", { role: "status" }, "Starting both …");
  ask({ title: "TensorBoard and optuna-dashboard", yes: "Close", body: [found,
    h("p", { className: "quiet" }, "They listen on the server's own machine: from elsewhere, forward their ports with ssh -L.")] });
  send("POST", `${path}/boards`).then(
    ({ tensorboard, optuna_dashboard: dashboard }) => found.replaceChildren(
      link("TensorBoard", tensorboard, "can't be started"),
      link("optuna-dashboard", dashboard, "is not installed")),
    error => put(found, error.message));
}

const link = (name, to, why) => h("p", {}, to ? h("a", { href: to, target: "_blank", rel: "noreferrer" }, name) : `${name} ${why}.`);
