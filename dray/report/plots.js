// How figures look: for the report, which has this in it, and for the server's page, which imports it.

export const themes = {
  light: { ink: "#1c2530", line: "#e3e8ed", edge: "#aeb8c3", panel: "#ffffff" },
  dark: { ink: "#dbe2ea", line: "#2b343e", edge: "#4a5663", panel: "#1a2129" },
};
export const narrow = () => innerWidth < 600;

export function colours(figure, theme) {
  const found = {
    "font.color": theme.ink, "paper_bgcolor": "rgba(0,0,0,0)", "plot_bgcolor": "rgba(0,0,0,0)",
    "modebar.bgcolor": "rgba(0,0,0,0)", "modebar.color": theme.edge, "modebar.activecolor": theme.ink,
    "hoverlabel.bgcolor": theme.panel, "hoverlabel.bordercolor": theme.edge, "hoverlabel.font.color": theme.ink,
  };
  for (const axis of Object.keys(figure.layout).filter(name => /^[xy]axis/.test(name)))
    Object.assign(found, { [axis + ".gridcolor"]: theme.line, [axis + ".zerolinecolor"]: theme.edge,
                           [axis + ".linecolor"]: theme.edge });
  return found;
}

function set(object, path, value) {
  const names = path.split("."), last = names.pop();
  names.reduce((inner, name) => inner[name] ??= {}, object)[last] = value;
}

export const config = { responsive: true, displaylogo: false, displayModeBar: narrow() ? false : "hover",
                        modeBarButtonsToRemove: ["lasso2d", "select2d"] };

export function layoutOf(figure, scale, theme) {
  const layout = {
    margin: { l: narrow() ? 48 : 62, r: 12, t: 12, b: 48 }, font: { family: "system-ui, sans-serif", size: 13 },
    legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom" },
    dragmode: narrow() ? false : "zoom",  // a finger scrolls
    ...structuredClone(figure.layout),  // plotly writes into it
  };
  if (figure.scales)
    layout.yaxis = { title: { ...layout.yaxis.title, standoff: 8 }, automargin: true,
                     ...structuredClone(figure.scales[scale]) };
  delete layout.height;
  for (const [path, value] of Object.entries(colours(figure, theme)))
    set(layout, path, value);
  return layout;
}
