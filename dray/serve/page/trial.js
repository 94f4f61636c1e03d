// One trial: its metrics, hyperparameters, logs that follow, checkpoints and failures.

import { Poll, experiment, get, logAddress, news } from "./api.js";
import { isPicked, pick } from "./compare.js";
import { askForkTrial, askStopTrial } from "./dialogs.js";
import { address, badge, bytes, clock, count, duration, h, metricName, number, plural, put, shown } from "./dom.js";
import { draw } from "./figures.js";

const EVERY_MS = 3000, LOG_MS = 1500, MOST_LINES = 20000;
const ESCAPES = /\x1b\[[0-9;?]*[ -/]*[@-~]/g;  // colours of a terminal
const CONTROLS = /[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]|\r(?!\n)/g;  // they would hide code, or change its order
const COLOURS = { training: "#2f86d1", validation: "#d81b60" };

export function showTrial(place, name, trial) {
  document.title = `trial ${trial} · ${name} · dray`;
  const path = `${experiment(name)}/trials/${trial}`;
  const state = h("span"), tiles = h("div", { className: "tiles" }), hparams = h("tbody"), last = h("tbody");
  const code = h("section", { hidden: true }), difference = h("pre", { className: "diff", tabindex: "0", "aria-label": "Difference of the code" });
  const checkpoints = h("div"), failures = h("div"), source = h("p", { hidden: true }), verbs = h("span");
  const metric = h("select", { "aria-label": "Metric", onchange: () => drawMetric() });
  const plot = h("div", { className: "plot" }), none = h("p", { className: "quiet" }, "No metrics yet.");
  const box = h("input", { type: "checkbox", checked: isPicked(name, trial), onchange: () => pick(name, trial, box.checked) });
  place.append(
    h("nav", { className: "crumbs", "aria-label": "Where this is" }, h("a", { href: "#/" }, "Experiments"), " / ", h("a", { href: address(name) }, name), ` / trial ${trial}`),
    h("div", { className: "top" }, h("h1", {}, `Trial ${trial}`), state), tiles,
    h("p", { className: "actions" }, verbs, h("label", { className: "inline" }, box, " compare"), neighbour(-1), neighbour(1)),
    h("div", { className: "columns" },
      h("section", {}, h("h2", {}, "Hyperparameters"), source, h("table", { "aria-label": "Hyperparameters" }, hparams)),
      h("section", {}, h("h2", {}, "Last metrics"), h("table", { "aria-label": "Last metrics" }, last))),
    h("section", {}, h("h2", {}, "Metrics"), h("p", { className: "controls" }, h("label", {}, "metric ", metric)), plot, none),
    code, logs(name, path, trial),
    h("section", {}, h("h2", {}, "Checkpoints"), checkpoints),
    h("section", {}, h("h2", {}, "Failures"), failures));
  let series = [], searched = "", about = null;
  const stop = h("button", { className: "danger", hidden: true, onclick: () => askStopTrial(name, trial, () => poll.now()) }, "Stop");
  const fork = h("button", { hidden: true, onclick: () => askForkTrial(name, about) }, "Fork");
  verbs.append(stop, " ", fork);

  function neighbour(step) {
    return trial + step < 0 ? "" : h("a", { href: address(name, trial + step) }, step < 0 ? `‹ trial ${trial - 1}` : `trial ${trial + 1} ›`);
  }

  function tell(it) {
    about = it;
    stop.hidden = !it.submitted || !["PENDING", "RUNNING", "PAUSED"].includes(it.state);
    fork.hidden = !it.submitted || !it.checkpoints.length;
    state.replaceChildren(badge(it.state));
    const ran = it.started ? (it.ended ?? Date.now() / 1000) - it.started : null;
    const facts = [
      [number(it.best_metric), "best", it.rank === null ? "" : `rank ${count(it.rank)} of ${count(it.of)}`],
      [number(it.metric), "last", it.nan_since === null ? "" : `NaN since batch ${count(it.nan_since)}`],
      [count(it.batches), "batches", it.best_batches === null ? "" : `best at ${count(it.best_batches)}`],
      [duration(ran), "time", it.started ? `since ${clock(it.started)}${it.restarts ? `, ${plural(it.restarts, "restart")}` : ""}` : ""],
    ];
    tiles.replaceChildren(...facts.map(([value, label, more]) => h("div", {}, h("b", {}, value), h("span", {}, label), h("small", {}, more))));
    source.hidden = it.source_trial === null;
    if (it.repeat_of !== null) {
      source.hidden = false;
      source.replaceChildren("Repeat of ", h("a", { href: address(name, it.repeat_of) }, `trial ${it.repeat_of}`), `, seed ${it.repeat}.`);
    }
    if (it.source_trial !== null)
      source.replaceChildren("Forked from ", h("a", { href: address(name, it.source_trial) }, `trial ${it.source_trial}`), ` at batch ${count(it.source_batches)}.`);
    if (it.code !== null && code.hidden) tellCode(it.code);
    hparams.replaceChildren(...Object.entries(it.hparams).map(([key, value]) => h("tr", {}, h("th", { scope: "row" }, key), h("td", {}, shown(value)))));
    if (!hparams.children.length) hparams.append(h("tr", {}, h("td", { className: "quiet" }, it.repeat_of !== null ? "Those of the trial that it repeats." : it.source_trial === null ? "Drawn when it starts." : "Its source's, except those that were set; shown when it starts.")));
    checkpoints.replaceChildren(it.checkpoints_error ? h("p", { className: "trouble" }, it.checkpoints_error) : it.checkpoints.length
      ? h("div", { className: "wide" }, h("table", { "aria-label": "Checkpoints" },
        h("thead", {}, h("tr", {}, ...["batches", "size", "", "path"].map(each => h("th", { scope: "col" }, each)))),
        h("tbody", {}, ...it.checkpoints.map(each => h("tr", {}, h("td", {}, count(each.batches)), h("td", {}, bytes(each.size)),
          h("td", {}, [each.batches === it.best_batches ? "best" : "", each.complete ? "" : "incomplete"].filter(Boolean).join(", ")),
          h("td", { className: "path" }, each.path))))))
      : h("p", { className: "quiet" }, "None."));
    const open = [...failures.querySelectorAll("details")].map(each => each.open);
    failures.replaceChildren(...it.failures.length ? it.failures.map((each, place) => h("details", { open: open[place] ?? place === it.failures.length - 1 },
      h("summary", {}, `${clock(each.time)}: ${lastLine(each.error)}`, h("span", { className: "quiet" }, each.again ? " · restarted" : ` · given up${each.why ? `: ${each.why}` : ""}`)),
      h("pre", {}, each.error ?? ""))) : [h("p", { className: "quiet" }, "None.")]);
  }

  // Text of others: it is never HTML.
  async function tellCode(variant) {
    code.hidden = false;
    code.replaceChildren(h("h2", {}, "Code"), h("p", {}, `This trial runs variant ${variant} of the experiment's code:`), difference);
    try {
      const found = await get(`${experiment(name)}/variants/${encodeURIComponent(variant)}`);
      const lines = found.diff.replace(CONTROLS, it => `\\u${it.charCodeAt(0).toString(16).padStart(4, "0")}`).split("\n").map(line => h("span", { className: line.startsWith("+") ? "added" : line.startsWith("-") ? "removed" : "" }, `${line}\n`));
      difference.replaceChildren(...lines.slice(0, MOST_LINES));
      if (found.more || lines.length > MOST_LINES) difference.append("... and more");
    } catch (error) {
      difference.textContent = error.message;
    }
  }

  const key = each => metricName(each.kind, each.name);

  function tellMetrics(found) {
    [series, searched] = [found.series, metricName("validation", found.metric)];
    none.hidden = series.length > 0;
    plot.hidden = metric.parentElement.hidden = series.length === 0;
    last.replaceChildren(...series.map(each => h("tr", {}, h("th", { scope: "row" }, key(each)), h("td", {}, number(each.values.at(-1))),
      h("td", { className: "quiet" }, `at batch ${count(each.batches.at(-1))}`))));
    const names = series.map(key);
    if (names.join() !== [...metric.options].map(option => option.value).join()) {
      const before = metric.value || (names.includes(searched) ? searched : names[0]);
      metric.replaceChildren(...names.map(each => new Option(each)));
      metric.value = names.includes(before) ? before : names[0];
    }
    if (series.length) drawMetric();
  }

  function drawMetric() {
    const found = series.find(each => key(each) === metric.value);
    if (found) draw(plot, metricFigure(metric.value, [{ ...found, label: `trial ${trial}`, colour: COLOURS[found.kind] }]));
  }

  const poll = new Poll(async signal => {
    const now = await news(path, signal);
    if (now) tell(now);
    else if (!tiles.children.length) tell(await get(path, signal));
  }, EVERY_MS);
  new Poll(async signal => {
    const now = await news(`${path}/metrics`, signal);
    if (now) tellMetrics(now);
    else if (!series.length) tellMetrics(await get(`${path}/metrics`, signal));
  }, EVERY_MS);
}

const lastLine = error => (error ?? "").trim().split("\n").at(-1) || "no reason given";

// Of one metric: a line for each series, over batches.
export function metricFigure(title, found) {
  const text = value => typeof value === "number" ? value : null;
  return {
    data: found.map(each => ({
      type: "scatter", mode: each.batches.length > 60 ? "lines" : "lines+markers", name: each.label, x: each.batches, y: each.values.map(text),
      line: { color: each.colour, width: 2 }, marker: { size: 5 }, hovertemplate: `${each.label.replace(/[<>%{}]/g, "")}<br>%{x:,} batches: %{y:.5g}<extra></extra>`,
    })),
    layout: { showlegend: found.length > 1, xaxis: { title: { text: "batches" }, rangemode: "tozero" }, yaxis: { title: { text: title } }, hovermode: "closest" },
  };
}

// ------------------------------------------------------------------ logs
function logs(name, path, trial) {
  const told = h("p", { className: "quiet", role: "status" }), text = h("pre", { className: "log", tabindex: "0", "aria-label": "Output of the trial" });
  const follow = h("input", { type: "checkbox", checked: true });
  let after = "", lines = 0, skipped = 0;
  text.addEventListener("scroll", () => {
    follow.checked = text.scrollHeight - text.scrollTop - text.clientHeight < 40;
  });
  follow.addEventListener("change", () => { if (follow.checked) text.scrollTop = text.scrollHeight; });

  new Poll(async signal => {
    const found = await get(`${path}/logs${after ? `?after=${encodeURIComponent(after)}` : ""}`, signal);
    if (!after) skipped = found.skipped;
    after = found.next;
    if (found.lines.length) {
      // As a terminal would show them: without colours, and of a line that was overwritten the last text.
      const clean = found.lines.map(line => line.replace(ESCAPES, "").replace(/\r+$/, "").split("\r").at(-1));
      text.append(document.createTextNode(clean.join("\n") + "\n"));
      lines += clean.length;
      if (lines > MOST_LINES && text.childNodes.length > 1) {
        lines -= text.firstChild.data.split("\n").length - 1;
        skipped += text.firstChild.data.length;
        text.firstChild.remove();
      }
      if (follow.checked) text.scrollTop = text.scrollHeight;
    }
    text.hidden = lines === 0;
    put(told, lines === 0 ? `Trial ${trial} has printed nothing${found.running ? " yet" : ""}.` : skipped ? `The first ${bytes(skipped)} are left out.` : "");
  }, LOG_MS);
  return h("section", {}, h("div", { className: "top" }, h("h2", {}, "Log"),
    h("span", {}, h("label", { className: "inline" }, follow, " follow"), " ", h("a", { href: logAddress(name, trial), download: "" }, "all of it"))), told, text);
}
