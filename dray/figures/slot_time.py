"""Where slot time goes: the phases of worker groups, and the trials' use of their machines."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from dray.figures.data import FigureData
from dray.figures.plots import Figure, time_unit
from dray.records.machine import FIGURES
from dray.records.timeline import PHASES
from dray.text import duration, rough


class _Phase(NamedTuple):
    name: str
    colour: str
    meaning: str = ""


PHASES_SHOWN = {
    "booting": _Phase("processes starting", "#6f7d8f", "a worker group's processes start and import torch"),
    "starting": _Phase("starting", "#e3a400", "from a trial's hyperparameters to its first batch"),
    "training": _Phase("training", "#12a07a", "training batches, without waiting for data"),
    "data": _Phase("waiting for data", "#7cc576", "the trial waits for its data loader"),
    "validating": _Phase("validating", "#2f86d1"),
    "checkpointing": _Phase("checkpointing", "#9a4fc4", "training waits while a checkpoint is made"),
    "waiting": _Phase(
        "waiting for the search", "#d5493a", "the trial waits for the search's decisions or for other ranks"
    ),
    "ending": _Phase("ending", "#f08a4b", "from the decision on a trial's last report until its processes are free"),
    "idle": _Phase("idle", "#94a0ad", "the processes run, without a trial"),
}
MAX_STRETCHES = 4_000
BINS = 240


def slot_time(source: FigureData) -> dict[str, Figure]:
    """Slots in each phase over time, in ``shares``, and phases by worker group, in ``groups``, unless there are too
    many; {} if there is no timeline. Beside the first are ``phases`` and, as rows of text after their headings,
    ``gpu_types`` and ``machine``; ``before``: seconds before the first worker group."""
    table = source.timeline
    if table.empty:
        return {}
    about = {
        "phases": phases(table),
        "gpu_types": by_gpu_type(table) if table["gpu_type"].nunique() > 1 else [],
        "machine": machine_use(source),
        "before": max(float(table["start"].min()) - (source.overview.began or math.inf), 0.0),
    }
    found = {"shares": {**shares(source), **about}}
    return found if (groups := stretches(source)) is None else {**found, "groups": groups}


def phases(table: pd.DataFrame) -> list[dict[str, Any]]:
    """The phases with their shares, largest first."""
    spent = ((table["end"] - table["start"]) * table["slots"]).groupby(table["phase"]).sum()
    return [
        {**PHASES_SHOWN[str(phase)]._asdict(), "share": float(of / spent.sum()), "time": duration(float(of))}
        for phase, of in spent.sort_values(ascending=False, kind="stable").items()
    ]


def by_gpu_type(table: pd.DataFrame) -> list[tuple[str, str, str]]:
    """Each GPU type, its slot time, and the share of it spent on training; after the headings."""
    spent = ((table["end"] - table["start"]) * table["slots"]).groupby([table["gpu_type"], table["phase"]]).sum()
    rows = [("GPU", "slot time", "training")]
    for gpu_type, of in spent.groupby(level=0):
        share = of.get((gpu_type, "training"), 0) / of.sum()
        rows.append((str(gpu_type) or "unknown", duration(float(of.sum())), f"{share:.1%}"))
    return rows


def stretches(source: FigureData) -> Figure | None:
    """A bar for each phase of each worker group; None if there are too many to show."""
    table, unit_s, unit, began = _timed(source)
    if len(table) > MAX_STRETCHES:
        return None
    data = [
        {
            "type": "bar",
            "orientation": "h",
            "name": phase.name,
            "y": rows["group"].tolist(),
            "base": ((rows["start"] - began) / unit_s).tolist(),
            "x": ((rows["end"] - rows["start"]) / unit_s).tolist(),
            "customdata": [(f"trial {trial}, ", trial) if trial >= 0 else ("", None) for trial in rows["trial_id"]],
            "hovertemplate": f"%{{customdata[0]}}{phase.name}: %{{x:.3g}} {unit}<extra></extra>",
            "marker": {"color": phase.colour, "line": {"width": 0}},
        }
        for phase, rows in _by_phase(table)
    ]
    yaxis = {"automargin": True, "autorange": "reversed", "fixedrange": True}
    height = 97 + 26 * min(table["group"].nunique(), 40)
    layout = {"barmode": "overlay", "bargap": 0.15, "height": height, **_layout(unit), "yaxis": yaxis}
    return {"data": data, "layout": layout}


def shares(source: FigureData) -> Figure:
    """The number of slots in each phase, over time."""
    table, unit_s, unit, began = _timed(source)
    low, high = float(table["start"].min()), float(table["end"].max())
    edges = np.linspace(low, high, BINS + 1)
    middles = ((edges[:-1] + np.diff(edges) / 2 - began) / unit_s).tolist()
    data = []
    for phase, rows in _by_phase(table):
        starts, ends, slots = (rows[name].to_numpy() for name in ("start", "end", "slots"))
        spent = np.array([(slots * np.clip(edge - starts, 0, ends - starts)).sum() for edge in edges])
        data.append(
            {
                "type": "scatter",
                "mode": "lines",
                "stackgroup": "slots",
                "name": phase.name,
                "x": middles,
                "y": (np.diff(spent) / np.diff(edges)).tolist(),
                "hovertemplate": "%{y:.2f}",
                "line": {"width": 0, "color": phase.colour, "shape": "hvh"},
                "fillcolor": phase.colour,
            }
        )
    yaxis = {"title": {"text": "slots"}, "rangemode": "tozero"}
    return {"data": data, "layout": {"hovermode": "x unified", **_layout(unit), "yaxis": yaxis}}


def _layout(unit: str) -> dict[str, Any]:
    xaxis = {"title": {"text": f"{unit} since creation"}, "rangemode": "tozero"}
    return {"showlegend": False, "xaxis": xaxis}


def _by_phase(table: pd.DataFrame) -> Iterator[tuple[_Phase, pd.DataFrame]]:
    for phase in PHASES:
        if len(rows := table[table["phase"] == phase]):
            yield PHASES_SHOWN[phase], rows


def _timed(source: FigureData) -> tuple[pd.DataFrame, float, str, float]:
    table = source.timeline
    began = source.overview.began or 0.0
    unit_s, unit = time_unit(float(table["end"].max() - began))
    return table, unit_s, unit, began


def machine_use(source: FigureData) -> list[tuple[str, str, str]]:
    """The trials' use of their machines, after the headings; [] if none has reported it."""
    rows = source.system_metrics
    table = [("", "median", "5th to 95th percentile")]
    for name, label in FIGURES.items():
        values = rows.loc[rows["name"] == name, "value"]
        if len(values):
            low, middle, high = values.quantile(np.array([0.05, 0.5, 0.95]))
            table.append((", ".join(filter(None, label)), rough(middle), f"{rough(low)} to {rough(high)}"))
    return table if len(table) > 1 else []
