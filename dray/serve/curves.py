"""Learning curves for the page: bands of all trials by rung, some trials' curves, and all that one trial measured.

They are thinned, so that answers stay small.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from typing_extensions import TypedDict

from dray.figures.data import rung_name, rungs_reached, some_ranks
from dray.figures.plots import BEST_COLOUR, rung_colour
from dray.figures.scale import is_log, scaled
from dray.records.bands import LEAST, POINTS, Band, Curve, band_of
from dray.records.machine import over_time, seconds_by_phase
from dray.records.metrics import read_series, read_system, read_trials
from dray.records.reader import ExperimentReader
from dray.records.thinning import thinned
from dray.records.timeline import leases, slot_seconds
from dray.records.trial_record import Number, TrialRecord
from dray.serve.given import MAX_CURVES, Wanted
from dray.text import counted, fields_of

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


MAX_LONELY = 20  # curves of a rung of which there is no band
MAX_POINTS = 8_000  # of all curves in an answer; but each has at least `LEAST_POINTS`
LEAST_POINTS, MOST_POINTS = 20, 400
DIGITS = 7


class CurvePoints(TypedDict):
    trial: int
    x: list[float | None]
    y: list[Number]
    of: int  # points before thinning


class Group(TypedDict):
    """Trials by the highest rung reached."""

    name: str
    colour: str
    trials: int  # those that have reported the metric


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupBand(Band):
    group: int  # its index


class Curves(TypedDict):
    shown: int  # trials in curves and bands
    of: int  # trials that have validated
    how: str  # how the trials shown were chosen
    metric: str
    metrics: list[str]  # the other metrics
    along: str
    alongs: list[str]  # what along can be
    notes: list[str]  # sentences on what is left out
    curves: list[CurvePoints]  # best first
    group_of: list[int]  # the group of each curve
    groups: list[Group]
    bands: list[GroupBand]
    best: int | None  # the best trial
    best_colour: str
    scale: str  # scale of the axis
    scales: dict[str, Any]  # scales that the page offers
    version: int


def curves(reader: ExperimentReader, wanted: Wanted) -> Curves:
    """Learning curves. ``scales`` and ``scale``: see `dray.figures.scale.scaled`."""
    with reader.lock:
        ranked, winner, rungs, unit = reader.ranked(), reader.best(), reader.rungs, reader.config.searcher.unit
        best = None if winner is None else winner.id
        chosen = _chosen(ranked, wanted)
        reached = {trial.id: rungs_reached(rungs, trial.last_step) for trial in chosen}
        started = {trial.id: trial.started for trial in chosen}
        rows = {
            each.id: _Rows([*each.at], [*each.epochs], [*each.times], [*each.values])
            for each in chosen
            if wanted.series is None
        }
        version, metric, has_epochs = reader.version, reader.metric, reader.has_epochs
        metrics = [f"{kind} {name}" for kind, name in sorted(reader.metrics - {("validation", metric)})]
    along = wanted.along or ("epochs" if unit == "epochs" and has_epochs else "batches")
    if wanted.series is not None:
        found = _read(reader, wanted.series, None if wanted.bands else reached)
        rows = {trial: found[trial] for trial in reached if trial in found}  # best first
        kind, name = wanted.series
        metric = name if name.startswith(kind) else f"{kind} {name}"
    every = _placed(reader, along, rows, started)
    groups = sorted({reached[trial] for trial in every})
    bands, drawn = _bands(every, reached, groups, best) if wanted.bands else ({}, list(every))
    most = min(max(MAX_POINTS // max(len(drawn), 1), LEAST_POINTS), MOST_POINTS)
    notes = _notes(bands)
    if any(len(every[trial][0]) > most for trial in drawn):
        notes.append(f"Curves with more than {most} points are thinned; spikes and NaN are kept.")
    values = (value for _, mine in every.values() for value in mine)
    axis = scaled({"layout": {}}, metric, values, reader.sign if wanted.series is None else None)
    return {
        "version": version,
        "metric": metric,
        "metrics": metrics,
        "along": along,
        "alongs": [each for each in ("batches", "epochs", "time", "slot-time") if each != "epochs" or has_epochs],
        "of": len(ranked),
        "how": _how(wanted, len(ranked)),
        "best": best,
        "best_colour": BEST_COLOUR,
        "shown": len(every),
        "groups": [
            {
                "name": rung_name(rungs, rung, unit),
                "colour": rung_colour(rungs, rung),
                "trials": sum(reached[trial] == rung for trial in every),
            }
            for rung in groups
        ],
        "bands": [_band_fields(groups.index(rung), band) for rung, band in bands.items()],
        "notes": notes,
        "group_of": [groups.index(reached[trial]) for trial in drawn],
        "curves": [_curve_fields(trial, every[trial], most) for trial in drawn],
        "scales": axis["scales"],
        "scale": axis["scale"],
    }


def _chosen(ranked: Sequence[TrialRecord], wanted: Wanted) -> list[TrialRecord]:
    if wanted.trials is not None:
        return [trial for trial in ranked if trial.id in wanted.trials]
    if wanted.bands:
        return list(ranked)
    return [ranked[rank] for rank in some_ranks(len(ranked), MAX_CURVES)]


def _how(wanted: Wanted, of: int) -> str:
    if wanted.trials is not None:
        return "those that were asked for"
    if wanted.bands or of <= MAX_CURVES:
        return "all"
    return f"the best {MAX_CURVES // 2} and {MAX_CURVES - MAX_CURVES // 2} evenly by rank"


@dataclass(frozen=True, slots=True)
class _Rows:
    """A trial's values of a metric, and where they are."""

    batches: list[int]
    epochs: list[float | None]
    times: list[float]
    values: list[float]


