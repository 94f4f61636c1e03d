"""The data of a report: an experiment's tables, and what the figures derive from them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from dray.config.schema import ExperimentConfig
from dray.config.search import as_extended, rungs_of
from dray.config.searcher import SamplerChoice
from dray.records.directory import ExperimentDirectory
from dray.records.listing import StoredExperiment
from dray.records.outcomes import ranked, sound, varying_hparams
from dray.records.overview import Overview
from dray.records.result import Result
from dray.report.importance import Importance, importance
from dray.training.units import amount
from searchers.domains import Categorical, Const, Domain, Nested
from searchers.journal import Journal
from searchers.numeric import Int, Log
from searchers.views import TrialView

MAX_TRIALS = 2_000
"""Most trials in a figure with a point for each: half of them the best, the others evenly by rank."""
MAX_CURVES = 300
MAX_POINTS = 200
"""Most points of one curve."""
MAX_OTHER_POINTS = 150_000
"""Most points of the curves of metrics beside the searcher's: five megabytes of the page."""
COMPARABLE = 2 / 3
"""Trials are compared at a length that this share of them has reached."""


class Metric(NamedTuple):
    """A metric that trials have reported.

    Attributes:
        kind: training or validation.
        name: as reported.
    """

    kind: str
    name: str

    @property
    def label(self) -> str:
        """As people call it: "validation accuracy"."""
        return self.name if self.name.startswith(self.kind) else f"{self.kind} {self.name}"


class ReportData:
    """An experiment as it is now.

    Args:
        path: its directory.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.directory = ExperimentDirectory.open(path)
        self.overview: Overview = StoredExperiment.here(self.directory).overview()
        self.records: list[dict[str, Any]] = Journal.read(self.directory.journal)
        self.result = Result(path)
        self.config: ExperimentConfig = as_extended(self.directory.config(), self.records)
        self.metric = self.config.searcher.first_metric
        self.sign = self.config.searcher.sign

    # ------------------------------------------------------------------ trials
    @cached_property
    def trials(self) -> pd.DataFrame:
        """`table`, by trial_id, with "score" (smaller is better) and "rung" (how many the trial reached)."""
        table = self.table.set_index("trial_id", drop=False)
        views = self.views
        table["score"] = self.sign * table["best_metric"]
        table["rung"] = [rungs_reached(self.rungs, views[trial].last_step) for trial in table.index]
        return table

    @property
    def table(self) -> pd.DataFrame:
        """`Result.trials`."""
        return self.result.trials

    @property
    def views(self) -> Mapping[int, TrialView]:
        """What the search knows of each trial."""
        return self.result.search.trials

    @cached_property
    def ranked(self) -> pd.DataFrame:
        """The trials that have validated, best first, those that failed last; without those with invalid
        hyperparameters."""
        return ranked(self.trials, self.sign)

    @property
    def best(self) -> int | None:
        """The best trial, of those that have validated and did not fail."""
        return next((int(trial) for trial in sound(self.ranked).index), None)

    @cached_property
    def shown(self) -> pd.DataFrame:
        """The ranked trials that figures show."""
        return _some(self.ranked, MAX_TRIALS)

    @cached_property
    def drawn(self) -> pd.DataFrame:
        """The ranked trials whose curves are shown."""
        return _some(self.ranked, MAX_CURVES)

    # ------------------------------------------------------------------ lengths
    @cached_property
    def rungs(self) -> tuple[float, ...]:
        """The rungs of the search, in its unit; () if its method is the user's own."""
        return rungs_of(self.config)

    @property
    def sampler(self) -> str:
        """The name of the sampler."""
        return str(getattr(self.config.searcher, "sampler", SamplerChoice()).name)

    @property
    def unit(self) -> str:
        """The search's unit of length."""
        return self.config.searcher.unit

    @cached_property
    def along(self) -> str:
        """The x-axis of curves: epochs if the search counts in them and every row has them, else batches."""
        known = self.unit == "epochs" and self.validations["epochs"].notna().all()
        return "epochs" if known else "batches"

    def rung_name(self, rung: int) -> str:
        """How far a trial got that has reached this many rungs."""
        return rung_name(self.rungs, rung, self.unit)

    def length(self, length: float, unit: str | None = None) -> str:
        """With its unit, by default the search's: "1 epoch"."""
        return amount(f"{length:g}", unit or self.unit)

    # ------------------------------------------------------------------ metrics
    @cached_property
    def validations(self) -> pd.DataFrame:
        """The searcher's metric, of all trials."""
        return self.rows_of(Metric("validation", self.metric))

    def rows_of(self, metric: Metric) -> pd.DataFrame:
        """A metric, of all trials."""
        rows = self.result.metrics
        return rows[(rows["kind"] == metric.kind) & (rows["name"] == metric.name)]

    @cached_property
    def other_metrics(self) -> list[Metric]:
        """The metrics of which there are curves beside the searcher's, those of validation first."""
        rows = self.result.metrics
        found, points = [], 0
        drawn = rows[rows["trial_id"].isin(self.drawn.index) & rows["value"].notna()]
        sizes = drawn.groupby(["kind", "name", "trial_id"], observed=True).size().clip(upper=MAX_POINTS)
        for kind in ("validation", "training"):
            of_kind = sizes[sizes.index.get_level_values("kind") == kind].groupby("name", observed=True).sum()
            for name, size in of_kind.items():
                if (kind, name) == ("validation", self.metric):
                    continue
                points += int(size)
                if points <= MAX_OTHER_POINTS:
                    found.append(Metric(kind, str(name)))
        return found

    # ------------------------------------------------------------------ hyperparameters
    @cached_property
    def domains(self) -> dict[str, Domain]:
        """By dotted name, without constants, and with those of every conditional branch."""
        found: dict[str, Domain] = {}
        _walk(self.config.space.root, "", found)
        return found

    @cached_property
    def varying(self) -> list[str]:
        """Names of the hyperparameters that differ among trials that have validated; others may not have theirs yet."""
        return [column.removeprefix("hparams.") for column in varying_hparams(self.ranked)]

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


def rungs_reached(rungs: Sequence[float], step: float | None) -> int:
    """How many rungs a trial has reached that was trained this far."""
    return sum((step or 0) >= rung for rung in rungs)


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


def _some(ranked: pd.DataFrame, most: int) -> pd.DataFrame:
    return ranked.iloc[some_ranks(len(ranked), most)]


def _walk(domain: Domain, name: str, found: dict[str, Domain]) -> None:
    match domain:
        case Nested():
            for part, inner in domain.domains:
                _walk(inner, f"{name}.{part}" if name else part, found)
        case Const():
            pass
        case Categorical():
            found.setdefault(name, domain)
            for choice in domain.vals:
                if isinstance(choice, Nested):
                    _walk(choice, name, found)
        case _:
            found.setdefault(name, domain)
