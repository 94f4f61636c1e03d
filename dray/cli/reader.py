"""Opens an experiment for the commands that describe it, and finds trials by their number or as 'best'."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dray.cli.errors import BadUse

if TYPE_CHECKING:
    import pandas as pd

    from dray.records.checkpoints import StoredCheckpoint
    from dray.records.listing import StoredExperiment
    from dray.records.reader import ExperimentReader


@dataclass(frozen=True)
class ReadExperiment:
    """An experiment, or a temporary copy of a remote one, and its reader."""

    stored: StoredExperiment
    reader: ExperimentReader

    def checkpoints(self, trial: int | None) -> list[StoredCheckpoint]:
        """The complete checkpoints of a trial, or of all trials, by batches; not verified."""
        from dray.records.checkpoints import list_checkpoints

        return [each for each in list_checkpoints(self.stored.directory, trial) if each.is_complete]

    def trial(self, named: str | None) -> int:
        """The number of a trial, given by number or as "best"; None: the only trial."""
        return self.reader.trial(named).id


@contextmanager
def read_experiment(experiment: str) -> Iterator[ReadExperiment]:
    """Read an experiment. The copy of a remote one exists only within the block.

    Raises:
        NoExperiment, StorageError: see ``open_experiment``.
        BadUse: the experiment has not started.
        DamagedFile: one of its files can't be read.
    """
    from dray.records.listing import open_experiment

    with open_experiment(experiment) as stored:
        yield opened(stored)


def opened(stored: StoredExperiment) -> ReadExperiment:
    """Read an open experiment; raises as ``read_experiment``."""
    check_started(stored)
    return ReadExperiment(stored, stored.read())


def last_values(metrics: pd.DataFrame) -> dict[str, float]:
    last = metrics.drop_duplicates(["kind", "name"], keep="last")
    return {
        f"{kind} {name}": float(value)
        for kind, name, value in zip(last["kind"], last["name"], last["value"], strict=True)
    }


def check_started(stored: StoredExperiment) -> None:
    if not os.path.lexists(stored.directory.journal):
        raise BadUse(f"{stored.where} has not started: it has no journal yet")


def journal(stored: StoredExperiment) -> list[dict[str, Any]]:
    """The journal's records; `BadUse` if there is none, `DamagedFile` if it is damaged."""
    from dray.records.journal import read_journal

    check_started(stored)
    return read_journal(stored.directory.journal)
