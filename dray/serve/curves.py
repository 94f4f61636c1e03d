"""Learning curves for the page: bands of all trials by rung, and the curves of some trials."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from dray.figures.data import rung_name, rungs_reached, some_ranks
from dray.figures.plots import BEST_COLOUR, rung_colour
from dray.figures.scale import scaled
from dray.records.bands import LEAST, POINTS, Band, Curve, band_of
from dray.records.metrics import read_series
from dray.records.reader import ExperimentReader
from dray.records.thinning import thinned
from dray.records.timeline import leases, slot_seconds
from dray.records.trial_record import TrialRecord
from dray.serve.answers import BadInput
from dray.text import counted
from searchers.records import number_to_json

MAX_CURVES = 200
MAX_LONELY = 20  # curves of a rung of which there is no band
MAX_POINTS = 8_000  # of all curves in an answer; but each has at least `LEAST_POINTS`
LEAST_POINTS, MOST_POINTS = 20, 400
DIGITS = 7
ALONG = ("batches", "epochs", "time", "slot-time")


@dataclass(frozen=True, slots=True)
class Wanted:
    """What an answer is to have.

    Attributes:
        metric: kind and name; None: the searcher's metric.
        along: one of `ALONG`; "": the searcher's unit.
        trials: those whose curves are asked for; None: a choice by rank.
        bands: whether to give bands, and the curves of trials that are in none, in place of that choice.
    """

    metric: tuple[str, str] | None = None
    along: str = ""
    trials: tuple[int, ...] | None = None
    bands: bool = False

    @classmethod
    def of(cls, query: Mapping[str, str]) -> Wanted:
        """From the parameters of a request; `BadInput` if they are invalid."""
        along, show, metric = query.get("along", ""), query.get("show", "individual"), query.get("metric", "")
        if along and along not in ALONG:
            raise BadInput(f"along={along[:40]}: must be one of {', '.join(ALONG)}")
        if show not in ("individual", "bands"):
            raise BadInput(f"show={show[:40]}: must be individual or bands")
        kind, _, name = metric.partition(" ")
        trials = numbers(query["trials"]) if "trials" in query else None
        return cls((kind, name) if metric else None, along, trials, show == "bands" and trials is None)


def numbers(text: str) -> tuple[int, ...]:
    """The trials of a selection.

    >>> numbers("3,17-19")
    (3, 17, 18, 19)
    """
    found = dict[int, None]()
    for part in text.split(","):
        first, _, last = part.partition("-")
        if not (first.isdecimal() and (last or first).isdecimal()) or len(part) > 20:
            raise BadInput(f"trials={text[:40]}: must be numbers and ranges of numbers, such as 3,17-20")
        found |= dict.fromkeys(range(int(first), min(int(last or first), int(first) + MAX_CURVES) + 1))
        if len(found) > MAX_CURVES:
            raise BadInput(f"trials={text[:40]}: at most {MAX_CURVES} at a time")
    return tuple(found)


def curves(reader: ExperimentReader, wanted: Wanted) -> dict[str, Any]:
    """Curves, for JSON.

    ``shown`` of ``of`` trials that have validated, and ``how`` they were chosen, in words; ``groups`` by the highest
    rung reached, with name, colour and number of ``trials`` that have reported the metric; ``curves``, best first, each
    with its trial, ``x``, ``y`` and its number of points before thinning, and in ``group_of`` the index of its group;
    ``bands``, see `dray.records.bands.Band`, each with the index of its ``group``; ``notes`` on what is left out;
    ``scales`` and ``scale``: see `dray.figures.scale.scaled`.
    """
    with reader.lock:
        ranked, winner, rungs, unit = reader.ranked(), reader.best(), reader.rungs, reader.config.searcher.unit
        best = None if winner is None else winner.id
        chosen = _chosen(ranked, wanted)
        reached = {trial.id: rungs_reached(rungs, trial.last_step) for trial in chosen}
        started = {trial.id: trial.started for trial in chosen}
        rows = {
            each.id: _Rows([*each.at], [*each.epochs], [*each.times], [*each.values])
            for each in chosen
            if wanted.metric is None
        }
        head: dict[str, Any] = {
            "version": reader.version,
            "metric": reader.metric,
            "metrics": [f"{kind} {name}" for kind, name in sorted(reader.metrics - {("validation", reader.metric)})],
            "along": wanted.along or ("epochs" if unit == "epochs" and reader.has_epochs else "batches"),
            "alongs": [each for each in ALONG if each != "epochs" or reader.has_epochs],
            "of": len(ranked),
            "how": _how(wanted, len(ranked)),
            "best": best,
            "best_colour": BEST_COLOUR,
        }
    if wanted.metric is not None:
        found = _read(reader, wanted.metric, None if wanted.bands else reached)
        rows = {trial: found[trial] for trial in reached if trial in found}  # best first
        kind, name = wanted.metric
        head["metric"] = name if name.startswith(kind) else f"{kind} {name}"
    every = _placed(reader, head["along"], rows, started)
    groups = sorted({reached[trial] for trial in every})
    bands, drawn = _bands(every, reached, groups, best) if wanted.bands else ({}, list(every))
    most = min(max(MAX_POINTS // max(len(drawn), 1), LEAST_POINTS), MOST_POINTS)
    notes = _notes(bands)
    if any(len(every[trial][0]) > most for trial in drawn):
        notes.append(f"Curves with more than {most} points are thinned; spikes and NaN are kept.")
    values = (value for _, mine in every.values() for value in mine)
    axis = scaled({"layout": {}}, head["metric"], values, reader.sign if wanted.metric is None else None)
    return {
        **head,
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
    """The curves of metrics' rows, along one of `ALONG`; times are in seconds since a trial's first start."""
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


def _curve_fields(trial: int, curve: Curve, most: int) -> dict[str, Any]:
    xs, ys = curve
    points = thinned(ys, most)
    places, values = [xs[i] for i in points], [number_to_json(_digits(ys[i])) for i in points]
    return {"trial": trial, "x": _short(places), "y": values, "of": len(xs)}


def _band_fields(group: int, band: Band) -> dict[str, Any]:
    short = {name: _short(getattr(band, name)) for name in ("x", "low", "middle", "high")}
    return {"group": group, **asdict(band), **short}


def _short(values: Sequence[float | None]) -> list[float | None]:
    """Numbers with a few digits, so that answers are small; null where they are not finite."""
    return [None if value is None or not math.isfinite(value) else _digits(value) for value in values]


def _digits(value: float) -> float:
    is_whole = math.isfinite(value) and abs(value) < 10**DIGITS and value == int(value)
    return int(value) if is_whole else float(f"{value:.{DIGITS}g}")
