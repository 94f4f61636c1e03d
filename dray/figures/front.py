"""The Pareto front of a search with several objectives."""

from __future__ import annotations

from typing import Any

import numpy as np

from dray.figures import plots
from dray.figures.data import FigureData
from dray.figures.plots import BEST_COLOUR, RUNG_COLOURS, Figure
from dray.figures.scale import SPREAD, scaled, ticks_of
from dray.text import shown
from searchers.objectives import Metric, Objectives
from searchers.views import FAILED_STATES

GREY = "#b4bcc6"


def front(source: FigureData, objectives: Objectives) -> Figure:
    """The first objective over the second, with ``table``: the trials of the front as rows of text, after their
    headings."""
    best = source.eligible[source.eligible["front"] == 1]
    metrics = dict.fromkeys(each.name for each in (*objectives.objectives, *objectives.constraints))
    columns = [f"metrics.{name}" for name in metrics] + [f"hparams.{name}" for name in source.varying]
    rows = [[str(trial), str(row["state"]).lower(), *map(shown, row[columns])] for trial, row in best.iterrows()]
    heads = ["trial", "state", *(column.partition(".")[2] for column in columns)]
    return {**scatter(source, objectives), "table": [heads, *rows]}


def scatter(source: FigureData, objectives: Objectives) -> Figure:
    """The first objective over the second: the front, other trials, and in grey the trials that exceed a limit."""
    upward, along = objectives.objectives[:2]
    there = source.shown[f"metrics.{upward.name}"].notna() & ~source.shown["state"].isin(FAILED_STATES)
    drawn = source.shown[there]
    front = drawn[drawn["front"] == 1].sort_values(f"metrics.{along.name}")
    exceeds = drawn["violation"] > 0
    groups = (
        ("exceeds a limit", drawn[exceeds], {"color": GREY, "size": 6, "symbol": "x"}, "markers"),
        ("other trials", drawn[~exceeds & (drawn["front"] != 1)], {"color": RUNG_COLOURS[1], "size": 6}, "markers"),
        ("Pareto front", front, {"color": BEST_COLOUR, "size": 8}, "lines+markers"),
    )
    hover, shape = f"<br>{along.name} %{{x:.5g}}<br>{upward.name} %{{y:.5g}}", "hv" if along.smaller_is_better else "vh"
    data = [
        plots.scatter(
            f"{name} ({len(trials)})",
            trials[f"metrics.{along.name}"], trials[f"metrics.{upward.name}"], trials.index, hover, mode,
            marker=marker,
            # Trials behind the steps are dominated.
            line={"color": marker["color"], "width": 1.5, "shape": shape},
        )
        for name, trials, marker, mode in groups
        if len(trials)
    ]  # fmt: skip
    values = drawn[f"metrics.{along.name}"].to_numpy(dtype=float)
    figure = {"data": data, "layout": {"xaxis": _axis(along, values), "hovermode": "closest"}}
    return scaled(figure, upward.name, drawn[f"metrics.{upward.name}"], 1 if upward.smaller_is_better else -1)


def _axis(metric: Metric, values: np.ndarray[Any, Any]) -> dict[str, Any]:
    axis: dict[str, Any] = {"title": {"text": metric.name}}
    if len(values) and values.min() > 0 and values.max() / values.min() > SPREAD:
        return {**axis, "type": "log", **ticks_of(*np.log10([values.min(), values.max()]).tolist())}
    return axis
