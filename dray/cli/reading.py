"""What several commands read of an experiment."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from dray.cli.errors import BadUse
from dray.experiment.errors import NoExperiment
from searchers.journal import Journal

if TYPE_CHECKING:
    from dray.experiment.found import Found
    from dray.experiment.result import Result
    from dray.experiment.schema import ExperimentConfig


@dataclass(frozen=True)
class Reading:
    """An experiment that is read.

    Attributes:
        it: where it is.
        records: of its journal.
        result: its outcome until now; the metrics have been read.
    """

    it: Found
    records: Sequence[Mapping[str, Any]]
    result: Result

    @cached_property
    def config(self) -> ExperimentConfig:
        """As it was created."""
        return self.result.config

    @cached_property
    def trials(self) -> dict[int, dict[str, Any]]:
        """The rows of ``result.trials``, by trial_id."""
        rows: list[dict[str, Any]] = self.result.trials.to_dict("records")  # type: ignore[assignment]
        return {row["trial_id"]: row for row in rows}

    @cached_property
    def hparams(self) -> dict[int, Mapping[str, Any]]:
        """Of the trials that have started, as they were drawn: a table would make 195 to 195.0."""
        return {record["trial"]: record["hparams"] for record in self.records if record.get("event") == "started"}

    @property
    def sign(self) -> int:
        """1 where smaller is better."""
        return 1 if self.config.searcher.smaller_is_better else -1

    @cached_property
    def ranked(self) -> list[int]:
        """The trials that have validated, best first; without those of invalid hyperparameters."""
        trials = self.trials
        valid = [
            trial
            for trial, row in trials.items()
            if row["state"] != "INVALID_HP" and not math.isnan(row["best_metric"])
        ]
        return sorted(valid, key=lambda trial: self.sign * trials[trial]["best_metric"])

    @cached_property
    def best_batches(self) -> dict[int, int]:
        """Where each trial had its best validation."""
        return {int(trial): int(batches) for trial, batches in self.result.best_batches().items()}  # type: ignore[call-overload]

    def checkpoint(self, trial: int) -> str | None:
        """The id of the checkpoint of a trial's best validation, or else of its latest one; not verified."""
        store = self.it.directory.store(trial)
        of_best = [self.best_batches[trial]] if trial in self.best_batches else []
        for batches in [*of_best, *(batches for batches, _ in store.listed())]:
            if store.is_complete(batches):
                return store.id_of(batches)
        return None

    def trial(self, named: str | None) -> int:
        """The number of a trial: of the only one, if none is named.

        Raises:
            NoExperiment: there is no such trial; or none is the best.
        """
        if named is None:
            if len(self.trials) == 1:
                [only] = self.trials
                return only
            raise NoExperiment(f"{self.it.name} has {len(self.trials)} trials; say which: a number, or best")
        named = named.removeprefix("trial_")
        if named == "best":
            if not self.ranked:
                raise NoExperiment(f"no trial of {self.it.name} has validated yet, so none is the best")
            return self.ranked[0]
        if not named.isdigit() or int(named) not in self.trials:
            there = f"there are {len(self.trials)}, from 0" if len(self.trials) else "there is none yet"
            raise NoExperiment(f"{self.it.name} has no trial {named!r}; {there}; or say best")
        return int(named)


@contextmanager
def reading(experiment: str) -> Iterator[Reading]:
    """Read an experiment, for the time of the block.

    Raises:
        NoExperiment, StorageError: see ``found``.
        BadUse: it has not begun, or its metrics are damaged.
        JournalError: its journal is.
    """
    from dray.experiment.found import found
    from dray.experiment.result import Result

    with found(experiment) as it:
        records = journal(it)
        result = Result(it.directory.path)
        try:
            result.metrics  # noqa: B018 - read here, so that what is wrong with them is told so
        except (ValueError, OSError) as error:
            told = " ".join(str(error).split())
            raise BadUse(f"the metrics in {it.directory.metrics} can't be read: {told}") from None
        yield Reading(it=it, records=records, result=result)


def journal(it: Found) -> list[dict[str, Any]]:
    """What has happened in an experiment.

    Raises:
        BadUse: nothing.
        JournalError: it is damaged.
    """
    if not it.directory.journal.exists():
        raise BadUse(f"{it.where} has not begun: it has no journal yet")
    return Journal.read(it.directory.journal)


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested hyperparameters with dotted names."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        found |= flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return found
