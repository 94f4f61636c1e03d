// What the page's own drawings have in common: a canvas as large as its place, a second one above it for what follows the
// mouse, and ticks.

import { html, useEffect, useLayoutEffect, useRef, useState } from "./lib/preact.js";
import { useMedia, useResize } from "./parts.js";

// Most selected trials that have a colour of their own.
export const OWN_LOOK = 12;
export const FONT = "12px system-ui, sans-serif";

const LIGHT = { ink: "#1c2530", line: "#e3e8ed", edge: "#aeb8c3", panel: "#ffffff" }, DARK = { ink: "#dbe2ea", line: "#2b343e", edge: "#4a5663", panel: "#1a2129" };
const PAPER = { ...LIGHT };  // another object, so that all is drawn anew, in the width of the paper
for (const when of ["beforeprint", "afterprint"]) addEventListener(when, () => document.body.classList.toggle("paper", when === "beforeprint"));

// The colours of drawings, also after the screen becomes dark or light, and on paper.
export function useTheme() {
  const [paper, set] = useState(false), isDark = useMedia("(prefers-color-scheme: dark)");
  useEffect(() => {
    const listen = event => set(event.type === "beforeprint");
    for (const when of ["beforeprint", "afterprint"]) addEventListener(when, listen);
    return () => { for (const when of ["beforeprint", "afterprint"]) removeEventListener(when, listen); };
  }, []);
  return paper ? PAPER : isDark ? DARK : LIGHT;
}

function drawOn(canvas, paint) {
  const { clientWidth: wide, clientHeight: high } = canvas, dots = devicePixelRatio || 1;
  if (!wide || !paint) return;
  [canvas.width, canvas.height] = [wide * dots, high * dots];  // which clears it
  const pen = canvas.getContext("2d");
  pen.scale(dots, dots);
  pen.font = FONT;
  pen.lineJoin = "round";
  paint(pen, wide, high);
}

// `paint(pen, width, height)` is called when one of `on` or the size changes, `over` at each drawing of the view;
// `onpointer(what, x, y, event)`: what is "move", "down", "up" or "leave"; `least`: the least width, which then scrolls.
export function Canvas({ label, height, least = 0, paint, over, on, onpointer, cursor, children }) {
  const base = useRef(null), top = useRef(null), now = useRef(null);
  now.current = () => {
    drawOn(base.current, paint);
    drawOn(top.current, over);
  };
  useLayoutEffect(() => drawOn(base.current, paint), on);
  useLayoutEffect(() => drawOn(top.current, over));
  useResize(base, () => {
    const { width, clientWidth } = base.current;
    if (width !== Math.trunc(clientWidth * (devicePixelRatio || 1))) now.current();
  });
  const tell = what => event => {
    const box = base.current.getBoundingClientRect();
    if (what === "down" && event.pointerType !== "touch") base.current.setPointerCapture(event.pointerId);
    onpointer(what, event.clientX - box.left, event.clientY - box.top, event);
  };
  return html`<div class="scroll" tabindex=${least ? 0 : null}><div class="canvas" style=${{ height, minWidth: least }}>
    <canvas ref=${base} role="img" aria-label=${label} style=${{ cursor }} onpointermove=${tell("move")} onpointerdown=${tell("down")}
      onpointerup=${tell("up")} onpointerleave=${tell("leave")} onpointercancel=${tell("leave")} />
    <canvas ref=${top} class="over" aria-hidden="true" />${children}</div></div>`;
}

// What is under the mouse, beside it: the first line is its name. It stays inside of a drawing of this size.
export const Tip = ({ x, y, size: [wide, high], lines }) => html`<div class="tip"
  style=${{ top: y, transform: `translateY(${-100 * y / high}%)`, ...x > wide / 2 ? { right: wide - x + 14 } : { left: x + 14 } }}>
  ${lines.map((line, at) => html`<div key=${at}>${at ? line : html`<b>${line}</b>`}</div>`)}</div>`;

// Text that is cut to a width in pixels.
export function fit(pen, text, wide) {
  if (pen.measureText(text).width <= wide) return text;
  let length = Math.floor(text.length * wide / pen.measureText(text).width);
  while (length > 1 && pen.measureText(`${text.slice(0, length)}…`).width > wide) length -= 1;
  return `${text.slice(0, length)}…`;
}

// Round numbers from `low` to `high`, about as many as `most`; whole ones for whole values.
export function ticks(low, high, most = 5, values = []) {
  const rough = Math.max((high - low) / most, values.every(Number.isInteger) && values.length ? 1 : 0), power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find(each => each * power >= rough * 0.999), first = Math.ceil(low / step - 1e-9);
  return Array.from({ length: Math.max(0, Math.floor(high / step + 1e-9) - first + 1) }, (_, at) => Number(((first + at) * step).toPrecision(12)));
}

export const tickText = value => value && (Math.abs(value) >= 1e6 || Math.abs(value) < 1e-4) ? value.toExponential().replace("e+", "e") : String(value);
