// Figures of the report, drawn on canvases: points, lines, areas and bars of what plotly's figures can be, without its
// 4.5 MB of script. Points of selected trials have their colours, others fade; a box selects.

import { html, useMemo, useRef, useState } from "./lib/preact.js";
import { Canvas, Tip, fit, tickText, ticks, useTheme } from "./canvas.js";
import { number } from "./values.js";

const FADED = 0.3, NEAR = 14, CLICK = 4, LINE = 12, RIGHT = 14, TOP = 10;

// ------------------------------------------------------------------ axes
function endsOf(values, tozero) {
  const found = values.filter(value => value !== null && Number.isFinite(value));
  let [low, high] = found.length ? [Math.min(...found), Math.max(...found)] : [0, 1];
  if (tozero) low = Math.min(low, 0);
  if (low === high) [low, high] = [low - (Math.abs(low) / 10 || 0.5), high + (Math.abs(high) / 10 || 0.5)];
  const edge = 0.04 * (high - low);
  return [tozero && low === 0 ? 0 : low - edge, high + edge];
}

// An axis of plotly's layout: `at` gives the place of a value from 0 to 1, null if it has none.
function axisOf(given, values, most) {
  const names = given.type === "category" || values.some(value => typeof value === "string") ? given.categoryarray ?? [...new Set(values)] : null;
  const places = new Map(names?.map((name, place) => [name, place])), log = given.type === "log";
  const to = value => value === null ? null : names ? places.get(value) : !log ? value : value > 0 ? Math.log10(value) : null;
  const [low, high] = given.range ?? (names ? [-0.5, names.length - 0.5] : endsOf(values.map(to), given.rangemode === "tozero"));
  const marks = names ?? given.tickvals ?? ticks(...log ? [10 ** low, 10 ** high] : [low, high], most, values);
  const at = value => {
    const place = to(value);
    return place === null || place === undefined ? null : given.autorange === "reversed" ? (high - place) / (high - low) : (place - low) / (high - low);
  };
  return {
    at, names, title: given.title?.text ?? "", back: share => low + share * (high - low),
    ticks: marks.map((mark, place) => [at(mark), names ? mark : given.ticktext?.[place] ?? tickText(mark)]).filter(([place]) => place >= -1e-9 && place <= 1 + 1e-9),
  };
}

// What is drawn: axes, and traces with plain values.
function sceneOf(figure, scale) {
  const { layout } = figure, below = [];
  const traces = figure.data.map(trace => {
    const bars = trace.type === "bar";
    // Areas lie on those before them.
    const base = bars ? trace.base : trace.stackgroup ? trace.y.map((_, at) => below[at] ?? 0) : null;
    if (trace.stackgroup) trace.y.forEach((value, at) => { below[at] = (below[at] ?? 0) + value; });
    return { ...trace, bars, from: base, top: trace.stackgroup ? [...below] : trace.y };
  });
  const xs = traces.flatMap(trace => trace.bars ? trace.x.map((value, at) => trace.from[at] + value) : trace.x);
  const given = figure.scales ? { ...figure.scales[scale], title: layout.yaxis.title } : layout.yaxis;
  return { traces, x: axisOf(layout.xaxis ?? {}, xs, 12), y: axisOf(given ?? {}, traces.flatMap(trace => trace.top), 7) };
}

const trialOf = (trace, at) => {
  const found = trace.customdata?.[at];
  return Array.isArray(found) ? found[1] : found ?? null;
};

// What plotly's template says of a point, line by line.
function told(trace, at) {
  const value = (key, place) => {
    const found = trace[key][at];
    return place !== undefined ? found[place] : key === "customdata" ? found : number(found);
  };
  const text = trace.hovertemplate.replace(/<extra>.*<\/extra>/, "").replace(/%\{(\w+)(?:\[(\d)\])?(?::[^}]*)?\}/g, (_, key, place) => value(key, place));
  return text.split("<br>");
}

