// Parallel coordinates: an axis for each dimension, a line for each trial. Dragging along axes selects; so do conditions.

import { html, useMemo, useRef, useState } from "./lib/preact.js";
import { Canvas, Tip, fit, tickText, ticks, useTheme } from "./canvas.js";
import { conditionsOf, meets, withCondition } from "./conditions.js";
import { useParam } from "./url.js";
import { count, number, plural } from "./values.js";

const TOP = 52, BOTTOM = 14, SIDE = 64, APART = 92, HEIGHT = 420, NEAR = 10, CLICK = 4, LINE = 12;
const MANY = 300;  // lines from which they are one pixel wide, which is drawn several times as fast

function mix(scale, share) {
  const place = scale.findIndex(([stop]) => stop >= share);
  if (place <= 0) return scale[0][1];
  const [[from, one], [to, other]] = [scale[place - 1], scale[place]];
  const part = (share - from) / (to - from), channel = (colour, at) => parseInt(colour.slice(at, at + 2), 16);
  return `rgb(${[1, 3, 5].map(at => Math.round(channel(one, at) * (1 - part) + channel(other, at) * part)).join()})`;
}

// Of plotly's "parcoords": dimensions, whose `places` are 0 at the bottom and 1 at the top, and trials with their colours.
// `wanted`: the order of the dimensions, as text.
function sceneOf({ dimensions, customdata, line }, wanted) {
  const given = dimensions.map((_, at) => at), asked = wanted.split(",").map(Number);
  const order = asked.length === given.length && given.every(at => asked.includes(at)) ? asked : given;
  const scene = order.map(at => dimensions[at]).map(given => {
    const there = given.values.filter(value => value !== null);
    let [low, high] = given.range ?? (there.length ? [Math.min(...there), Math.max(...there)] : [0, 1]);
    if (low === high) [low, high] = [low - 0.5, high + 0.5];
    const share = value => value === null ? null : (value - low) / (high - low);
    const raw = value => given.log ? 10 ** value : value;
    const marks = given.tickvals?.length > 1 ? given.tickvals : given.log ? ticks(10 ** low, 10 ** high).map(Math.log10) : ticks(low, high, 5, there);
    return {
      label: given.label, names: given.names, share, places: given.values.map(share),
      values: given.names ? given.values : given.values.map(value => value === null ? null : raw(value)),
      at: value => share(given.log ? Math.log10(value) : value), back: place => raw(low + place * (high - low)),
      ticks: marks.map((mark, at) => [share(mark), given.tickvals === marks ? given.ticktext[at] : tickText(Number(raw(mark).toPrecision(6)))]),
    };
  });
  return { order, dimensions: scene, trials: customdata, colours: line.color.map(share => mix(line.colorscale, share ?? 1)) };
}

const valueOf = (dimension, at) => dimension.names ? dimension.names[dimension.values[at]] ?? "–" : number(dimension.values[at]);

function stroke(pen, { dimensions }, { across, down }, at) {
  pen.beginPath();
  let started = false;
  dimensions.forEach((each, place) => {
    const share = each.places[at];
    if (share === null) started = false;
    else if (started) pen.lineTo(across(place), down(share));
    else [started] = [true, pen.moveTo(across(place), down(share))];
  });
  pen.stroke();
}

function paintLines(pen, scene, view, { chosen, looks }) {
  const { trials, colours } = scene;
  const many = Math.max(0.3, Math.min(0.9, 60 / trials.length)), thin = trials.length > MANY ? 1 / devicePixelRatio : 1.3, linked = trials.some(trial => chosen.has(trial));
  for (const mine of linked ? [false, true] : [false]) {
    const alpha = !linked ? many : mine ? Math.max(many, Math.min(0.95, 60 / chosen.size)) : many / 6;
    trials.forEach((trial, at) => {
      if (chosen.has(trial) !== mine) return;
      const look = looks?.get(trial);
      [pen.globalAlpha, pen.lineWidth, pen.strokeStyle] = [look ? 1 : alpha, look ? 2.4 : thin, look?.colour ?? colours[at]];
      pen.setLineDash(look?.dash ?? []);
      stroke(pen, scene, view, at);
    });
  }
  pen.setLineDash([]);
  pen.globalAlpha = 1;
}

