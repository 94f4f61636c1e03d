"""Observers follow a run without affecting it: MLflow, Weights & Biases.

Each has a thread, which reads the experiment's files once a second and passes on what is new. If an observer fails, the
user gets one message and the run continues without it. It is created again every few minutes, at the run's end, and
when the experiment is resumed; it then receives the whole history.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from dray.config.schema import ExperimentConfig
from dray.records.directory import ExperimentDirectory
from dray.records.journal import read_journal
from dray.records.metrics import numpy_of
from dray.records.reader import ExperimentReader
from dray.records.trial_record import TrialRecord

if TYPE_CHECKING:
    import pyarrow as pa

EVERY_S = 1.0
"""Seconds between updates of an observer."""
RETRY_S = 300.0
"""Seconds from an observer's failure to its next creation."""
TRIALS_PER_UPDATE = 500
"""Most trials in one update."""
CLOSE_S = 60.0
"""How long the end of a run waits for observers to finish writing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class News:
    """An update about one trial.

    Attributes:
        trial: its current state.
        rows: new metrics, as mappings of batches, epochs, kind (training | validation | system), name, value, time.
    """

    trial: TrialRecord
    rows: Sequence[Mapping[str, Any]]


class Observer(Protocol):
    """Records a run elsewhere. It is created, called and closed in its own thread, and may block."""

    def update(self, news: Sequence[News]) -> None:
        """Record updates, at most one `News` per trial.

        The first calls contain everything since the experiment began; an observer of an earlier run may have written
        all or part of it. A trial that has ended may appear again, with late rows or because it was extended.
        """

    def close(self, done: bool) -> None:
        """End the run. Unless it is `done`, the search was stopped, and may be resumed."""


Make = Callable[[], Observer]


class Followed(ExperimentReader):
    """An experiment that runs, with what is new in its files."""

    def __init__(self, directory: ExperimentDirectory) -> None:
        self._new: dict[int, list[Mapping[str, Any]]] = {}  # rows by trial, of those that have changed
        self._parts: pa.Table | None = None  # all packed rows, if they were read
        self._until: dict[int, float] = {}  # the time of the last row passed on, by trial
        super().__init__(directory, is_running=lambda: True)

    def news(self) -> Iterator[list[News]]:
        """All that is new since the last call, some trials at a time."""
        self.refresh()
        new, parts = self._new, self._parts
        self._new, self._parts = {trial: rows for trial, rows in new.items() if trial not in self.trials}, None
        trials = sorted(new.keys() & self.trials.keys())
        for begin in range(0, len(trials), TRIALS_PER_UPDATE):
            some = trials[begin : begin + TRIALS_PER_UPDATE]
            found = {trial: new[trial] for trial in some} if parts is None else self._unknown(parts, new, some)
            for trial, rows in found.items():
                self._until[trial] = max([self._until.get(trial, -math.inf), *(row["time"] for row in rows)])
            yield [News(trial=self.trials[trial], rows=rows) for trial, rows in found.items()]

    def _unknown(
        self, parts: pa.Table, new: Mapping[int, list[Mapping[str, Any]]], trials: list[int]
    ) -> dict[int, list[Mapping[str, Any]]]:
        """The rows of these trials that were not passed on; all were read again, and a row may be in both places."""
        import numpy as np

        found: dict[int, dict[Any, Mapping[str, Any]]] = {trial: {} for trial in trials}
        packed = parts.filter(np.isin(numpy_of(parts["trial_id"]), trials)).to_pylist()
        for row in (*packed, *(row for trial in trials for row in new[trial])):
            if row["time"] > self._until.get(row["trial_id"], -math.inf):
                found[row["trial_id"]][row["batches"], row["kind"], row["name"]] = row
        return {trial: list(rows.values()) for trial, rows in found.items()}

    def _happened(self, record: Mapping[str, Any]) -> None:
        super()._happened(record)
        for trial in (record.get("trial"), *(action.get("trial") for action in record.get("actions", ()))):
            if trial is not None:
                self._new.setdefault(trial, [])

    def _load(self, parts: pa.Table) -> None:
        super()._load(parts)
        self._parts = parts
        for trial in self.trials:
            self._new.setdefault(trial, [])

    def _reported(self, row: Mapping[str, Any]) -> None:
        super()._reported(row)
        self._new.setdefault(row["trial_id"], []).append(row)


class Observers:
    """The observers of one run, from `begin()` to `close()`, each in its own thread.
    `makes`: functions that make the observers, by name; called in their threads when the first trial reports."""

    def __init__(self, directory: ExperimentDirectory, makes: Mapping[str, Make]) -> None:
        self._directory = directory
        self._wanted, self._over = threading.Event(), threading.Event()
        self._done = False
        self._threads = {
            name: threading.Thread(target=self._follow, args=(name, make), name=f"dray-{name}", daemon=True)
            for name, make in makes.items()
        }

    def begin(self, say: Callable[[str], None]) -> None:
        """Start following the experiment, whose journal has been begun."""
        self._say = say
        for thread in self._threads.values():
            thread.start()

    def wake(self) -> None:
        """A trial has reported: make the observers, if that is to be done yet."""
        self._wanted.set()

    def close(self, done: bool = False) -> None:
        """Write all remaining updates, and end. `done` as for `Observer.close`. Idempotent."""
        if self._over.is_set():
            return
        self._done = done
        self._over.set()
        self._wanted.set()
        deadline = time.monotonic() + CLOSE_S
        for name, thread in self._threads.items():
            if thread.ident is not None:
                thread.join(max(0.0, deadline - time.monotonic()))
                if thread.is_alive():
                    self._say(f"{name}: not everything was written within {CLOSE_S:.0f} s; exiting without the rest")

    # ------------------------------------------------------------------ in an observer's thread
    def _follow(self, name: str, make: Make) -> None:
        # Waits for the first worker, so that the observer's imports don't delay Ray's start.
        self._wanted.wait()
        failed = False
        while not self._directory.is_gone():  # the run itself reports that
            is_last = self._over.is_set()
            try:
                with closing(Followed(self._directory)) as followed:
                    observer = make()
                    _pass_on(followed, observer)
                    if failed:
                        failed = False
                        self._say(f"{name}: is writing again and has caught up")
                    while not self._over.wait(EVERY_S):
                        _pass_on(followed, observer)
                    _pass_on(followed, observer)
                observer.close(self._done)
                return
            except Exception as error:
                if self._directory.is_gone():
                    return
                why = f"{type(error).__name__}: {error}".strip().splitlines()[0]
                if is_last:
                    self._say(f"{name}: lacks the end of the search, resume the experiment to write it: {why}")
                    return
                if not failed:
                    self._say(f"{name}: can't write for now, the search continues: {why}")
                failed = True
            # By then the disk may have room again, or the server may be back.
            self._over.wait(RETRY_S)


def _pass_on(followed: Followed, observer: Observer) -> None:
    for news in followed.news():
        observer.update(news)


def identity(directory: ExperimentDirectory, config: ExperimentConfig) -> str:
    """A unique id of the experiment, even if its directory is moved: its name, and the time of its first event."""
    [first, *_] = read_journal(directory.journal)
    return f"{config.name} {first['time']}"