// ------------------------------------------------------------------ painting
function frame(pen, wide, high, { x, y }, theme) {
  const texts = Math.max(0, ...y.ticks.map(([, text]) => Math.min(pen.measureText(text).width, 110)));
  const box = { left: texts + 12 + (y.title ? 18 : 0), right: wide - RIGHT, top: TOP, bottom: high - (x.title ? 42 : 24) };
  box.X = value => (at => at === null ? null : box.left + at * (box.right - box.left))(x.at(value));
  box.Y = value => (at => at === null ? null : box.bottom - at * (box.bottom - box.top))(y.at(value));
  const line = (...ends) => {
    pen.beginPath();
    pen.moveTo(ends[0], ends[1]);
    pen.lineTo(ends[2], ends[3]);
    pen.stroke();
  };
  [pen.fillStyle, pen.strokeStyle, pen.lineWidth] = [theme.ink, theme.line, 1];
  pen.textAlign = "right";
  let last = Infinity;
  for (const [place, text] of y.ticks) {
    const at = Math.round(box.bottom - place * (box.bottom - box.top)) + 0.5;
    if (!y.names) line(box.left, at, box.right, at);
    if (Math.abs(at - last) < LINE) continue;
    last = at;
    pen.fillText(fit(pen, text, 110), box.left - 6, at + 4);
  }
  pen.textAlign = "center";
  let free = -Infinity;
  const each = x.names ? (box.right - box.left) / x.names.length - 8 : Infinity;
  for (const [place, text] of x.ticks) {
    const at = Math.round(box.left + place * (box.right - box.left)) + 0.5, cut = fit(pen, text, Math.max(each, 16)), half = pen.measureText(cut).width / 2;
    if (!x.names) line(at, box.top, at, box.bottom);
    if (at - half < free) continue;
    pen.fillText(cut, Math.min(at, wide - half), box.bottom + 16);
    free = at + half + 8;
  }
  pen.fillText(fit(pen, x.title, box.right - box.left), (box.left + box.right) / 2, high - 6);
  if (y.title) {
    pen.save();
    pen.translate(12, (box.top + box.bottom) / 2);
    pen.rotate(-Math.PI / 2);
    pen.fillText(fit(pen, y.title, box.bottom - box.top), 0, 0);
    pen.restore();
  }
  pen.strokeStyle = theme.edge;
  line(box.left, box.bottom, box.right, box.bottom);
  line(box.left, box.top, box.left, box.bottom);
  return box;
}

function trail(pen, trace, { X, Y }, ys) {
  let before = null;
  trace.x.forEach((value, at) => {
    const [x, y] = [X(value), Y(ys[at])];
    if (x === null || y === null) before = null;
    else {
      if (!before) pen.moveTo(x, y);
      else if (trace.line?.shape === "hv") pen.lineTo(x, before[1]);
      else if (trace.line?.shape === "vh") pen.lineTo(before[0], y);
      pen.lineTo(x, y);
      before = [x, y];
    }
  });
}

// Steps: each value holds for as long before its time as after it.
function area(pen, trace, { X, Y }) {
  const half = (trace.x[1] - trace.x[0]) / 2, step = (at, y) => [-half, half].map(away => [X(trace.x[at] + away), Y(y)]);
  const above = trace.top.flatMap((y, at) => step(at, y)), below = trace.from.flatMap((y, at) => step(at, y));
  pen.fillStyle = trace.fillcolor;
  pen.beginPath();
  for (const [x, y] of [...above, ...below.reverse()]) pen.lineTo(x, y);
  pen.fill();
}

const barOf = (trace, at, { X, Y, bottom, top }, y) => {
  const high = 0.8 * (bottom - top) / y.names.length, left = X(trace.from[at]);
  return [left, Y(trace.y[at]) - high / 2, Math.max(X(trace.from[at] + trace.x[at]) - left, 1), high];
};

function dot(pen, x, y, size, cross) {
  if (cross) {
    for (const way of [-1, 1]) {
      pen.moveTo(x - size / 2, y - way * size / 2);
      pen.lineTo(x + size / 2, y + way * size / 2);
    }
  } else {
    pen.moveTo(x + size / 2, y);
    pen.arc(x, y, size / 2, 0, 2 * Math.PI);
  }
}

