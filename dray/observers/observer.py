"""Observers follow a run without affecting it: MLflow, Weights & Biases.

The driver records each event (`happened`) and each report (`rows`) within microseconds; once a second, a thread passes
new ones to an observer. If an observer fails, the user gets one message and the run continues without it. It is created
again every few minutes, at the run's end, and when the experiment is resumed; it then receives the whole history from
the experiment's directory.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

from dray.config.schema import ExperimentConfig
from dray.records.directory import ExperimentDirectory
from dray.records.journal import read_journal
from dray.records.metrics import read_metrics
from searchers.views import TrialView

if TYPE_CHECKING:
    import pandas as pd

EVERY_S = 1.0
"""Seconds between updates of an observer."""
RETRY_S = 300.0
"""Seconds from an observer's failure to its next creation."""
TRIALS_PER_UPDATE = 500
"""Most trials in one update when an observer receives the whole history."""
CLOSE_S = 60.0
"""How long the end of a run waits for observers to finish writing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class News:
    """An update about one trial.

    Attributes:
        view: its current state.
        started, ended: Unix time in s, or None.
        rows: new metrics, as mappings of batches, epochs, kind (training | validation | system), name, value, time.
            After a failure, some rows may repeat.
    """

    view: TrialView
    started: float | None
    ended: float | None
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


@dataclass(slots=True)
class _Known:
    """The driver's knowledge of all trials."""

    views: dict[int, TrialView] = field(default_factory=dict)
    started: dict[int, float] = field(default_factory=dict)
    ended: dict[int, float] = field(default_factory=dict)

    def happened(self, record: Mapping[str, Any]) -> None:
        match record:
            case {"event": "started", "trial": trial, "time": time}:
                self.started.setdefault(trial, time)
            case {"event": "exited", "trial": trial, "time": time}:
                self.ended[trial] = time

    def news(self, trial: int, rows: Sequence[Mapping[str, Any]]) -> News:
        view = self.views[trial]
        ended = self.ended.get(trial) if view.ended else None
        return News(view=view, started=self.started.get(trial), ended=ended, rows=rows)

    def replay(
        self,
        observer: Observer,
        metrics: pd.DataFrame,
        new: Mapping[int, Sequence[Mapping[str, Any]]] = MappingProxyType({}),
    ) -> None:
        """Pass the whole history to an observer, some trials at a time: the metrics, and newer rows."""
        trials = sorted(self.views)
        for begin in range(0, len(trials), TRIALS_PER_UPDATE):
            some = trials[begin : begin + TRIALS_PER_UPDATE]
            rows: dict[int, list[Mapping[str, Any]]] = {trial: [] for trial in some}
            for row in metrics[metrics["trial_id"].isin(some)].to_dict("records"):
                rows[row["trial_id"]].append({str(name): value for name, value in row.items()})
            observer.update([self.news(trial, [*rows[trial], *new.get(trial, ())]) for trial in some])


class Observers:
    """The observers of one run, from `begin()` to `close()`, each in its own thread.
    `makes`: functions that make the observers, by name; called in their threads when the first trial reports."""

    def __init__(self, directory: ExperimentDirectory, makes: Mapping[str, Make]) -> None:
        self._directory = directory
        self._lock = threading.Lock()
        self._known = _Known()
        self._wanted, self._over = threading.Event(), threading.Event()
        self._done = False
        self._threads = {
            name: threading.Thread(target=self._follow, args=(name, make), name=f"dray-{name}", daemon=True)
            for name, make in makes.items()
        }
        self._new: dict[str, dict[int, list[Mapping[str, Any]]]] = {name: {} for name in makes}

    def begin(
        self, records: Iterable[Mapping[str, Any]], trials: Mapping[int, TrialView], say: Callable[[str], None]
    ) -> None:
        """Start following a search whose journal has these records so far."""
        self._say = say
        for record in records:
            self._known.happened(record)
        self._known.views = dict(trials)
        self._past = dict.fromkeys(self._threads, read_metrics(self._directory.metrics))
        for thread in self._threads.values():
            thread.start()

    def happened(self, record: Mapping[str, Any], trials: Mapping[int, TrialView]) -> None:
        """Record an event of the search: its record in the journal, and the trials after it."""
        changed = {record.get("trial"), *(action.get("trial") for action in record.get("actions", ()))}
        with self._lock:
            self._known.happened(record)
            for trial in changed & trials.keys():
                self._known.views[trial] = trials[trial]
                for new in self._new.values():
                    new.setdefault(trial, [])

    def rows(self, trial: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Record metrics that a trial reported; they are in the metrics log already."""
        with self._lock:
            for new in self._new.values():
                new.setdefault(trial, []).extend(rows)
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
        metrics, failed = self._past.pop(name), False
        while not self._directory.is_gone():  # the run itself reports that
            is_last = self._over.is_set()
            try:
                observer = self._made(name, make, metrics)
                del metrics  # after a resume, these are all metrics of the experiment
                if failed:
                    failed = False
                    self._say(f"{name}: is writing again and has caught up")
                self._pass_on(name, observer)
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
            self._take(name)
            metrics = read_metrics(self._directory.metrics)

    def _pass_on(self, name: str, observer: Observer) -> None:
        """Pass updates to the observer until the run ends."""
        over = False
        while not over:
            over = self._over.wait(EVERY_S)
            if news := self._take(name):
                observer.update(news)
        observer.close(self._done)

    def _made(self, name: str, make: Make, metrics: pd.DataFrame) -> Observer:
        """A new observer that has received the whole history."""
        observer = make()
        with self._lock:
            # In one step: rows of a trial that has ended since the metrics were read are only in `new`.
            own = self._known
            known = _Known(dict(own.views), dict(own.started), dict(own.ended))
            new = self._new[name]
            self._new[name] = {}
        known.replay(observer, metrics, new)
        return observer

    def _take(self, name: str) -> list[News]:
        with self._lock:
            new, self._new[name] = self._new[name], {}
            return [self._known.news(trial, rows) for trial, rows in new.items()]


def identity(directory: ExperimentDirectory, config: ExperimentConfig) -> str:
    """A unique id of the experiment, even if its directory is moved: its name, and the time of its first event."""
    [first, *_] = read_journal(directory.journal)
    return f"{config.name} {first['time']}"
