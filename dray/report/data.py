"""The data of a report: an experiment's tables, and values that figures derive from them."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import pandas as pd

from dray.records.metrics import read_metrics, read_system
from dray.records.reader import ExperimentReader
from dray.records.repeats import table
from dray.records.result import table_of
from dray.records.timeline import read_timeline
from dray.report.importance import Importance, importance
from dray.training.units import amount
from searchers.domains import Categorical, Domain, parameters
from searchers.numeric import Int, Log

MAX_TRIALS = 2_000
"""Most trials in a figure with a point for each: half are the best, the others evenly by rank."""
MAX_CURVES = 300
MAX_POINTS = 200
"""Most points of one curve."""
MAX_OTHER_POINTS = 150_000
"""Most points of curves of metrics other than the searcher's: five megabytes of the page."""
COMPARABLE = 2 / 3
"""The share of trials that have reached the length at which trials are compared."""


class ReportedMetric(NamedTuple):
    kind: str
    name: str

    @property
    def label(self) -> str:
        return self.name if self.name.startswith(self.kind) else f"{self.kind} {self.name}"


class ReportData:
    """A snapshot of an experiment.

    Attributes:
        trials: `dray.Result.trials` by trial_id, with "forked_from" and "code" (as text), "score"
            (smaller is better) and "rung" (the number of rungs reached).
        records: number of records in the journal.
        validations: the searcher's metric at all validations of all trials.
        ranked, eligible, best, failures: as in the reader, with trials as rows of `trials`.
        along: the x-axis of curves: epochs if they are the searcher's unit and every validation has them, else batches.
        repeats, repeats_summary: the trials that were trained again, as rows of text with their headings, and in words.
        summaries: sentences about failed and diverged trials.

    Args:
        include: trials that `shown` has even if it leaves out others of their rank.
    """

    def __init__(self, reader: ExperimentReader, include: Collection[int] = ()) -> None:
        self._include = include
        with reader.lock:
            self.directory, self.config, self.overview = reader.directory, reader.config, reader.overview()
            self.metric, self.sign, self.varying = reader.metric, reader.sign, reader.varying
            self.rungs, self.unit = reader.rungs, self.config.searcher.unit
            self.records = reader.records
            self.along = "epochs" if self.unit == "epochs" and reader.has_epochs else "batches"
            records = reader.trials.values()
            self.trials = table_of(reader).set_index("trial_id", drop=False)
            self.trials["forked_from"] = [each.forked_from for each in records]
            self.trials["code"] = [each.code or "" for each in records]
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
            finalists = reader.finalists()
            self.repeats = table(finalists, self.metric) if finalists else []
            self.repeats_summary = reader.repeats_summary()
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
        ranks = some_ranks(len(self.ranked), MAX_TRIALS)
        return self.ranked.iloc[sorted({*ranks, *self.ranked.index.get_indexer(pd.Index(self.included)).tolist()})]

    @cached_property
    def included(self) -> list[int]:
        """The ranked trials that are shown only because they were asked for."""
        usual = set(_some(self.ranked, MAX_TRIALS).index)
        return [trial for trial in self._include if trial in self.ranked.index and trial not in usual]

    @cached_property
    def drawn(self) -> pd.DataFrame:
        """The ranked trials whose curves are shown."""
        return _some(self.ranked, MAX_CURVES)

    def left_out(self, shown: int, what: str = "trials") -> str:
        """A sentence on the trials that a figure shows; "" if it shows all ranked ones."""
        if shown == len(self.ranked):
            return ""
        best, of = shown // 2, len(self.ranked)
        return f"{shown:,} of {of:,} {what} are shown: the {best:,} best, and others evenly by rank."

    # ------------------------------------------------------------------ lengths
    def rung_name(self, rung: int) -> str:
        return rung_name(self.rungs, rung, self.unit)

    def length(self, length: float, unit: str | None = None) -> str:
        """A length with its unit, by default the searcher's: "1 epoch"."""
        return amount(f"{length:g}", unit or self.unit)

    # ------------------------------------------------------------------ metrics
    def rows_of(self, metric: ReportedMetric) -> pd.DataFrame:
        """A metric of all trials."""
        rows = self.metrics
        return rows[(rows["kind"] == metric.kind) & (rows["name"] == metric.name)]

    @cached_property
    def other_metrics(self) -> list[ReportedMetric]:
        """The other metrics that have curves, validation metrics first."""
        rows = self.metrics
        drawn = rows[rows["trial_id"].isin(self.drawn.index) & rows["value"].notna()]
        sizes = drawn.groupby(["kind", "name", "trial_id"], observed=True).size().clip(upper=MAX_POINTS)
        points = sizes.groupby(["kind", "name"]).sum().drop(("validation", self.metric), errors="ignore")
        points = points.sort_index(ascending=[False, True])
        return [ReportedMetric(*each) for each in points.index[points.cumsum() <= MAX_OTHER_POINTS]]

    # ------------------------------------------------------------------ hyperparameters
    @cached_property
    def domains(self) -> dict[str, Domain]:
        """Domains by dotted name, without constants, and including those of every conditional branch."""
        found: dict[str, Domain] = {}
        for each in parameters(self.config.space.root):
            found.setdefault(re.sub(r"\[\d+\]", "", each.name), each.domain)
        return found

    def is_log(self, name: str) -> bool:
        """Whether a hyperparameter is searched on a logarithmic scale."""
        domain = self.domains.get(name)
        return isinstance(domain, Log) or (isinstance(domain, Int) and domain.log)

    def is_number(self, name: str) -> bool:
        """Whether a hyperparameter has a numeric axis: it is not categorical, and all its values are numbers."""
        values = self.trials[f"hparams.{name}"].dropna()
        return not isinstance(self.domains.get(name), Categorical) and bool(
            values.map(lambda value: isinstance(value, int | float) and not isinstance(value, bool)).all()
        )

    @cached_property
    def compared_at(self) -> float | None:
        """The length, in the unit of `along`, that two thirds of the trials have reached; None without validations."""
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
    """The number of rungs that a trial at this step has reached."""
    return sum(step >= rung for rung in rungs)


def rung_name(rungs: Sequence[float], rung: int, unit: str) -> str:
    """The name of the group of trials that have reached this many rungs."""
    if not rungs:
        return "all trials"
    length = amount(f"{rungs[max(rung - 1, 0)]:g}", unit)
    return f"reached {length}" if rung else f"below {length}"


def some_ranks(number: int, most: int) -> list[int]:
    """At most `most` ranks out of `number`, from 0: half of them the best, the other half evenly spaced."""
    if number <= most:
        return list(range(number))
    best = most // 2
    return [*range(best), *np.linspace(best, number - 1, most - best).astype(int).tolist()]


def _some(ranked: pd.DataFrame, most: int) -> pd.DataFrame:
    return ranked.iloc[some_ranks(len(ranked), most)]
