"""Deletes an experiment for a client of the server."""

from __future__ import annotations

import contextlib
from pathlib import Path

from dray.records import copies
from dray.records.directory import ExperimentDirectory
from dray.records.listing import StoredExperiment
from dray.serve.control import ACTIVE, Control, NotSubmitted, WrongState


def delete(control: Control, path: Path) -> None:
    """Delete an experiment and its checkpoints, here and in its object store.

    Raises:
        WrongState: it runs, or waits to.
        JournalError: a driver that the server knows nothing of runs it.
        StorageError: the object store can't be used.
    """
    with contextlib.suppress(NotSubmitted):
        state = control.experiment(path.name).state
        if state in ACTIVE:
            raise WrongState(f"{path.name} is {state}; stop it first")
    copies.delete(StoredExperiment.here(ExperimentDirectory.open(path)))