function dots(pen, trace, box, wanted) {
  const { color, size = 6, opacity = 1, symbol } = trace.marker ?? {};
  [pen.fillStyle, pen.strokeStyle, pen.lineWidth] = [color, color, 1.4];
  pen.globalAlpha *= opacity;
  pen.beginPath();
  trace.x.forEach((value, at) => {
    const [x, y] = [box.X(value), box.Y(trace.y[at])];
    if (x !== null && y !== null && wanted(trialOf(trace, at))) dot(pen, x, y, size, symbol === "x");
  });
  if (symbol === "x") pen.stroke();
  else pen.fill();
}

function paintAll(pen, wide, high, scene, theme, { chosen, looks }) {
  const box = frame(pen, wide, high, scene, theme), linked = chosen.size > 0 && scene.traces.some(trace => trace.customdata);
  pen.save();
  pen.beginPath();
  pen.rect(box.left, box.top, box.right - box.left, box.bottom - box.top);
  pen.clip();
  for (const trace of scene.traces) {
    pen.globalAlpha = 1;
    if (trace.stackgroup) area(pen, trace, box);
    else if (trace.bars)
      trace.x.forEach((_, at) => {
        pen.globalAlpha = linked && !chosen.has(trialOf(trace, at)) ? FADED : 1;
        pen.fillStyle = trace.marker.color;
        pen.fillRect(...barOf(trace, at, box, scene.y));
      });
    else {
      if (trace.mode.includes("lines")) {
        [pen.strokeStyle, pen.lineWidth] = [trace.line.color, trace.line.width];
        pen.beginPath();
        trail(pen, trace, box, trace.y);
        pen.stroke();
      }
      if (!trace.mode.includes("markers")) continue;
      pen.globalAlpha = linked ? FADED : 1;
      dots(pen, trace, box, trial => !chosen.has(trial));
    }
  }
  for (const trace of linked ? scene.traces.filter(each => each.customdata && each.mode?.includes("markers")) : []) {
    pen.globalAlpha = 1;
    if (!looks) dots(pen, trace, box, trial => chosen.has(trial));
    else
      trace.x.forEach((value, at) => {
        const look = looks.get(trialOf(trace, at)), [x, y] = [box.X(value), box.Y(trace.y[at])];
        if (!look || x === null || y === null) return;
        [pen.fillStyle, pen.strokeStyle, pen.lineWidth] = [look.colour, theme.panel, 1.5];
        pen.beginPath();
        dot(pen, x, y, 11);
        pen.fill();
        pen.stroke();
      });
  }
  pen.restore();
  return box;
}

// ------------------------------------------------------------------ what is under the mouse
function under(scene, box, x, y) {
  let found = null, near = NEAR;
  const { traces } = scene;
  if (x < box.left || x > box.right) return null;
  for (const trace of traces) {
    if (trace.stackgroup || (!trace.bars && !trace.customdata)) continue;
    for (let at = 0; at < trace.x.length; at++) {
      if (trace.bars) {
        const [left, top, wide, high] = barOf(trace, at, box, scene.y);
        if (x >= left - 1 && x <= left + wide + 1 && y >= top && y <= top + high) found = { trace, at, rect: [left, top, wide, high] };
      } else {
        const distance = Math.hypot(box.X(trace.x[at]) - x, box.Y(trace.y[at]) - y);
        if (distance < near) [found, near] = [{ trace, at, spot: [box.X(trace.x[at]), box.Y(trace.y[at])] }, distance];
      }
    }
  }
  if (found) return { ...found, trial: trialOf(found.trace, found.at), lines: told(found.trace, found.at) };
  const stacked = traces.filter(trace => trace.stackgroup);
  if (!stacked.length) return null;
  const distances = stacked[0].x.map(value => Math.abs(box.X(value) - x)), at = distances.indexOf(Math.min(...distances));
  const parts = stacked.filter(trace => trace.y[at] > 0.005).map(trace => `${trace.name}: ${trace.y[at].toFixed(2)}`);
  return { lines: [`${number(Number(stacked[0].x[at].toPrecision(3)))} ${scene.x.title}`, ...parts.reverse()], trial: null };
}

