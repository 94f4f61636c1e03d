"""One trial's metrics and its use of the machine, for the page: thinned, so that answers stay small."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from typing_extensions import TypedDict

from dray.figures.scale import is_log
from dray.records.machine import over_time, seconds_by_phase
from dray.records.metrics import read_system, read_trials
from dray.records.reader import ExperimentReader
from dray.records.thinning import thinned
from dray.records.trial_record import Number

MAX_POINTS = 400  # most points of a figure of the machine


class Series(TypedDict):
    kind: str  # training or validation
    name: str
    of: int  # points before thinning
    log: bool  # whether a logarithmic axis helps
    batches: list[int]
    epochs: list[Number]
    values: list[Number]
    times: list[Number]


class TrialMetrics(TypedDict):
    trial: int
    metric: str  # the searcher's
    started: float | None  # the trial's first start
    series: list[Series]


class MachineFigure(TypedDict):
    name: str  # as in Result.system_metrics
    label: str
    unit: str  # "" if the label says it
    of: int  # points before thinning to 400, as with points of metrics
    batches: list[int]
    values: list[Number]
    times: list[Number]


class System(TypedDict):
    trial: int
    figures: list[MachineFigure]
    phases: dict[str, float]  # seconds by phase: starting, training, data, validating, checkpointing, waiting


def metrics(reader: ExperimentReader, trial: int, most: int) -> TrialMetrics:
    """All metrics of a trial, each thinned to so many points."""
    rows = read_trials(reader.directory.metrics, [trial])
    series = list[Any]()
    for (kind, name), mine in rows.groupby(["kind", "name"], sort=True):
        sign = reader.sign if (kind, name) == ("validation", reader.metric) else None
        columns = {"batches": "batches", "epochs": "epochs", "values": "value", "times": "time"}
        lists = {field: mine[column].tolist() for field, column in columns.items()}
        series.append({"kind": kind, "name": name, "log": is_log(mine["value"], sign), **_thinned(lists, most)})
    return {"trial": trial, "metric": reader.metric, "started": reader.trials[trial].started, "series": series}


def system(reader: ExperimentReader, trial: int) -> System:
    """A trial's use of its machine, see `dray.records.machine`."""
    rows = read_system(reader.directory.metrics, [trial])
    names = ("batches", "values", "times")
    figures: list[Any] = [
        {**each, **_thinned({name: each[name] for name in names}, MAX_POINTS)} for each in over_time(rows)
    ]
    return {"trial": trial, "figures": figures, "phases": seconds_by_phase(rows)}


def _thinned(lists: Mapping[str, Sequence[Any]], most: int) -> dict[str, Any]:
    """Lists of one length, thinned by their ``values`` to at most so many items; and the number ``of`` them all."""
    places = thinned(lists["values"], most)
    return {**{name: [items[i] for i in places] for name, items in lists.items()}, "of": len(lists["values"])}
