// Parallel coordinates on a canvas: an axis for each dimension, a line for each trial, selected by dragging along axes.

import { count, h, number } from "./dom.js";
import { theme } from "./figures.js";

const TOP = 54, BOTTOM = 16, SIDE = 62, TICKS = 5;

function ticksOf(dimension) {
  if (dimension.tickvals) return dimension.tickvals.map((value, place) => [value, dimension.ticktext[place]]);
  const [low, high] = dimension.ends;
  return Array.from({ length: TICKS }, (_, place) => low + (high - low) * place / (TICKS - 1)).map(value => [value, number(Number(value.toPrecision(3)))]);
}

function mix(scale, share) {
  const place = scale.findIndex(([stop]) => stop >= share);
  if (place <= 0) return scale[0][1];
  const [[from, one], [to, other]] = [scale[place - 1], scale[place]];
  const part = (share - from) / (to - from), channel = (colour, at) => parseInt(colour.slice(at, at + 2), 16);
  return `rgb(${[1, 3, 5].map(at => Math.round(channel(one, at) * (1 - part) + channel(other, at) * part)).join()})`;
}

// The trace is plotly's "parcoords": dimensions, and a line's colour between 0, the best, and 1.
export function parallel(trace) {
  const canvas = h("canvas", { role: "img" });
  const note = h("p", { className: "quiet", role: "status" });
  const place = h("div", { className: "wide" }, canvas);
  let dimensions, lines, left = "", brushes = new Map(), drag = null;

  function offer(found, note = "") {
    left = note;
    dimensions = found.dimensions.map(dimension => {
      const values = dimension.values.filter(value => value !== null);
      let ends = dimension.range ?? [Math.min(...values), Math.max(...values)];
      if (ends[0] === ends[1]) ends = [ends[0] - 0.5, ends[1] + 0.5];
      return { ...dimension, ends };
    });
    lines = found.line.color.map(share => mix(found.line.colorscale, share ?? 1));
    for (const label of brushes.keys()) if (!dimensions.some(one => one.label === label)) brushes.delete(label);
    canvas.setAttribute("aria-label", `Parallel coordinates of ${count(lines.length)} trials: ${dimensions.map(one => one.label).join(", ")}`);
    paint();
  }

  const across = place => SIDE + place * (canvas.clientWidth - 2 * SIDE) / Math.max(dimensions.length - 1, 1);
  const down = (dimension, value) => {
    const [low, high] = dimension.ends;
    return TOP + (1 - (value - low) / (high - low)) * (canvas.clientHeight - TOP - BOTTOM);
  };
  const isIn = trial => dimensions.every(one => {
    const brush = brushes.get(one.label), value = one.values[trial];
    return !brush || (value !== null && down(one, value) >= brush[0] - 1 && down(one, value) <= brush[1] + 1);
  });

  function paint() {
    canvas.style.minWidth = `${SIDE * 2 + 88 * (dimensions.length - 1)}px`;
    const wide = canvas.clientWidth, high = canvas.clientHeight, dots = window.devicePixelRatio || 1;
    if (!wide) return;
    [canvas.width, canvas.height] = [wide * dots, high * dots];
    const pen = canvas.getContext("2d"), { ink, edge } = theme();
    pen.scale(dots, dots);
    pen.lineJoin = "round";
    const chosen = lines.map((_, trial) => isIn(trial));
    const many = Math.max(0.25, Math.min(0.9, 60 / lines.length));
    for (const shown of [false, true]) {
      pen.globalAlpha = shown ? many : many / 8;
      pen.lineWidth = 1.3;
      for (let trial = 0; trial < lines.length; trial++) {
        if (chosen[trial] !== shown) continue;
        pen.strokeStyle = lines[trial];
        pen.beginPath();
        let started = false;
        dimensions.forEach((one, at) => {
          const value = one.values[trial];
          if (value === null) started = false;
          else if (started) pen.lineTo(across(at), down(one, value));
          else [started] = [true, pen.moveTo(across(at), down(one, value))];
        });
        pen.stroke();
      }
    }
    pen.globalAlpha = 1;
    pen.font = "12px system-ui, sans-serif";
    dimensions.forEach((one, at) => {
      const x = across(at), last = at === dimensions.length - 1;
      pen.strokeStyle = edge;
      pen.lineWidth = 1;
      pen.beginPath();
      pen.moveTo(x, TOP);
      pen.lineTo(x, high - BOTTOM);
      pen.stroke();
      const brush = brushes.get(one.label);
      if (brush) {
        pen.fillStyle = ink;
        pen.globalAlpha = 0.25;
        pen.fillRect(x - 5, brush[0], 10, brush[1] - brush[0]);
        pen.globalAlpha = 1;
      }
      pen.fillStyle = ink;
      pen.textAlign = at === 0 ? "left" : last ? "right" : "center";
      const label = one.label.length > 18 ? `${one.label.slice(0, 17)}…` : one.label;
      pen.fillText(label, at === 0 ? 4 : last ? wide - 4 : x, TOP - (at % 2 ? 34 : 16));
      pen.textAlign = last ? "left" : "right";
      pen.strokeStyle = getComputedStyle(document.body).backgroundColor;
      pen.lineWidth = 3;
      for (const [value, text] of ticksOf(one))
        for (const write of ["strokeText", "fillText"]) pen[write](text, x + (last ? 5 : -5), down(one, value) + 4);
    });
    const found = chosen.filter(Boolean).length;
    note.textContent = brushes.size ? `${count(found)} of ${count(lines.length)} trials are selected. Click an axis to select all.`
      : `The best trials are red. Drag along an axis to select trials. ${left}`;
  }

  const axisAt = event => {
    const box = canvas.getBoundingClientRect(), x = event.clientX - box.left;
    const at = dimensions.findIndex((_, place) => Math.abs(across(place) - x) < 24);
    return at < 0 ? null : { label: dimensions[at].label, y: Math.min(Math.max(event.clientY - box.top, TOP), canvas.clientHeight - BOTTOM) };
  };
  canvas.addEventListener("pointerdown", event => {
    drag = axisAt(event);
    if (drag) canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", event => {
    canvas.style.cursor = axisAt(event) ? "ns-resize" : "";
    if (!drag) return;
    const y = Math.min(Math.max(event.clientY - canvas.getBoundingClientRect().top, TOP), canvas.clientHeight - BOTTOM);
    if (Math.abs(y - drag.y) > 3) brushes.set(drag.label, [Math.min(y, drag.y), Math.max(y, drag.y)]);
    paint();
  });
  canvas.addEventListener("pointerup", event => {
    const at = drag && axisAt(event);
    if (at && at.label === drag.label && Math.abs(at.y - drag.y) <= 3) brushes.delete(drag.label);
    drag = null;
    paint();
  });
  new ResizeObserver(() => dimensions && paint()).observe(canvas);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => canvas.isConnected && paint());
  const whole = h("div", {}, place, note);
  whole.offer = offer;
  if (trace) offer(trace);
  return whole;
}
