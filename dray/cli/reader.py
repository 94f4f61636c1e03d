"""Reads an experiment, for the commands that describe it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from dray.cli.errors import BadUse
from dray.errors import NoExperiment
from dray.text import one_line
from searchers.journal import Journal

if TYPE_CHECKING:
    import pandas as pd

    from dray.config.schema import ExperimentConfig
    from dray.records.checkpoints import StoredCheckpoint
    from dray.records.listing import StoredExperiment
    from dray.records.result import Result


@dataclass(frozen=True)
class ExperimentReader:
    """An experiment, its journal and its results.

    Attributes:
        stored: the experiment, or a temporary copy of a remote one.
        records: its journal.
        result: its result so far, with the metrics.
    """

    stored: StoredExperiment
    records: Sequence[Mapping[str, Any]]
    result: Result

    @property
    def config(self) -> ExperimentConfig:
        """The config that it was created with."""
        return self.result.config

    @cached_property
    def trials(self) -> dict[int, dict[str, Any]]:
        """The rows of ``result.trials``, by trial_id; ``nan_since`` is None for <NA>."""
        from dray.records.outcomes import nan_since_by_trial

        rows: list[dict[str, Any]] = self.result.trials.to_dict("records")  # type: ignore[assignment]
        since = nan_since_by_trial(self.result.trials)
        return {row["trial_id"]: {**row, "nan_since": since.get(row["trial_id"])} for row in rows}

    @cached_property
    def hparams(self) -> dict[int, Mapping[str, Any]]:
        """The hyperparameters of the started trials as they were drawn: a table would turn 195 into 195.0."""
        return {record["trial"]: record["hparams"] for record in self.records if record.get("event") == "started"}

    @cached_property
    def ranked(self) -> pd.DataFrame:
        """The trials that have validated, best first; those that failed come last."""
        from dray.records.outcomes import ranked

        return ranked(self.result.trials, self.config.searcher.sign)

    @property
    def best(self) -> int | None:
        """The best trial, of those that have validated and did not fail."""
        from dray.records.outcomes import sound

        return next((int(trial) for trial in sound(self.ranked)["trial_id"]), None)

    @cached_property
    def validations(self) -> pd.DataFrame:
        """The rows of ``result.metrics`` with the searcher's metric."""
        rows = self.result.metrics
        return rows[(rows["kind"] == "validation") & (rows["name"] == self.config.searcher.first_metric)]

    @cached_property
    def best_batches(self) -> dict[int, int]:
        """The batches at each trial's best validation."""
        return {int(trial): int(batches) for trial, batches in self.result.best_batches().items()}  # type: ignore[call-overload]

    def checkpoints(self, trial: int | None) -> list[StoredCheckpoint]:
        """The complete checkpoints of a trial, by batches; None: of all trials. Not verified."""
        from dray.records.checkpoints import list_checkpoints

        found = list_checkpoints(self.stored.directory)
        return [each for each in found if each.is_complete and trial in (None, each.trial)]

    def checkpoint(self, trial: int) -> str | None:
        """The id of the checkpoint at a trial's best validation, else of its latest one; not verified."""
        store = self.stored.directory.store(trial)
        of_best = [self.best_batches[trial]] if trial in self.best_batches else []
        for batches in [*of_best, *(batches for batches, _ in store.listed())]:
            if store.is_complete(batches):
                return store.id_of(batches)
        return None

    def trial(self, named: str | None) -> int:
        """The number of a trial; if none is named, of the only one.

        Raises:
            NoExperiment: there is no such trial, or no best one.
        """
        if named is None:
            if len(self.trials) == 1:
                [only] = self.trials
                return only
            raise NoExperiment(f"{self.stored.name} has {len(self.trials)} trials; give a trial's number, or 'best'")
        named = named.removeprefix("trial_")
        if named == "best":
            if self.best is None:
                raise NoExperiment(self._no_best())
            return self.best
        if not named.isdigit() or int(named) not in self.trials:
            known = f"it has {len(self.trials)}, numbered from 0" if self.trials else "it has none yet"
            raise NoExperiment(f"{self.stored.name} has no trial {named!r}; {known}; give a trial's number, or 'best'")
        return int(named)

    def _no_best(self) -> str:
        if self.ranked.empty:
            return f"no trial of {self.stored.name} has validated yet, so there is no best trial"
        from dray.records.outcomes import no_best_reason

        why = no_best_reason(self.ranked, self.config.searcher.first_metric)
        return f"{self.stored.name} has {why}; give its number to use it anyway"


@contextmanager
def read_experiment(experiment: str) -> Iterator[ExperimentReader]:
    """Read an experiment; a copy of a remote one exists only within the block.

    Raises:
        NoExperiment, StorageError: see ``open_experiment``.
        BadUse: it has not started, or its metrics are damaged.
        JournalError: its journal is damaged.
    """
    from dray.records.listing import open_experiment

    with open_experiment(experiment) as stored:
        yield reader(stored)


def reader(stored: StoredExperiment) -> ExperimentReader:
    """The reader of an open experiment; raises as ``read_experiment``."""
    from dray.records.result import Result

    records = journal(stored)
    result = Result(stored.directory.path)
    try:
        result.metrics  # noqa: B018 - read here, so that damage is reported as such
    except (ValueError, OSError) as error:
        raise BadUse(f"the metrics in {stored.directory.metrics} can't be read: {one_line(error)}") from None
    return ExperimentReader(stored=stored, records=records, result=result)


def last_values(metrics: pd.DataFrame) -> dict[str, float]:
    """The last value of each metric, by its kind and name."""
    last = metrics.drop_duplicates(["kind", "name"], keep="last")
    return {
        f"{kind} {name}": float(value)
        for kind, name, value in zip(last["kind"], last["name"], last["value"], strict=True)
    }


def journal(stored: StoredExperiment) -> list[dict[str, Any]]:
    """The journal's records.

    Raises:
        BadUse: there is none.
        JournalError: it is damaged.
    """
    if not stored.directory.journal.exists():
        raise BadUse(f"{stored.where} has not started: it has no journal yet")
    return Journal.read(stored.directory.journal)