function inside(scene, box, [left, top, right, bottom]) {
  const found = new Set();
  for (const trace of scene.traces)
    trace.customdata?.forEach((_, at) => {
      const trial = trialOf(trace, at);
      if (trial === null) return;
      const [x, y, wide, high] = trace.bars ? barOf(trace, at, box, scene.y) : [box.X(trace.x[at]), box.Y(trace.y[at]), 0, 0];
      if (x !== null && y !== null && x <= right && x + wide >= left && y <= bottom && y + high >= top) found.add(trial);
    });
  return found;
}

// `picked`: see `usePicked`; `scale`: a name in the figure's scales; `onrange(low, high)`: a part of the x-axis was marked.
export function Figure({ figure, scale = figure.scale, height = 340, label, picked, onrange }) {
  const theme = useTheme(), scene = useMemo(() => sceneOf(figure, scale), [figure, scale]);
  const view = useRef(null), [hover, setHover] = useState(null), [drag, setDrag] = useState(null);
  const selects = scene.traces.some(trace => trace.customdata);
  const rect = drag && [Math.min(drag.x, drag.to[0]), Math.min(drag.y, drag.to[1]), Math.max(drag.x, drag.to[0]), Math.max(drag.y, drag.to[1])];
  if (rect && onrange) [rect[1], rect[3]] = [view.current.top, view.current.bottom];
  const isClick = rect && rect[2] - rect[0] < CLICK && (onrange || rect[3] - rect[1] < CLICK);
  const onpointer = (what, x, y, event) => {
    const box = view.current;
    if (!box) return;
    if (what === "leave") {
      setHover(null);
      setDrag(null);
    } else if (what === "down" && event.button === 0 && (selects || onrange)) {
      setHover(null);
      setDrag({ x, y, to: [x, y] });
    } else if (what === "move" && drag) setDrag({ ...drag, to: [x, y] });
    else if (what === "move") {
      const it = under(scene, box, x, y);
      setHover(it && { ...it, x, y });
    } else if (what === "up" && drag) {
      setDrag(null);
      const trial = under(scene, box, x, y)?.trial ?? null, share = place => Math.min(Math.max((place - box.left) / (box.right - box.left), 0), 1);
      if (onrange) {
        if (!isClick) onrange(scene.x.back(share(rect[0])), scene.x.back(share(rect[2])));
      } else if (!isClick) picked.choose(inside(scene, box, rect), event.shiftKey);
      else if (trial !== null) picked.toggle(trial);
    }
  };
  const over = pen => {
    [pen.strokeStyle, pen.lineWidth] = [theme.ink, 1.5];
    if (rect && !isClick) {
      pen.fillStyle = theme.ink;
      pen.globalAlpha = 0.12;
      pen.fillRect(rect[0], rect[1], rect[2] - rect[0], rect[3] - rect[1]);
      pen.globalAlpha = 1;
      pen.strokeRect(rect[0], rect[1], rect[2] - rect[0], rect[3] - rect[1]);
    } else if (hover?.spot) {
      pen.beginPath();
      dot(pen, ...hover.spot, 14);
      pen.stroke();
    } else if (hover?.rect) pen.strokeRect(...hover.rect);
  };
  return html`<${Canvas} label=${label} height=${height} on=${[scene, theme, picked.chosen, picked.looks]} over=${over} onpointer=${onpointer}
    cursor=${hover?.trial !== null && hover?.trial !== undefined ? "pointer" : onrange ? "ew-resize" : selects ? "crosshair" : ""}
    paint=${(pen, wide, high) => { view.current = paintAll(pen, wide, high, scene, theme, picked); view.current.size = [wide, high]; }}>
    ${hover && !drag && html`<${Tip} x=${hover.x} y=${hover.y} size=${view.current.size} lines=${hover.lines} />`}<//>`;
}
