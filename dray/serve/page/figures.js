// Figures of the report's kind, drawn by plotly, which is loaded when the first one is needed.

import { html, useEffect, useRef, useState } from "./lib/preact.js";
import { config, layoutOf, narrow, themes } from "./plots.js";

const dark = matchMedia("(prefers-color-scheme: dark)");
export const theme = () => themes[dark.matches ? "dark" : "light"];

// Draws again when the screen becomes dark or light.
export function useTheme() {
  const [, again] = useState(0);
  useEffect(() => {
    const listen = () => again(it => it + 1);
    dark.addEventListener("change", listen);
    return () => dark.removeEventListener("change", listen);
  }, []);
  return theme();
}

let plotly = null;
const loaded = () => plotly ??= new Promise((done, failed) => {
  document.head.append(Object.assign(document.createElement("script"), {
    src: "/static/plotly.js", onload: () => done(window.Plotly), onerror: () => failed(new Error("plotly could not be loaded")),
  }));
});

export function Figure({ figure, scale = figure.scale, small = false, onpoint }) {
  const place = useRef(null), colours = useTheme(), act = useRef(onpoint), [trouble, setTrouble] = useState("");
  act.current = onpoint;
  useEffect(() => {
    loaded().then(async library => {
      const spot = place.current;
      if (!spot?.isConnected) return;
      const layout = { ...layoutOf(figure, scale, colours), uirevision: `${scale}` };
      if (figure.layout.height) spot.style.height = `${figure.layout.height}px`;
      const first = !spot.on;
      await library.react(spot, figure.data, layout, small || narrow() ? { ...config, displayModeBar: false } : config);
      if (first) spot.on("plotly_click", event => act.current?.(event.points[0]));
    }).catch(error => setTrouble(error.message));
  }, [figure, scale, colours]);
  useEffect(() => () => window.Plotly?.purge(place.current), []);
  return trouble ? html`<p class="trouble">${trouble}</p>` : html`<div ref=${place} class=${small ? "plot small" : "plot"} />`;
}
