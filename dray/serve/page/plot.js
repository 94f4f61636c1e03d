// Lines and bands over common axes. uPlot has the axes, the cursor and the drag; the lines are drawn here, as each has its own x.

import { html, useLayoutEffect, useRef, useState } from "./lib/preact.js";
import uPlot from "./lib/uplot.js";
import { FONT, useTheme } from "./canvas.js";
import { number, singular } from "./values.js";

const NEAR = 24, CLICK = 4, FEW = 40, CROSS = 3.5;  // px, px, points or lines that are drawn with dots, px
const MOST_NUMBERS = 12;  // lines of one point that are shown as text
const NONE = [];  // always the same: new ones would be drawn

// An exponential moving average without the bias towards its start, as TensorBoard's; what is not finite stays so.
export function smooth(values, weight) {
  let last = 0, number = 0;
  return values.map(value => {
    if (!Number.isFinite(value)) return value;
    last = last * weight + (1 - weight) * value;
    number += 1;
    return last / (1 - weight ** number);
  });
}

const short = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 4 });
const tick = value => value === null ? "" : Math.abs(value) >= 1e4 ? short.format(value)
  : value && Math.abs(value) < 1e-3 ? value.toExponential().replace("e-", "e−") : number(value);

// Round numbers on a logarithmic axis, as of the report's: powers of ten, with 2 and 5 times of them where there is room.
function logTicks(least, most) {
  const decades = Math.log10(most / least);
  if (decades < 0.7) {
    const step = 10 ** Math.floor(Math.log10((most - least) / 2)) * ((most - least) / 10 ** Math.floor(Math.log10((most - least) / 2)) > 12 ? 5 : 2);
    return Array.from({ length: Math.floor(most / step) - Math.ceil(least / step) + 1 }, (_, at) => Number(((Math.ceil(least / step) + at) * step).toPrecision(10)));
  }
  const found = [];
  for (let power = Math.floor(Math.log10(least)); power <= Math.log10(most); power++)
    for (const times of decades > 2.5 ? [1] : [1, 2, 5]) found.push(Number((times * 10 ** power).toPrecision(10)));
  return found.filter(each => each >= least && each <= most);
}

// The unit for times up to so many seconds: [its seconds, its name].
export const timeUnit = most => most < 180 ? [1, "seconds"] : most < 3 * 3600 ? [60, "minutes"] : most < 72 * 3600 ? [3600, "hours"] : [86400, "days"];

// `series`: {x, y, label, colour, width, dash, alpha, trial, behind, halo}: y has text where it is not finite, which a cross at the
// bottom marks; one `behind`
// others can't be pointed at; a `halo` sets one off. `bands`: {x, low, middle, high, trials, of, colour, alpha, label}. `x`, `y`: labels of the axes; `log`: of y;
// `range`: of y, while nothing is zoomed. `onpoint(series, event)`: a line was clicked; `onbrush(series)`: a box was drawn
// with Shift, and these lines pass through it. Plots with the same `sync` share a cursor, and their zoom, unless that is given:
// `zoom`: [from, to] of x, or null; `onzoom(zoom)`. `label`: what is to be seen.
export function Lines({ series, bands = NONE, x, y, log = false, range = null, height = 300, label, onpoint, onbrush, sync, zoom, onzoom }) {
  const alone = series.filter(each => !each.behind);
  if (!bands.length && alone.length > 0 && alone.length <= MOST_NUMBERS && alone.every(each => each.y.length === 1)) return html`<${Numbers} series=${alone} x=${x} y=${y} label=${label} />`;
  return html`<${Chart} ...${{ series, bands, x, y, log, range, height, label, onpoint, onbrush, sync, zoom, onzoom }} />`;
}

// What has a single value each needs no axes.
const Numbers = ({ series, x, y, label }) => html`<div class="numbers" role="group" aria-label=${label ?? y}>${y && html`<h3>${y}</h3>`}<dl>${series.map(each => html`
  <dt key=${each.label}>${each.label}</dt><dd><b>${number(each.y[0])}</b> <span class="quiet">at ${each.x[0] === 1 ? `1 ${singular(x)}` : `${number(each.x[0])} ${x}`}</span></dd>`)}</dl></div>`;

