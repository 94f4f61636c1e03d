"""What figures are made from: an experiment's tables, and values derived from them, such as importances."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

from dray.records.metrics import read_system
from dray.records.reader import ExperimentReader
from dray.records.result import table_of
from dray.records.timeline import read_timeline
from dray.training.units import amount
from searchers.domains import Categorical, Domain, parameters
from searchers.numeric_domains import Int, Log

LEAST_TRIALS = 10
MAX_TRIALS = 1_000
TREES, REPEATS = 100, 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Importance:
    """Importances of hyperparameters.

    Attributes:
        shares: by hyperparameter, largest first; they add up to 1.
        explained: R² on trials that a tree has not seen; around 0 or less, the forest explains nothing.
        trials: number of trials that the forest was trained on.
    """

    shares: dict[str, float]
    explained: float
    trials: int


def importance(hparams: pd.DataFrame, scores: pd.Series[float]) -> Importance | None:
    """Permutation importance (Breiman 2001): the loss in the forest's accuracy when one column is shuffled.

    The forest predicts ranks, so the size of bad values does not matter.

    Args:
        hparams: a row per trial, and a column for each varying hyperparameter.
        scores: of the same trials at the same length of training; smaller is better, and NaN and infinity are worst.

    Returns:
        None if there are fewer than ten trials, or nothing varies.
    """
    if len(scores) < LEAST_TRIALS or hparams.shape[1] == 0:
        return None
    from sklearn.ensemble import RandomForestRegressor
    from sklearn.inspection import permutation_importance

    chosen = np.linspace(0, len(scores) - 1, min(len(scores), MAX_TRIALS)).astype(int)
    table = np.column_stack([_as_numbers(hparams[name].iloc[chosen]) for name in hparams.columns])
    ranks = scores.iloc[chosen].replace([np.inf, -np.inf], np.nan).rank(pct=True, na_option="bottom").to_numpy()
    forest = RandomForestRegressor(TREES, oob_score=True, random_state=0).fit(table, ranks)
    shuffled = permutation_importance(forest, table, ranks, n_repeats=REPEATS, random_state=0)
    gains = np.maximum(shuffled.importances_mean, 0.0)
    shares = gains / gains.sum() if gains.sum() > 0 else gains
    order = np.argsort(-shares, kind="stable")
    return Importance(
        shares={str(hparams.columns[i]): float(shares[i]) for i in order},
        explained=float(forest.oob_score_),
        trials=len(chosen),
    )


def _as_numbers(column: pd.Series[Any]) -> np.ndarray[Any, Any]:
    """A column for a tree's splits: numbers unchanged, other values by order of their names, missing ones lowest."""
    numbers = pd.to_numeric(column.map(lambda value: None if isinstance(value, bool) else value), errors="coerce")
    if numbers.notna().sum() < column.notna().sum():
        names = column.map(lambda value: None if value is None else str(value))
        numbers = pd.Series(pd.Categorical(names).codes, dtype=float).replace(-1.0, np.nan)
    return numbers.astype(float).fillna(numbers.min() - 1 if numbers.notna().any() else 0.0).to_numpy()


MAX_TRIALS = 2_000
"""Most trials in a figure with a point for each: half are the best, the others evenly by rank."""
COMPARABLE = 2 / 3
"""The share of trials that have reached the length at which trials are compared."""


class FigureData:
    """A snapshot of an experiment.

    Attributes:
        trials: `dray.Result.trials` by trial_id, with "score" (smaller is better) and "rung" (the number of rungs
            reached).
        records: number of records in the journal.
        validations: the searcher's metric at all validations of all trials.
        ranked, eligible: as in the reader, with trials as rows of `trials`.
        along: what lengths are in: epochs if they are the searcher's unit and every validation has them, else batches.

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

    # ------------------------------------------------------------------ files that only some figures need
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
        usual = set(self.ranked.index[some_ranks(len(self.ranked), MAX_TRIALS)])
        return [trial for trial in self._include if trial in self.ranked.index and trial not in usual]

    def left_out(self, shown: int) -> str:
        """A sentence on the trials that a figure shows; "" if it shows all ranked ones."""
        if shown == len(self.ranked):
            return ""
        best, of = shown // 2, len(self.ranked)
        return f"{shown:,} of {of:,} trials are shown: the {best:,} best, and others evenly by rank."

    # ------------------------------------------------------------------ lengths
    def rung_name(self, rung: int) -> str:
        return rung_name(self.rungs, rung, self.unit)

    def length(self, length: float, unit: str | None = None) -> str:
        """A length with its unit, by default the searcher's: "1 epoch"."""
        return amount(f"{length:g}", unit or self.unit)

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
    """The name of the group of trials that have reached this many rungs and no more."""
    if not rungs:
        return "all trials"
    length = amount(f"{rungs[max(rung - 1, 0)]:g}", unit)
    return f"up to {length}" if rung else f"below {length}"


def some_ranks(number: int, most: int) -> list[int]:
    """At most `most` ranks out of `number`, from 0: half of them the best, the other half evenly spaced."""
    if number <= most:
        return list(range(number))
    best = most // 2
    return [*range(best), *np.linspace(best, number - 1, most - best).astype(int).tolist()]
