"""The figures about trials, in plotly's format. The page draws them, in the colours of its theme."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pandas as pd

from dray.figures.data import FigureData
from dray.figures.scale import logarithms, scaled, ticks_of
from searchers.domains import Categorical

Figure = dict[str, Any]
"""A mapping of "data" and "layout"; with a metric's axis also "scales" and "scale", see `scale.scaled`."""

RUNG_COLOURS = ("#8796aa", "#2f86d1", "#12a07a", "#e39a00", "#d5493a", "#9a4fc4")
BEST_COLOUR = "#d81b60"
RANK_SCALE = [(0.0, BEST_COLOUR), (0.1, "#e3a400"), (0.5, "#2f86d1"), (1.0, "#8796aa")]
"""From the best trial to the worst."""
LEAST_EXPLAINED = 0.1
"""The smallest R² of a forest whose importances are shown."""


def scatter(
    name: str, x: Iterable[Any], y: Iterable[Any], trials: Iterable[Any], hover: str, mode: str = "markers", **more: Any
) -> dict[str, Any]:
    """A trace with a point for each trial; `hover` is shown for the point under the mouse."""
    points = {"x": list(x), "y": list(y), "customdata": list(trials)}
    hovered = f"trial %{{customdata}}{hover}<extra></extra>"
    return {"type": "scatter", "mode": mode, "name": name, **points, "hovertemplate": hovered, **more}


def history(source: FigureData) -> Figure:
    """Each trial's best value at the time of its last validation, and the best value so far."""
    began = source.overview.began or 0.0
    rows = source.validations
    finite = rows[rows["value"].abs() < math.inf].sort_values("time", kind="stable")
    can_lead = finite[finite["trial_id"].isin(source.eligible.index)]
    so_far = (source.sign * can_lead["value"]).cummin()
    steps = can_lead[so_far.diff().fillna(-1) < 0]
    last = finite.groupby("trial_id")["time"].max()
    shown = source.shown[source.shown.index.isin(last.index)]
    unit_s, unit = time_unit(float(finite["time"].max() - began) if len(finite) else 0.0)
    if not can_lead.empty:  # up to the last validation
        steps = pd.concat([steps, steps.iloc[-1:].assign(time=finite["time"].iloc[-1])])
    bests = scatter(
        "best of a trial",
        (last.loc[shown.index] - began) / unit_s, shown["best_metric"], shown.index, ": %{y:.5g}",
        marker={"size": 5, "color": RUNG_COLOURS[1], "opacity": 0.6},
    )  # fmt: skip
    leader = {
        "type": "scatter",
        "mode": "lines",
        "name": "best so far",
        "x": ((steps["time"] - began) / unit_s).tolist(),
        "y": steps["value"].tolist(),
        "hovertemplate": "%{y:.5g}<extra></extra>",
        "line": {"color": BEST_COLOUR, "shape": "hv", "width": 2.2},
    }
    layout = {"xaxis": {"title": {"text": f"{unit} since creation"}, "rangemode": "tozero"}}
    return scaled({"data": [bests, leader], "layout": layout}, source.metric, source.ranked["best_metric"], source.sign)


def parallel(source: FigureData) -> Figure:
    """Parallel coordinates: an axis for each varying hyperparameter, then one for the metric; coloured by rank."""
    shown = source.shown.iloc[::-1]  # the best trials are drawn last, on top
    ranks = shown["score"].rank() - 1
    dimensions = [_dimension(source, name, shown[f"hparams.{name}"]) for name in source.varying]
    objectives = source.config.searcher.objectives
    metrics = {source.metric: ("best_metric", source.sign)} | {
        each.name: (f"metrics.{each.name}", 1 if each.smaller_is_better else -1)
        for each in (objectives.objectives[1:] if objectives is not None else ())
    }
    for name, (column, sign) in metrics.items():
        log = scaled({"layout": {}}, name, shown[column], sign)["layout"]["yaxis"].get("type") == "log"
        dimensions.append(_numbers(name, shown[column], log=log))
    line = {"color": (ranks / max(ranks.max(), 1)).tolist(), "colorscale": RANK_SCALE}
    lines: dict[str, Any] = {"type": "parcoords", "line": line, "dimensions": dimensions}
    lines |= {"customdata": shown.index.tolist(), "labelangle": -20, "labelside": "top"}
    return {"data": [lines], "layout": {}}


def _dimension(source: FigureData, name: str, values: pd.Series[Any]) -> dict[str, Any]:
    if source.is_number(name):
        return _numbers(name, values, log=source.is_log(name))
    names = _choices(source, name, values)
    codes = {choice: code for code, choice in enumerate(names)}
    return {
        "label": name,
        "values": [codes[choice] for choice in _texts(values)],
        "tickvals": list(codes.values()),
        "ticktext": [_short(choice) for choice in names],
        "names": names,  # for the server's page
        "range": [-0.2, len(names) - 0.8],
    }