function Chart({ series, bands, x, y, log, range, height, label, onpoint, onbrush, sync, zoom, onzoom }) {
  const place = useRef(null), chart = useRef(null), now = useRef(null), [tip, setTip] = useState(null), theme = useTheme();
  now.current = { series, bands, range, x, onpoint, onbrush, zoom, onzoom };
  useLayoutEffect(() => {  // at once: what is printed is drawn before
    chart.current = chartIn(place.current, now, { x, y, log, height, sync, theme, setTip });
    return () => { chart.current.destroy(); setTip(null); };
  }, [x, y, log, height, sync, theme]);
  useLayoutEffect(() => chart.current.update(), [series, bands, range, String(zoom), x, y, log, height, sync, theme]);
  return html`<div class="lines-frame">
    <div ref=${place} class="lines ${onpoint ? "choosing" : ""}" role="img" tabindex="0" aria-label=${label ?? y} style=${{ height }}
      onkeydown=${event => chart.current.key(event)} onblur=${() => setTip(null)} />
    ${tip && html`<div class="tip" style=${tip.style} aria-live=${tip.spoken ? "polite" : "off"}>${tip.text}</div>`}</div>`;
}

const groups = new Map();  // the charts that share a cursor and a zoom

function chartIn(place, now, { x, y, log, height, sync, theme, setTip }) {
  let lines = [], pixels = [], wide = [0, 1], zoom = null, over = -1, spot = 0, dragged = false;
  const width = () => Math.max(place.clientWidth, 120);
  const good = value => Number.isFinite(value) && (!log || value > 0), isLost = value => typeof value === "string", shows = value => good(value) || isLost(value);

  const ends = ({ x: xs, y: ys }) => [ys.findIndex(shows), ys.findLastIndex(shows)].filter(i => i >= 0).map(i => xs[i]).filter(Number.isFinite);

  function gather() {
    const { series, bands } = now.current;
    pixels = [];  // until they are painted, nothing can be pointed at
    lines = [...bands.map(band => ({ ...band, y: band.middle, band })), ...series];
    const xs = lines.flatMap(line => ends(line)), least = Math.min(...xs), most = Math.max(...xs);
    const from = least > most / 4 ? least - (most - least) * 0.03 : Math.min(0, least);  // from 0 unless that leaves much empty
    wide = xs.length ? [from === most ? 0 : from, most > 0 ? most + (most - from) * 0.01 : 1] : [0, 1];
    over = -1;
  }

  function high() {
    if (now.current.range && !zoom) return now.current.range;
    const [from, to] = zoom ?? wide;
    let least = Infinity, most = -Infinity;
    for (const line of lines)
      for (const ys of line.band ? [line.band.low, line.band.high] : [line.y])
        for (let i = 0; i < ys.length; i++)
          if (line.x[i] >= from && line.x[i] <= to && good(ys[i])) [least, most] = [Math.min(least, ys[i]), Math.max(most, ys[i])];
    if (least > most) return log ? [0.1, 1] : [0, 1];
    if (log) return least === most ? [least / 2, most * 2] : [least / (most / least) ** 0.04, most * (most / least) ** 0.04];
    const edge = least === most ? Math.abs(most) * 0.1 || 1 : (most - least) * 0.05;
    return [least - edge, most + edge];
  }

  const axis = { stroke: theme.ink, grid: { stroke: theme.line, width: 1 }, ticks: { stroke: theme.edge, width: 1 }, font: FONT, labelFont: FONT };
  const plot = new uPlot({
    width: width(), height, legend: { show: false }, padding: [8, 14, 0, 0],
    scales: { x: { time: false, range: () => zoom ?? wide }, y: { distr: log ? 3 : 1, range: high } },
    axes: [
      { ...axis, label: x, labelSize: 20, size: 34, values: (_, at) => at.map(tick) },
      { ...axis, ...log ? { splits: (_u, _at, least, most) => logTicks(least, most), filter: (_, at) => at } : {}, label: y, labelSize: 22, size: (_, values) => 18 + 7 * Math.max(2, ...(values ?? []).map(text => text?.length ?? 0)), values: (_, at) => at.map(tick) },
    ],
    series: [{}, { paths: () => null, points: { show: false } }],
    cursor: {
      y: false, points: { show: false }, drag: { x: true, y: false, setScale: false },
      bind: { mousedown: (u, _, handler) => event => { dragged = true; u.cursor.drag.y = event.shiftKey && Boolean(now.current.onbrush); handler(event); }, dblclick: () => null },
      ...sync ? { sync: { key: sync, scales: ["x", null], setSeries: false } } : {},
    },
    hooks: { draw: [paint], setCursor: [point], setSelect: [selected] },
  }, [[0, 1], [0, 1]], place);

  function paint({ ctx, bbox, valToPos }) {
    const ratio = devicePixelRatio, px = value => valToPos(value, "x", true), py = value => good(value) ? valToPos(value, "y", true) : NaN;
    const few = lines.length <= FEW, room = zoom ? 0 : 4 * ratio;  // dots at the edge are whole
    const bottom = bbox.top + bbox.height - 2 * CROSS * ratio, spot = value => isLost(value) ? bottom : py(value);
    pixels = lines.map(line => ({ x: line.x.map(px), y: line.y.map(py), spots: line.y.map(spot) }));  // spots: what can be pointed at
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left - room, bbox.top, bbox.width + 2 * room, bbox.height);
    ctx.clip();
    ctx.lineJoin = "round";
    for (const [at, { band }] of lines.entries()) if (band) paintBand(ctx, band, pixels[at].x, py, ratio);
    const order = [...lines.keys()].filter(at => at !== over);
    for (const at of over < 0 ? order : [...order, over]) {
      const { colour, width = 1.5, dash = [], alpha = 1, band, behind, halo } = lines[at], { x: xs, y: ys, spots } = pixels[at];
      ctx.strokeStyle = ctx.fillStyle = colour;
      ctx.globalAlpha = at === over ? 1 : alpha;
      ctx.lineWidth = ratio * ((band ? 2.2 : width) + (at === over ? 1.2 : 0));
      ctx.setLineDash([]);
      ctx.beginPath();
      let pen = false;
      for (let i = 0; i < xs.length; i++) {
        if (Number.isNaN(ys[i]) || Number.isNaN(xs[i])) pen = false;
        else {
          pen ? ctx.lineTo(xs[i], ys[i]) : ctx.moveTo(xs[i], ys[i]);
          pen = true;
        }
      }
      if (halo) stroke(ctx, { strokeStyle: theme.panel, lineWidth: ctx.lineWidth + 4 * ratio });
      ctx.setLineDash(dash.map(each => each * ratio));
      ctx.stroke();
      if (behind) continue;
      cross(ctx, xs.flatMap((x, i) => Number.isNaN(ys[i]) && !Number.isNaN(spots[i]) ? [[x, spots[i]]] : []), ratio);
      if (!(few && xs.length <= FEW || xs.length === 1)) continue;
      ctx.beginPath();
      for (let i = 0; i < xs.length; i++) if (!Number.isNaN(ys[i])) {
        ctx.moveTo(xs[i], ys[i]);
        ctx.arc(xs[i], ys[i], 2.4 * ratio, 0, 7);
      }
      ctx.fill();
    }
    ctx.restore();
  }

  function cross(ctx, places, ratio) {
    const arm = CROSS * ratio;
    ctx.beginPath();
    for (const [x, y] of places) for (const way of [-arm, arm]) {
      ctx.moveTo(x - arm, y - way);
      ctx.lineTo(x + arm, y + way);
    }
    ctx.setLineDash([]);
    ctx.lineWidth = 2 * ratio;
    ctx.stroke();
  }

  function stroke(ctx, look) {
    const before = Object.fromEntries(Object.keys(look).map(name => [name, ctx[name]]));
    Object.assign(ctx, look).stroke();
    Object.assign(ctx, before);
  }

  function paintBand(ctx, { x: at, low, high: top, colour, alpha = 1 }, xs, py, ratio) {
    ctx.fillStyle = colour;
    ctx.globalAlpha = 0.22 * alpha;
    ctx.beginPath();
    if (at.length === 1) ctx.rect(xs[0] - 5 * ratio, py(top[0]), 10 * ratio, py(low[0]) - py(top[0]));  // all ended there
    else {
      for (let i = 0; i < xs.length; i++) ctx.lineTo(xs[i], py(top[i]));
      for (let i = xs.length - 1; i >= 0; i--) ctx.lineTo(xs[i], py(low[i]));
    }
    ctx.fill();
  }

  // The line nearest to a place of the canvas, with its nearest point.
  function nearest(left, top) {
    let found = [-1, 0], least = (NEAR * devicePixelRatio) ** 2;
    for (const [at, { x: xs, y: points, spots: ys }] of pixels.entries()) {
      if (lines[at].behind) continue;
      for (let i = 0; i < xs.length; i++) {
        if (Number.isNaN(ys[i])) continue;
        const step = i + 1 < xs.length && !Number.isNaN(points[i] + points[i + 1]) ? [xs[i + 1] - xs[i], ys[i + 1] - ys[i]] : [0, 0];
        const along = Math.min(1, Math.max(0, ((left - xs[i]) * step[0] + (top - ys[i]) * step[1]) / (step[0] ** 2 + step[1] ** 2 || 1)));
        const away = (xs[i] + along * step[0] - left) ** 2 + (ys[i] + along * step[1] - top) ** 2;
        if (away <= least) [least, found] = [away, [at, along > 0.5 ? i + 1 : i]];
      }
    }
    return found;
  }

  // Of the line on top, the point nearest in x.
  function inStep(left) {
    const at = lines.findLastIndex(line => !line.behind), { x: xs, spots: ys } = pixels[at] ?? { x: [], spots: [] };
    let best = -1;
    for (let i = 0; i < xs.length; i++) if (!Number.isNaN(ys[i]) && (best < 0 || Math.abs(xs[i] - left) < Math.abs(xs[best] - left))) best = i;
    return best < 0 ? [-1, 0] : [at, best];
  }

  function point(u) {
    const { left, top } = u.cursor, ratio = devicePixelRatio;
    if (left < 0) return show(-1, 0);
    const [x0, y0] = [u.bbox.left + left * ratio, u.bbox.top + top * ratio];
    return u.cursor.event ? show(...nearest(x0, y0)) : show(...inStep(x0));  // without, it is that of another plot
  }

  function show(at, i, spoken = false) {
    if (at !== over) {
      over = at;
      plot.redraw(false, false);
    }
    spot = i;
    place.dataset.over = at < 0 ? "" : lines[at].label;
    if (!pixels[at]) return setTip(null);
    const left = pixels[at].x[i] / devicePixelRatio, top = pixels[at].spots[i] / devicePixelRatio, right = left > width() / 2;
    return setTip({ text: told(lines[at], i, now.current.x), spoken, style: { ...top > height / 3 ? { bottom: height - top + 8 } : { top: top + 8 }, ...right ? { right: width() - left + 14 } : { left: left + 14 } } });
  }

  function selected(u) {
    const { left, top, width: across, height: down } = u.select, mine = dragged;
    dragged = false;  // uPlot tells of a selection again when scales change
    u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
    if (mine && across >= CLICK) {
      if (u.cursor.drag.y) brush(left, top, across, down);
      else {
        const to = [u.posToVal(left, "x"), u.posToVal(left + across, "x")];
        requestAnimationFrame(() => zoomTogether(to));
      }
    }
  }

  function brush(left, top, across, down) {
    const ratio = devicePixelRatio, [x0, y0] = [plot.bbox.left + left * ratio, plot.bbox.top + top * ratio];
    const within = ({ x: xs, y: ys }) => xs.some((each, i) => passes([each, ys[i]], [xs[i + 1] ?? each, ys[i + 1] ?? ys[i]], [x0, y0, x0 + across * ratio, y0 + down * ratio]));
    now.current.onbrush(lines.filter((line, at) => !line.band && !line.behind && pixels[at] && within(pixels[at])));
  }

  const click = event => over >= 0 && !lines[over].band && now.current.onpoint?.(lines[over], event);
  const whole = () => zoomTogether(null), together = sync ? groups.get(sync) ?? groups.set(sync, new Set()).get(sync) : new Set();
  const zoomTo = to => { zoom = to; plot.setData([zoom ?? wide, [0, 1]]); };
  const zoomTogether = to => now.current.onzoom ? now.current.onzoom(to) : together.forEach(each => each(to));
  together.add(zoomTo);
  place.addEventListener("click", click);
  place.addEventListener("dblclick", whole);
  const watch = new ResizeObserver(() => width() !== plot.width && plot.setSize({ width: width(), height }));
  watch.observe(place);

  function update() {
    gather();
    if (now.current.onzoom) ({ zoom } = now.current);
    plot.setData([zoom ?? wide, [0, 1]]);
    place.drawn = { lines, x, log, scales: plot.scales };
  }

  return {
    update,
    key(event) {
      const ways = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }, there = [...lines.keys()].filter(at => !lines[at].behind && lines[at].x.length);
      if (event.key === "Enter" && over >= 0) return click(event);
      if (!ways[event.key] || !there.length) return undefined;
      event.preventDefault();
      const [step, along] = ways[event.key], from = there.indexOf(over);
      const at = there[from < 0 ? there.length - 1 : Math.min(Math.max(from + step, 0), there.length - 1)];
      return show(at, Math.min(Math.max(from < 0 ? 0 : spot + along, 0), lines[at].x.length - 1), true);
    },
    destroy() {
      place.drawn = null;
      together.delete(zoomTo);
      if (!together.size) groups.delete(sync);
      watch.disconnect();
      place.removeEventListener("click", click);
      place.removeEventListener("dblclick", whole);
      plot.destroy();
    },
  };
}

