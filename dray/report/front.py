"""The report's section on the Pareto front of a search with several objectives."""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from typing import Any

import numpy as np

from dray.report import figures, html
from dray.report.data import ReportData
from dray.report.figures import BEST_COLOUR, RUNG_COLOURS, Figure
from dray.report.scale import SPREAD, scaled, ticks_of
from dray.text import counted, shown
from searchers.objectives import Metric, Objectives
from searchers.views import FAILED_STATES

GREY = "#b4bcc6"


def section(report: ReportData, place: Callable[..., str]) -> str:
    """A scatter plot of the first two objectives, and a table of the front; "" if the search has one objective. `place`
    puts a figure on the page, and returns its element."""
    objectives = report.config.searcher.objectives
    if objectives is None or len(objectives.objectives) < 2:
        return ""
    kept = report.eligible
    front = kept[kept["front"] == 1]
    names = " and ".join(escape(each.name) for each in objectives.objectives)
    among = f"{counted(len(kept), 'trial')} that keep every limit" if objectives.constraints else f"{len(kept):,}"
    drawn = " The figure has the first two." if len(objectives.objectives) > 2 else ""
    figure = scatter(report, objectives)
    metrics = dict.fromkeys(each.name for each in (*objectives.objectives, *objectives.constraints))
    columns = [f"metrics.{name}" for name in metrics] + [f"hparams.{name}" for name in report.varying]
    rows = [[str(trial), str(row["state"]).lower(), *map(shown, row[columns])] for trial, row in front.iterrows()]
    heads = [column.partition(".")[2] for column in columns]
    return f"""<section><h2>Pareto front</h2>
<p>{counted(len(front), "trial")} of {among}: no other trial is at least as good in {names},
and better in one of them.{drawn}</p>
{html.controls("front", figure)}
{place("front", figure, tall=True)}
{html.table(["trial", "state", *heads], rows)}</section>"""


def scatter(report: ReportData, objectives: Objectives) -> Figure:
    """The first objective over the second: the front, other trials, and in grey the trials that exceed a limit."""
    upward, along = objectives.objectives[:2]
    there = report.shown[f"metrics.{upward.name}"].notna() & ~report.shown["state"].isin(FAILED_STATES)
    drawn = report.shown[there]
    front = drawn[drawn["front"] == 1].sort_values(f"metrics.{along.name}")
    exceeds = drawn["violation"] > 0
    groups = (
        ("exceeds a limit", drawn[exceeds], {"color": GREY, "size": 6, "symbol": "x"}, "markers"),
        ("other trials", drawn[~exceeds & (drawn["front"] != 1)], {"color": RUNG_COLOURS[1], "size": 6}, "markers"),
        ("Pareto front", front, {"color": BEST_COLOUR, "size": 8}, "lines+markers"),
    )
    hover, shape = f"<br>{along.name} %{{x:.5g}}<br>{upward.name} %{{y:.5g}}", "hv" if along.smaller_is_better else "vh"
    data = [
        figures.scatter(
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
