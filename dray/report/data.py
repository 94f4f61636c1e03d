"""The data of a report: an experiment's tables, and what the figures derive from them."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import pandas as pd

from dray.records.metrics import read_metrics, read_system
from dray.records.reader import ExperimentReader
from dray.records.result import table_of
from dray.records.timeline import read_timeline
from dray.report.importance import Importance, importance
from dray.training.units import amount
from searchers.domains import Categorical, Domain, parameters
from searchers.numeric import Int, Log

MAX_TRIALS = 2_000
"""Most trials in a figure with a point for each: half of them the best, the others evenly by rank."""
MAX_CURVES = 300
MAX_POINTS = 200
"""Most points of one curve."""
MAX_OTHER_POINTS = 150_000
"""Most points of the curves of metrics beside the searcher's: five megabytes of the page."""
COMPARABLE = 2 / 3
"""Trials are compared at a length that this share of them has reached."""


class ReportedMetric(NamedTuple):
    kind: str
    name: str

    @property
    def label(self) -> str:
        return self.name if self.name.startswith(self.kind) else f"{self.kind} {self.name}"


class ReportData:
    """An experiment as it was when this was made.

    Attributes:
        trials: `dray.Result.trials` by trial_id, with "best_batches", "score" (smaller is better) and "rung" (how many
            the trial reached).
        records: how many records the journal had.
        validations: the searcher's metric, of all trials.
        ranked, eligible, best, failures: as of the reader, the trials as rows of `trials`.
        along: the x-axis of curves: epochs if the search counts in them and every validation has them, else batches.
        summaries: how many trials failed and diverged, in words.
    """

    def __init__(self, reader: ExperimentReader) -> None:
        with reader.lock:
            self.directory, self.config, self.overview = reader.directory, reader.config, reader.overview()
            self.metric, self.sign, self.varying = reader.metric, reader.sign, reader.varying
            self.rungs, self.unit = reader.rungs, self.config.searcher.unit
            self.records = reader.records
            self.along = "epochs" if self.unit == "epochs" and reader.has_epochs else "batches"
            records = reader.trials.values()
            self.trials = table_of(reader).set_index("trial_id", drop=False)
            self.trials["best_batches"] = pd.array([each.best_batches for each in records], dtype="Int64")
            self.trials["score"] = self.sign * self.trials["best_metric"]
            self.trials["rung"] = [rungs_reached(self.rungs, each.last_step) for each in records]
            rows = [
                (each.id, *row)
                for each in records
                for row in zip(each.at, each.epochs, each.values, each.times, strict=True)
            ]
            kinds = {
                "trial_id": "int64",
                "batches": "int64",
                "epochs": "float64",
                "value": "float64",
                "time": "float64",
            }
            self.validations = pd.DataFrame(rows, columns=list(kinds)).astype(kinds)
            self.ranked = self.trials.loc[[each.id for each in reader.ranked()]]
            self.eligible = self.trials.loc[[each.id for each in reader.eligible()]]
            best = reader.best()
            self.best = None if best is None else best.id
            self.best_hparams = {} if best is None else best.hparams
            self.failures = list(reader.failures)
            self.summaries = [each for each in (reader.failure_summary(), reader.divergence_summary()) if each]
            self.no_best_reason, self.state_summary = reader.no_best_reason(), reader.state_summary()

    # ------------------------------------------------------------------ files that only some figures need
    @cached_property
    def metrics(self) -> pd.DataFrame:
        """`dray.Result.metrics`."""
        return read_metrics(self.directory.metrics)

    @cached_property
    def system_metrics(self) -> pd.DataFrame:
        """`dray.Result.system_metrics`."""
        return read_system(self.directory.metrics)

    @cached_property
    def timeline(self) -> pd.DataFrame:
        """`dray.Result.timeline`."""
        return read_timeline(self.directory.metrics, self.system_metrics)

    # ------------------------------------------------------------------ trials
    @cached_property
    def shown(self) -> pd.DataFrame:
        """The ranked trials that figures show."""
        return _some(self.ranked, MAX_TRIALS)

    @cached_property
    def drawn(self) -> pd.DataFrame:
        """The ranked trials whose curves are shown."""
        return _some(self.ranked, MAX_CURVES)

    def left_out(self, shown: int, what: str = "trials") -> str:
        """How many of the ranked trials a figure shows; "" if it shows all."""
        if shown == len(self.ranked):
            return ""
        best, of = shown // 2, len(self.ranked)
        return f"{shown:,} of {of:,} {what} are shown: the {best:,} best, and others evenly by rank."

    # ------------------------------------------------------------------ lengths
    def rung_name(self, rung: int) -> str:
        return rung_name(self.rungs, rung, self.unit)

    def length(self, length: float, unit: str | None = None) -> str:
        """With its unit, by default the search's: "1 epoch"."""
        return amount(f"{length:g}", unit or self.unit)

    # ------------------------------------------------------------------ metrics
    def rows_of(self, metric: ReportedMetric) -> pd.DataFrame:
        """A metric, of all trials."""
        rows = self.metrics
        return rows[(rows["kind"] == metric.kind) & (rows["name"] == metric.name)]

    @cached_property
    def other_metrics(self) -> list[ReportedMetric]:
        """The metrics of which there are curves beside the searcher's, those of validation first."""
        rows = self.metrics
        drawn = rows[rows["trial_id"].isin(self.drawn.index) & rows["value"].notna()]
        sizes = drawn.groupby(["kind", "name", "trial_id"], observed=True).size().clip(upper=MAX_POINTS)
        points = sizes.groupby(["kind", "name"]).sum().drop(("validation", self.metric), errors="ignore")
        points = points.sort_index(level="kind", ascending=False, sort_remaining=False)
        return [ReportedMetric(*each) for each in points.index[points.cumsum() <= MAX_OTHER_POINTS]]

    # ------------------------------------------------------------------ hyperparameters
    @cached_property
    def domains(self) -> dict[str, Domain]:
        """By dotted name, without constants, and with those of every conditional branch."""
        found: dict[str, Domain] = {}
        for each in parameters(self.config.space.root):
            found.setdefault(re.sub(r"\[\d+\]", "", each.name), each.domain)
        return found

    def is_log(self, name: str) -> bool:
        """Whether it is searched by its logarithm."""
        domain = self.domains.get(name)
        return isinstance(domain, Log) or (isinstance(domain, Int) and domain.log)

    def is_number(self, name: str) -> bool:
        """Whether it is no category and all its values are numbers, so that its axis is one of numbers."""
        values = self.trials[f"hparams.{name}"].dropna()
        return not isinstance(self.domains.get(name), Categorical) and bool(
            values.map(lambda value: isinstance(value, int | float) and not isinstance(value, bool)).all()
        )

    @cached_property
    def compared_at(self) -> float | None:
        """The length, in `along`, that two thirds of the trials have reached; None if there are no validations."""
        lengths = np.sort(self.validations.groupby("trial_id")[self.along].max().to_numpy())
        return float(lengths[math.floor((1 - COMPARABLE) * len(lengths))]) if len(lengths) else None

    @cached_property
    def importance(self) -> Importance | None:
        """Importance of the varying hyperparameters for the metric at `compared_at`."""
        rows, at = self.validations, self.compared_at
        if at is None:
            return None
        reached = rows.groupby("trial_id")[self.along].max() >= at
        there = rows[(rows[self.along] <= at) & rows["trial_id"].map(reached)]
        scores = self.sign * there.drop_duplicates("trial_id", keep="last").set_index("trial_id")["value"]
        hparams = self.trials.loc[scores.index, [f"hparams.{name}" for name in self.varying]]
        return importance(hparams.rename(columns=lambda name: name.removeprefix("hparams.")), scores)


def rungs_reached(rungs: Sequence[float], step: float) -> int:
    """How many rungs a trial has reached that was trained this far."""
    return sum(step >= rung for rung in rungs)


def rung_name(rungs: Sequence[float], rung: int, unit: str) -> str:
    """How far a trial got that has reached this many rungs."""
    if not rungs:
        return "all trials"
    length = amount(f"{rungs[max(rung - 1, 0)]:g}", unit)
    return f"reached {length}" if rung else f"below {length}"


def some_ranks(number: int, most: int) -> list[int]:
    """Of so many ranked trials, all ranks from 0 on; or `most`: half of them the best, the other half evenly."""
    if number <= most:
        return list(range(number))
    best = most // 2
    return [*range(best), *np.linspace(best, number - 1, most - best).astype(int).tolist()]


def thinned(points: int, most: int = MAX_POINTS) -> list[int]:
    """The places of the points of a curve that are drawn: all, or so many evenly, with the first and the last."""
    return list(range(points)) if points <= most else np.linspace(0, points - 1, most).astype(int).tolist()


def _some(ranked: pd.DataFrame, most: int) -> pd.DataFrame:
    return ranked.iloc[some_ranks(len(ranked), most)]