function paintAxes(pen, wide, high, { dimensions }, { across, down }, theme, conditions) {
  const apart = across(1) - across(0);
  dimensions.forEach((each, place) => {
    const x = across(place), last = place === dimensions.length - 1, condition = conditions.get(each.label);
    pen.fillStyle = theme.edge;
    pen.fillRect(x - 0.5, TOP, 1, high - BOTTOM - TOP);
    if (condition) {
      pen.fillStyle = theme.ink;
      pen.globalAlpha = 0.28;
      const spans = condition.names ? each.names.map((_, at) => [each.share(at - 0.18), each.share(at + 0.18)]).filter((_, at) => meets(condition, each, at))
        : [[each.at(condition.low), each.at(condition.high)].map((end, at) => Math.min(Math.max(Number.isFinite(end) ? end : at, 0), 1))];
      for (const [from, to] of spans) pen.fillRect(x - 6, down(to) - 1, 12, down(from) - down(to) + 2);
      pen.globalAlpha = 1;
    }
    pen.fillStyle = theme.ink;
    pen.textAlign = place === 0 ? "left" : last ? "right" : "center";
    // Every other label is higher, so that it has room for two axes' breadth.
    pen.fillText(fit(pen, each.label, place === 0 || last ? apart + SIDE - 16 : 2 * apart - 16), place === 0 ? 4 : last ? wide - 4 : x, TOP - (place % 2 ? 34 : 16));
    pen.textAlign = last ? "left" : "right";
    [pen.strokeStyle, pen.lineWidth] = [theme.panel, 3];
    let before = Infinity;
    for (const [share, text] of each.ticks) {
      if (Math.abs(down(share) - before) < LINE) continue;
      before = down(share);
      const cut = fit(pen, text, (place === 0 || last ? SIDE : Math.min(apart, 110)) - 14);
      pen.strokeText(cut, x + (last ? 6 : -6), down(share) + 4);
      pen.fillText(cut, x + (last ? 6 : -6), down(share) + 4);
    }
  });
}

// What conditions look like, with names of this experiment.
function example(dimensions) {
  const numbers = dimensions.find(each => !each.names && each.label.length < 24), names = dimensions.find(each => each.names?.length && each.label.length < 24);
  return [numbers && withCondition("", numbers.label, [null, numbers.back(0.5)]), names && withCondition("", names.label, { names: names.names.slice(0, 1) })].filter(Boolean).join(" ");
}