def _texts(values: pd.Series[Any]) -> list[str]:
    """Values of a hyperparameter without a numeric axis; "-" if a trial has none."""
    return ["-" if value is None or value != value else str(value) for value in values]


def _choices(source: FigureData, name: str, values: pd.Series[Any]) -> list[str]:
    """The different values of a hyperparameter as `_texts`: in the order of the config, others at the end."""
    domain = source.domains.get(name)
    order = [str(choice) for choice in domain.vals] if isinstance(domain, Categorical) else []
    return sorted(set(_texts(values)), key=lambda text: (order.index(text) if text in order else len(order), text))


def _numbers(label: str, values: pd.Series[Any], *, log: bool) -> dict[str, Any]:
    if not log:
        return {"label": label, "values": values.tolist()}
    exponents = np.log10(values.astype(float))
    low, high = float(exponents.min()), float(exponents.max())
    ticks = [tick for tick in logarithms(low, high) if low - 1e-9 <= math.log10(tick) <= high + 1e-9]
    return {
        "label": label,
        "values": exponents.tolist(),
        "log": True,  # for the server's page
        "tickvals": [math.log10(tick) for tick in ticks],
        "ticktext": [f"{tick:g}" for tick in ticks],
    }


def slices(source: FigureData) -> dict[str, Figure]:
    """For each varying hyperparameter, the trials' best values over it, coloured by rung."""
    figures = {}
    for name in source.varying:
        is_number, data = source.is_number(name), []
        for rung in sorted(source.shown["rung"].unique()):
            trials = source.shown[source.shown["rung"] == rung]
            values = trials[f"hparams.{name}"]
            x = values if is_number else _texts(values)
            marker = {"size": 6, "color": rung_colour(source.rungs, int(rung)), "opacity": 0.75}
            hover = f"<br>{name} %{{x}}: %{{y:.5g}}"
            data.append(
                scatter(source.rung_name(int(rung)), x, trials["best_metric"], trials.index, hover, marker=marker)
            )
        axis: dict[str, Any] = {"type": "linear"}
        if not is_number:
            names = _choices(source, name, source.shown[f"hparams.{name}"])
            axis = {"type": "category", "categoryorder": "array", "categoryarray": names}
            axis |= {"tickvals": names, "ticktext": [_short(choice) for choice in names]}
        if source.is_log(name):
            exponents = np.log10(source.shown[f"hparams.{name}"].astype(float))
            axis = {"type": "log", **ticks_of(float(exponents.min()), float(exponents.max()))}
        layout = {"xaxis": {"title": {"text": name}, **axis}, "showlegend": False}
        figure = {"data": data, "layout": layout}
        figures[name] = scaled(figure, source.metric, source.ranked["best_metric"], source.sign)
    return figures


def importances(source: FigureData) -> tuple[Figure | None, str]:
    """A bar for each hyperparameter, or None if the importances are meaningless; and a sentence about them."""
    found = source.importance
    if found is None:
        return None, "Too few trials to tell which hyperparameters mattered."
    at = source.length(source.compared_at or 0, source.along)
    if found.explained < LEAST_EXPLAINED:
        return None, f"The {found.trials:,} trials at {at} do not show which hyperparameters mattered."
    note = (
        f"Permutation importance for {source.metric} at {at}, which two thirds of the trials have reached: the loss in "
        "accuracy when a random forest predicts trials' ranks and one hyperparameter is shuffled. The forest explains "
        f"{found.explained:.0%} of the variance in ranks of unseen trials ({found.trials:,} trials)."
    )
    names = list(found.shares)[::-1]
    bars = {
        "type": "bar",
        "orientation": "h",
        "x": [found.shares[name] for name in names],
        "y": names,
        "text": [f"{found.shares[name]:.0%}" for name in names],
        "textposition": "outside",
        "cliponaxis": False,
        "hovertemplate": "%{y}: %{x:.1%}<extra></extra>",
        "marker": {"color": RUNG_COLOURS[1]},
    }
    layout = {
        "xaxis": {"range": [0, 1.1], "tickformat": ".0%", "fixedrange": True},
        "yaxis": {"automargin": True, "fixedrange": True},
    }
    return {"data": [bars], "layout": layout}, note


def time_unit(seconds: float) -> tuple[float, str]:
    """The unit for a time axis of this length: its seconds, and its name."""
    return (1.0, "seconds") if seconds < 300 else (60.0, "minutes") if seconds < 3 * 3600 else (3600.0, "hours")


def rung_colour(rungs: Sequence[float], rung: int) -> str:
    """The colour of trials that have reached this many rungs."""
    if len(rungs) <= 1:
        return RUNG_COLOURS[1]
    place = rung / len(rungs) * (len(RUNG_COLOURS) - 1)
    return RUNG_COLOURS[round(place)] if len(rungs) > len(RUNG_COLOURS) - 1 else RUNG_COLOURS[rung]


def _short(name: str) -> str:
    return name if len(name) <= 18 else f"{name[:17]}…"
