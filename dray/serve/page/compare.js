// Trials of one or several experiments side by side.

import { Poll, experiment, get } from "./api.js";
import { address, badge, count, h, metricName, number, plural, put, shown } from "./dom.js";
import { draw } from "./figures.js";
import { metricFigure } from "./trial.js";

const MOST = 12, EVERY_MS = 5000;
const COLOURS = ["#2f86d1", "#d81b60", "#12a07a", "#e39a00", "#9a4fc4", "#d5493a", "#6f7d8f", "#7cc576", "#b0752f", "#17becf", "#e377c2", "#5254a3"];

// ------------------------------------------------------------------ what is picked
const picked = () => JSON.parse(sessionStorage.getItem("picked") ?? "[]");
export const isPicked = (name, trial) => picked().some(([one, other]) => one === name && other === trial);

export function pick(name, trial, on) {
  const left = picked().filter(([one, other]) => one !== name || other !== trial);
  sessionStorage.setItem("picked", JSON.stringify(on ? [...left, [name, trial]] : left));
  showPicked();
}

const compareAddress = found => `#/compare?${new URLSearchParams(found.map(([name, trial]) => ["t", `${trial}:${name}`]))}`;

export function showPicked() {
  const found = picked(), place = document.getElementById("picked");
  place.hidden = found.length === 0 || location.hash.startsWith("#/compare");
  place.replaceChildren(`${plural(found.length, "trial")} picked `, h("a", { href: compareAddress(found) }, "Compare"), " ",
    h("button", {
      className: "plain", onclick: () => {
        sessionStorage.removeItem("picked");
        for (const box of document.querySelectorAll("#main input[type=checkbox][aria-label^=compare]")) box.checked = false;
        showPicked();
      },
    }, "Clear"));
}

// ------------------------------------------------------------------ the view
export function showCompare(place, query) {
  document.title = "Compare · dray";
  const all = query.getAll("t").map(each => /^(\d+):(.+)$/.exec(each)).filter(Boolean).map(([, trial, name]) => [name, Number(trial)]);
  const asked = all.slice(0, MOST);
  const told = h("p", { className: "quiet", role: "status" }), differences = h("ul"), table = h("table", { className: "compare", "aria-label": "Trials compared" });
  const metric = h("select", { "aria-label": "Metric", onchange: () => drawMetric() }), plot = h("div", { className: "plot tall" });
  place.append(h("nav", { className: "crumbs", "aria-label": "Where this is" }, h("a", { href: "#/" }, "Experiments"), " / compare"),
    h("h1", {}, "Compare"), told, h("section", {}, h("h2", {}, "Metrics"), h("p", { className: "controls" }, h("label", {}, "metric ", metric)), plot),
    h("section", {}, h("h2", {}, "Trials"), differences, h("p", { className: "quiet" }, "What differs is marked."), h("div", { className: "wide" }, table)));
  if (!asked.length) {
    put(told, "Pick trials in the tables of experiments, with their boxes or with x.");
    plot.hidden = true;
    return;
  }
  put(told, all.length > MOST ? `The first ${MOST} of ${plural(all.length, "trial")}.` : "");
  let found = [];
  const several = new Set(asked.map(([name]) => name)).size > 1;

  new Poll(async signal => {
    found = await Promise.all(asked.map(async ([name, trial], place) => {
      const path = `${experiment(name)}/trials/${trial}`;
      const [about, metrics] = await Promise.all([get(path, signal), get(`${path}/metrics`, signal)]);
      return { name, trial, about, ...metrics, colour: COLOURS[place] };
    }));
    offerMetrics();
    fill();
    drawMetric();
    if (several) return;
    const [first, ...others] = found, path = `${experiment(first.name)}/comparison?a=${first.trial}`;
    const texts = await Promise.all(others.map(each => get(`${path}&b=${each.trial}`, signal).then(it => it.text, () => null)));  // it may not have validated
    differences.replaceChildren(...texts.filter(Boolean).map(text => h("li", {}, `${text[0].toUpperCase()}${text.slice(1)}.`)));
  }, EVERY_MS);

  function offerMetrics() {
    const names = [...new Set(found.flatMap(each => each.series.map(({ kind, name }) => metricName(kind, name))))].sort();
    if (names.join() === [...metric.options].map(option => option.value).join()) return;
    const before = metric.value || metricName("validation", found[0].metric);
    metric.replaceChildren(...names.map(each => new Option(each)));
    metric.value = names.includes(before) ? before : names[0] ?? "";
  }

  function drawMetric() {
    const series = found.flatMap(each => {
      const mine = each.series.find(({ kind, name }) => metricName(kind, name) === metric.value);
      return mine ? [{ ...mine, label: label(each), colour: each.colour }] : [];
    });
    plot.hidden = series.length === 0;
    if (series.length) draw(plot, metricFigure(metric.value, series));
  }

  const label = ({ name, trial }) => several ? `${name} ${trial}` : `trial ${trial}`;

  function fill() {
    const facts = [
      ["state", it => badge(it.about.state), it => it.about.state], ["best", it => `${number(it.about.best_metric)}`],
      ["metric", it => it.metric], ["rank", it => it.about.rank === null ? "–" : `${count(it.about.rank)} of ${count(it.about.of)}`],
      ["batches", it => count(it.about.batches)], ["restarts", it => count(it.about.restarts)],
    ].map(([name, show, key = show]) => [name, show, key]);
    const names = [...new Set(found.flatMap(each => Object.keys(each.about.hparams)))];
    const drawn = names.map(name => [name, it => shown(it.about.hparams[name]), it => shown(it.about.hparams[name])]);
    const differs = key => new Set(found.map(key)).size > 1;
    const line = ([name, show, key], mark) => h("tr", { className: mark && differs(key) ? "differs" : "" },
      h("th", { scope: "row" }, name), ...found.map(each => h("td", {}, show(each))));
    const square = colour => {
      const box = h("i", { className: "square" });
      box.style.background = colour;
      return box;
    };
    table.replaceChildren(
      h("thead", {}, h("tr", {}, h("td"), ...found.map(each => h("th", { scope: "col" }, square(each.colour), h("a", { href: address(each.name, each.trial) }, label(each)))))),
      h("tbody", {}, ...facts.map(each => line(each, false)), ...drawn.map(each => line(each, true))));
  }
}