// `picked`: see `usePicked`.
export function Parallel({ figure, picked, label }) {
  const [order, setOrder] = useParam("order"), theme = useTheme(), scene = useMemo(() => sceneOf(figure.data[0], order), [figure, order]), { dimensions, trials } = scene;
  const [where, setWhere] = useParam("where"), [hover, setHover] = useState(null), [drag, setDrag] = useState(null), size = useRef([0, 0]);
  const { conditions, trouble } = useMemo(() => conditionsOf(where, dimensions), [where, scene]);
  const meeting = text => {
    const found = conditionsOf(text, dimensions).conditions;
    const limits = dimensions.filter(each => found.has(each.label)).map(each => [each, found.get(each.label)]);
    return limits.length ? trials.filter((_, at) => limits.every(([each, condition]) => meets(condition, each, each.values[at]))) : [];
  };
  const matching = useMemo(() => meeting(where), [where, scene]);
  const across = place => SIDE + place * (size.current[0] - 2 * SIDE) / Math.max(dimensions.length - 1, 1);
  const down = share => TOP + (1 - share) * (HEIGHT - TOP - BOTTOM), up = y => Math.min(Math.max(1 - (y - TOP) / (HEIGHT - TOP - BOTTOM), 0), 1);
  const axisNear = x => Math.min(Math.max(Math.round((x - SIDE) / Math.max(across(1) - across(0), 1)), 0), dimensions.length - 1);
  const axisAt = x => Math.abs(across(axisNear(x)) - x) < 22 ? axisNear(x) : -1;
  const isLabel = drag && drag.axis >= 0 && drag.y < TOP;
  const move = (from, to) => {
    const next = [...scene.order];
    next.splice(to, 0, ...next.splice(from, 1));
    if (to !== from) setOrder(next.join());
  };
  // The line nearest to a point, and what it says.
  const under = (x, y) => {
    const left = Math.min(Math.max(Math.floor((x - SIDE) / (across(1) - across(0))), 0), dimensions.length - 2), part = (x - across(left)) / (across(1) - across(0));
    let found = null, near = NEAR;
    const [one, other] = [dimensions[left].places, dimensions[left + 1].places], some = trials.some(trial => picked.chosen.has(trial));
    trials.forEach((trial, at) => {
      if (one[at] === null || other[at] === null || (some && !picked.chosen.has(trial))) return;
      const distance = Math.abs(down(one[at] + part * (other[at] - one[at])) - y);
      if (distance < near) [found, near] = [at, distance];
    });
    return found;
  };
  const onpointer = (what, x, y, event) => {
    if (what === "leave") {
      setHover(null);
      setDrag(null);
    } else if (what === "down" && event.button === 0 && event.pointerType !== "touch") setDrag({ axis: axisAt(x), y, to: y, x });
    else if (what === "move" && drag) setDrag({ ...drag, to: y, x });
    else if (what === "move") {
      const axis = axisAt(x), at = y > TOP ? under(x, y) : null;
      setHover(y <= TOP && axis >= 0 ? { x, y, axis, lines: [dimensions[axis].label, "drag to move the axis"] }
        : at === null ? axis >= 0 ? { axis } : null : { x, y, axis, at, lines: [`trial ${trials[at]}`, ...dimensions.slice(0, 14).map(each => `${each.label}: ${valueOf(each, at)}`)] });
    } else if (what === "up") {
      setDrag(null);
      if (isLabel) move(drag.axis, axisNear(x));
      else if (drag && drag.axis >= 0 && Math.abs(drag.to - drag.y) > CLICK) brush(dimensions[drag.axis], up(Math.max(drag.y, drag.to)), up(Math.min(drag.y, drag.to)));
      else if (axisAt(x) >= 0 && conditions.has(dimensions[axisAt(x)].label)) select(withCondition(where, dimensions[axisAt(x)].label, null));
      else if (y > TOP && under(x, y) !== null) picked.toggle(trials[under(x, y)]);
    }
  };
  const select = text => picked.choose(meeting(text), false, text);
  const brush = (dimension, low, high) => {
    const names = dimension.names?.filter((_, at) => dimension.share(at) >= low && dimension.share(at) <= high);
    const limits = [low <= 0 ? null : dimension.back(low), high >= 1 ? null : dimension.back(high)];
    if (!names || names.length) select(withCondition(where, dimension.label, names ? { names } : limits));
  };
  const over = (pen, wide, high) => {
    paintAxes(pen, wide, high, scene, { across, down }, theme, conditions);
    [pen.strokeStyle, pen.lineWidth] = [theme.ink, 2];
    if (hover?.at < trials.length && !drag) stroke(pen, scene, { across, down }, hover.at);
    if (!drag || drag.axis < 0) return;
    [pen.fillStyle, pen.globalAlpha] = [theme.ink, 0.28];
    if (isLabel) pen.fillRect(drag.x - 2, TOP, 4, high - TOP - BOTTOM);
    else pen.fillRect(across(drag.axis) - 7, Math.min(drag.y, drag.to), 14, Math.abs(drag.to - drag.y));
  };
  const all = matching.length > 0 && matching.length === picked.chosen.size && matching.every(trial => picked.chosen.has(trial));
  const submit = event => {
    event.preventDefault();
    select(where);
  };
  return html`<form class="conditions" onsubmit=${submit}>
      <input type="search" value=${where} aria-label="Conditions that select trials" placeholder=${example(dimensions)} autocomplete="off" spellcheck=${false}
        oninput=${event => setWhere(event.target.value)} />
      <button disabled=${!matching.length || all}>Select</button>
      <span class=${trouble ? "trouble" : "quiet"} role="status">${trouble || (where ? `${count(matching.length)} of ${plural(trials.length, figure.note ? "shown trial" : "trial")}${all ? ", selected" : ""}`
        : "Drag along an axis to select trials, or write conditions.")}</span></form>
    <${Canvas} label=${label} height=${HEIGHT} least=${2 * SIDE + APART * (dimensions.length - 1)} on=${[scene, theme, picked.chosen, picked.looks]} over=${over}
      onpointer=${onpointer} cursor=${hover?.axis >= 0 ? hover.y < TOP ? "grab" : "ns-resize" : hover ? "pointer" : ""}
      paint=${(pen, wide, high) => {
        size.current = [wide, high];
        paintLines(pen, scene, { across, down }, picked);
      }}>
      ${hover?.lines && !drag && html`<${Tip} x=${hover.x} y=${hover.y} size=${size.current} lines=${hover.lines} />`}<//>
    <p class="quiet key">best <i style=${{ background: `linear-gradient(90deg, ${figure.data[0].line.colorscale.map(([stop, colour]) => `${colour} ${100 * stop}%`).join()})` }} /> worst, by rank</p>`;
}