// Whether the stretch from one point to another passes through a box.
function passes([x0, y0], [x1, y1], [left, top, right, bottom]) {
  let from = 0, to = 1;
  for (const [start, way, least, most] of [[x0, x1 - x0, left, right], [y0, y1 - y0, top, bottom]]) {
    if (Number.isNaN(start + way)) return false;
    if (way === 0 && (start < least || start > most)) return false;
    if (way === 0) continue;
    const [one, other] = [(least - start) / way, (most - start) / way].sort((a, b) => a - b);
    [from, to] = [Math.max(from, one), Math.min(to, other)];
  }
  return from <= to;
}

function told({ label, x, y, band, raw }, i, axis) {
  const at = `at ${number(x[i])} ${axis}`;
  if (band) return `${label}; ${at}: median ${number(y[i])}, half of them ${number(band.low[i])} to ${number(band.high[i])}; ${band.trials[i]} of ${band.of} trials`;
  return `${label} ${at}: ${number(raw?.[i] ?? y[i])}${raw && typeof y[i] === "number" ? `, smoothed ${number(y[i])}` : ""}`;
}

// `entries`: {label, colour, dash, href, thick}
export const Legend = ({ entries }) => html`<ul class="legend lines-legend">${entries.map(({ label, colour, dash = [], href, band }) => html`<li key=${label}>
  <svg width="26" height="12" aria-hidden="true">${band && html`<rect x="0" y="1" width="26" height="10" fill=${colour} opacity=".25" />`}
    <line x1="0" x2="26" y1="6" y2="6" stroke=${colour} stroke-width="2.5" stroke-dasharray=${dash.join(" ")} /></svg>
  ${href ? html`<a href=${href}>${label}</a>` : label}</li>`)}</ul>`;

// A metric's places along its batches, epochs, or the time since its trial's start; and places, null where not finite.
export const xOf = (each, along, started) => along === "epochs" ? each.epochs : along === "time" ? each.times.map(at => Math.max(0, at - (started ?? each.times[0]))) : each.batches;
export const finite = values => values.map(value => typeof value === "number" ? value : null);

// What the crosses of these lines say; "" if there are none.
export const lost = series => series.some(each => each.y.some(value => typeof value === "string")) ? "A cross marks values that are NaN or infinite." : "";

// Lines that are smoothed, each before its own thin raw line.
export const smoothed = (series, weight) => weight <= 0 ? series : series.flatMap(each => [
  { ...each, width: 1, alpha: 0.3 * (each.alpha ?? 1), dash: [], behind: true }, { ...each, y: smooth(each.y, weight), raw: each.y },
]);
