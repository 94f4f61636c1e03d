"""One trial's metrics and its use of the machine, for the page: thinned, so that answers stay small."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dray.figures.scale import is_log
from dray.records.machine import over_time, seconds_by_phase
from dray.records.metrics import read_system, read_trials
from dray.records.reader import ExperimentReader
from dray.records.thinning import thinned
from dray.serve.answers import plain

MAX_POINTS = 400  # most points of a figure of the machine


def metrics(reader: ExperimentReader, trial: int, most: int) -> dict[str, Any]:
    """``series``: each metric with ``kind``, ``name``, ``batches``, ``epochs``, ``values`` and ``times``, thinned to so
    many points, ``of`` all; ``log``: whether a logarithmic axis helps. ``started``: of the trial."""
    rows = read_trials(reader.directory.metrics, [trial])
    series = []
    for (kind, name), mine in rows.groupby(["kind", "name"], sort=True):
        sign = reader.sign if (kind, name) == ("validation", reader.metric) else None
        columns = {"batches": "batches", "epochs": "epochs", "values": "value", "times": "time"}
        lists = {field: mine[column].tolist() for field, column in columns.items()}
        series.append({"kind": kind, "name": name, "log": is_log(mine["value"], sign), **_thinned(lists, most)})
    found = {"trial": trial, "metric": reader.metric, "started": reader.trials[trial].started, "series": series}
    return dict(plain(found))


def system(reader: ExperimentReader, trial: int) -> dict[str, Any]:
    """``figures`` over time, and ``phases`` with seconds: see `dray.records.machine`."""
    rows = read_system(reader.directory.metrics, [trial])
    names = ("batches", "values", "times")
    figures = [{**each, **_thinned({name: each[name] for name in names}, MAX_POINTS)} for each in over_time(rows)]
    return dict(plain({"trial": trial, "figures": figures, "phases": seconds_by_phase(rows)}))


def _thinned(lists: Mapping[str, Sequence[Any]], most: int) -> dict[str, Any]:
    """Lists of one length, thinned by their ``values`` to at most so many items; and the number ``of`` them all."""
    places = thinned(lists["values"], most)
    return {**{name: [items[i] for i in places] for name, items in lists.items()}, "of": len(lists["values"])}
