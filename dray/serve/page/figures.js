// Figures, drawn by plotly, which is loaded when the first one is needed.

import { h } from "./dom.js";
import { config, layoutOf, narrow, themes } from "./plots.js";

const dark = matchMedia("(prefers-color-scheme: dark)");
export const theme = () => themes[dark.matches ? "dark" : "light"];
let plotly = null;

function loaded() {
  plotly ??= new Promise((done, failed) => {
    document.head.append(h("script", {
      src: "/static/plotly.js", onload: () => done(window.Plotly),
      onerror: () => failed(new Error("plotly could not be loaded")),
    }));
  });
  return plotly;
}

const drawn = new Map();  // by place: how to draw it again

// Draws a figure of the report's kind into a place, or what has changed since.
export async function draw(place, figure, { scale = figure.scale, small = false, onpoint = null } = {}) {
  let library;
  try {
    library = await loaded();
  } catch (error) {
    place.replaceChildren(h("p", { className: "quiet" }, error.message));
    return;
  }
  if (!place.isConnected) return;
  const layout = { ...layoutOf(figure, scale, theme()), uirevision: `${scale}` };
  if (figure.layout.height) place.style.height = `${figure.layout.height}px`;
  await library.react(place, figure.data, layout, small || narrow() ? { ...config, displayModeBar: false } : config);
  if (onpoint && !drawn.has(place)) place.on("plotly_click", event => onpoint(event.points[0]));
  drawn.set(place, () => draw(place, figure, { scale, small, onpoint }));
}

dark.addEventListener("change", () => {
  for (const [place, again] of drawn) {
    if (place.isConnected) again();
    else drawn.delete(place);
  }
});

// A choice of the axis's scale for a figure that has several; `change` gets its name.
export function scaleChoice(change) {
  const select = h("select", { onchange: () => change(select.value) });
  const label = h("label", {}, "scale ", select);
  label.offer = figure => {
    const names = Object.keys(figure.scales ?? {}).sort((one, other) => (other === figure.scale) - (one === figure.scale));
    label.hidden = names.length < 2;
    if (names.join() === [...select.options].map(option => option.value).join()) return select.value;
    const before = select.value;
    select.replaceChildren(...names.map(name => new Option(name)));
    select.value = names.includes(before) ? before : figure.scale;
    return select.value;
  };
  return label;
}
