// Lines over a common axis, drawn by uPlot.

import { html, useEffect, useRef } from "./lib/preact.js";
import uPlot from "./lib/uplot.js";
import { useTheme } from "./figures.js";

// Series with their own x as uPlot wants them: one x for all, and a gap of undefined where a series has no point.
function joined(series) {
  return uPlot.join(series.map(each => [each.x, each.y]));
}

// `series`: {x, y, label, colour, width, dash, alpha, trial}, y with null where it is not finite; `x`, `y`: labels of the
// axes; `log`: whether y is logarithmic; `onpoint(series)` when a line is clicked; plots with the same `sync` share a cursor.
export function Lines({ series, x, y, log = false, height = 300, label, onpoint, sync }) {
  const place = useRef(null), { ink, line, edge } = useTheme();
  useEffect(() => {
    const axis = { stroke: ink, grid: { stroke: line, width: 1 }, ticks: { stroke: edge, width: 1 }, font: "12px system-ui", labelFont: "12px system-ui" };
    const plot = new uPlot({
      width: Math.max(place.current.clientWidth, 100), height, legend: { show: false },
      scales: { x: { time: false }, y: { distr: log ? 3 : 1 } },
      cursor: { focus: { prox: 20 }, ...sync ? { sync: { key: sync } } : {} },
      axes: [{ ...axis, label: x }, { ...axis, label: y, size: 60 }],
      series: [{ label: x }, ...series.map(each => ({
        label: each.label, stroke: each.colour, width: each.width ?? 1.5, dash: each.dash ?? [], alpha: each.alpha ?? 1, spanGaps: true, points: { show: each.x.length < 40 },
      }))],
      hooks: { setSeries: [(_, at) => { place.current.dataset.at = at ?? ""; }] },
    }, joined(series), place.current);
    const watch = new ResizeObserver(() => plot.setSize({ width: Math.max(place.current.clientWidth, 100), height }));
    watch.observe(place.current);
    const click = () => {
      const at = Number(place.current.dataset.at);
      if (at > 0) onpoint?.(series[at - 1]);
    };
    place.current.addEventListener("click", click);
    const { current } = place;
    return () => { watch.disconnect(); plot.destroy(); current.removeEventListener("click", click); };
  }, [series, x, y, log, height, ink]);
  return html`<div ref=${place} class="lines" role="img" aria-label=${label ?? y} style=${{ minHeight: height }} />`;
}