def _read(reader: ExperimentReader, metric: tuple[str, str], trials: Collection[int] | None) -> dict[int, _Rows]:
    """A metric's rows from the disk, by trial; of these trials, or of all."""
    table = read_series(reader.directory.metrics, *metric, trials)  # sorted by trial
    numbers, starts = np.unique(table["trial_id"].to_numpy(), return_index=True)
    columns = [np.split(table[name].to_numpy(), starts[1:]) for name in ("batches", "epochs", "time", "value")]
    rows = zip(numbers.tolist(), *columns, strict=True) if len(table) else ()
    return {trial: _Rows(*(column.tolist() for column in mine)) for trial, *mine in rows}


def _placed(
    reader: ExperimentReader, along: str, rows: Mapping[int, _Rows], started: Mapping[int, float | None]
) -> dict[int, Curve]:
    """The curves of metrics' rows, along an axis; times are in seconds since a trial's first start."""
    held: Mapping[int, Sequence[tuple[float, float, float]]] = {}
    if along == "slot-time":
        held = leases(reader.directory.metrics, (time for each in rows.values() for time in each.times))

    def places(trial: int, mine: _Rows) -> Sequence[float | None]:
        if along == "slot-time":
            return slot_seconds(held.get(trial, ()), mine.times)
        if along == "time":
            began = started[trial]
            return [max(time - (mine.times[0] if began is None else began), 0.0) for time in mine.times]
        return mine.batches if along == "batches" else mine.epochs

    return {trial: (places(trial, mine), mine.values) for trial, mine in rows.items() if mine.values}


def _bands(
    every: Mapping[int, Curve], reached: Mapping[int, int], groups: Sequence[int], best: int | None
) -> tuple[dict[int, Band], list[int]]:
    """The bands by rung, and the trials whose curves are drawn beside them: those without a band, and the best."""
    bands, drawn = dict[int, Band](), [] if best is None or best not in every else [best]
    for rung in groups:
        mine = [trial for trial in every if reached[trial] == rung]
        if (band := band_of([every[trial] for trial in mine])) is not None:
            bands[rung] = band
        else:
            drawn += [trial for trial in mine if trial != best][:MAX_LONELY]
    return bands, drawn


def _notes(bands: Mapping[int, Band]) -> list[str]:
    notes = list[str]()
    if bands:
        notes.append(
            "A band has the middle half of all trials that got as far and no further, with their median. It ends "
            f"where fewer than half of them, or fewer than {LEAST}, have values."
        )
    if any(not band.exact for band in bands.values()):
        notes.append(f"A band has {POINTS} points, evenly spaced; between its own points, a trial is a straight line.")
    if not_finite := sum(band.not_finite for band in bands.values()):
        notes.append(f"Values of {counted(not_finite, 'trial')} that are NaN or infinite are left out.")
    return notes


def _curve_fields(trial: int, curve: Curve, most: int) -> CurvePoints:
    xs, ys = curve
    points = thinned(ys, most)
    return {"trial": trial, "x": _short([xs[i] for i in points]), "y": [_digits(ys[i]) for i in points], "of": len(xs)}


def _band_fields(group: int, band: Band) -> GroupBand:
    short = {name: _short(getattr(band, name)) for name in ("x", "low", "middle", "high")}
    return GroupBand(**fields_of(band) | short, group=group)


def _short(values: Sequence[float | None]) -> list[float | None]:
    """Numbers with a few digits, so that answers are small; null where they are not finite."""
    return [None if value is None or not math.isfinite(value) else _digits(value) for value in values]


def _digits(value: float) -> float:
    is_whole = math.isfinite(value) and abs(value) < 10**DIGITS and value == int(value)
    return int(value) if is_whole else float(f"{value:.{DIGITS}g}")
