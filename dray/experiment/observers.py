"""What follows a run without ruling it: the study for Optuna's tools, MLflow, Weights & Biases.

The driver tells of each decision (`happened`) and of each report (`rows`), in microseconds: one thread takes what came
within a second, and tells every observer. An observer that fails is told of once, and the run goes on without it; at
the run's end it gets a second chance, and at a resume a third. What it then missed is in the experiment's directory.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import pandas as pd

from dray.experiment.directory import ExperimentDirectory
from dray.experiment.metrics_log import read_metrics
from dray.experiment.search import recorded_search
from searchers.journal import Journal
from searchers.search import TrialView

EVERY_S = 1.0
"""How often observers are told what is new."""
TOGETHER = 500
"""Trials that an observer is told of at once, when it is told of all."""
CLOSE_S = 60.0
"""How long a run's end waits for observers that have not written everything yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class News:
    """What is new of one trial.

    Attributes:
        view: how it stands now.
        started, ended: when, in seconds since the epoch; None: it has not.
        rows: metrics that an observer has not been told of before: mappings of batches, epochs, kind (training |
            validation), name, value, time.
    """

    view: TrialView
    started: float | None
    ended: float | None
    rows: Sequence[Mapping[str, Any]]


class Observer(Protocol):
    """Writes down elsewhere what happens. It is made, called and closed in one thread, and may take its time."""

    def update(self, news: Sequence[News]) -> None:
        """Write down what is new, at most one `News` a trial.

        The first calls tell all that the experiment has seen, of which an observer of an earlier run may have written
        down a part, or all. Of a trial that has ended there may be more to come: late rows, or that it goes on.
        """

    def close(self, done: bool) -> None:
        """The run ends.

        Args:
            done: the search is over; else it was stopped, and may be resumed.
        """


Make = Callable[[], Observer]


@dataclass(slots=True)
class _Known:
    """All trials, as far as the driver knows."""

    views: dict[int, TrialView] = field(default_factory=dict)
    started: dict[int, float] = field(default_factory=dict)
    ended: dict[int, float] = field(default_factory=dict)

    def happened(self, record: Mapping[str, Any]) -> None:
        trial, time = record.get("trial"), record.get("time")
        if isinstance(trial, int) and isinstance(time, float):
            if record.get("event") == "started":
                self.started.setdefault(trial, time)
            elif record.get("event") == "exited":
                self.ended[trial] = time

    def news(self, trial: int, rows: Sequence[Mapping[str, Any]]) -> News:
        view = self.views[trial]
        ended = self.ended.get(trial) if view.ended else None
        return News(view=view, started=self.started.get(trial), ended=ended, rows=rows)

    def all(self, metrics: pd.DataFrame) -> Iterator[list[News]]:
        trials = sorted(self.views)
        for begin in range(0, len(trials), TOGETHER):
            some = trials[begin : begin + TOGETHER]
            rows: dict[int, list[Mapping[str, Any]]] = {trial: [] for trial in some}
            for row in metrics[metrics["trial_id"].isin(some)].to_dict("records"):
                rows[row["trial_id"]].append({str(name): value for name, value in row.items()})
            yield [self.news(trial, rows[trial]) for trial in some]

    def copy(self) -> _Known:
        return _Known(dict(self.views), dict(self.started), dict(self.ended))


class Observers:
    """The observers of one run, from `begin()` to `close()`.

    Args:
        directory: of the experiment.
        makes: by name, how to make each; in the observers' thread, when the first trial reports.
    """

    def __init__(self, directory: ExperimentDirectory, makes: Mapping[str, Make]) -> None:
        self._directory, self._makes = directory, dict(makes)
        self._lock = threading.Lock()
        self._known = _Known()
        self._new: dict[int, list[Mapping[str, Any]]] = {}
        self._live: dict[str, Observer] = {}
        self._failed: list[str] = []
        self._wanted, self._over = threading.Event(), threading.Event()
        self._done = False
        self._thread: threading.Thread | None = None

    def begin(
        self, records: Iterable[Mapping[str, Any]], trials: Mapping[int, TrialView], say: Callable[[str], None]
    ) -> None:
        """Start following.

        Args:
            records: of the journal, until the experiment was opened.
            trials: of the search.
            say: tells the user.
        """
        self._say = say
        for record in records:
            self._known.happened(record)
        self._known.views = dict(trials)
        self._past = read_metrics(self._directory.metrics)
        self._thread = threading.Thread(target=self._run, name="dray-observers", daemon=True)
        self._thread.start()

    def happened(self, record: Mapping[str, Any], trials: Mapping[int, TrialView]) -> None:
        """An event of the search, as the journal has it, with its time; `trials` are the search's after it."""
        changed = {record.get("trial"), *(action.get("trial") for action in record.get("actions", ()))}
        with self._lock:
            self._known.happened(record)
            for trial in changed & trials.keys():
                self._known.views[trial] = trials[trial]
                self._new.setdefault(trial, [])

    def rows(self, trial: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Metrics of a trial, which are in the metrics' log."""
        with self._lock:
            self._new.setdefault(trial, []).extend(rows)
        self._wanted.set()

    def close(self, done: bool = False) -> None:
        """Write what is left, and end. `done`: as for `Observer.close`. Idempotent."""
        if self._over.is_set():
            return
        self._done = done
        self._over.set()
        self._wanted.set()
        if self._thread is not None:
            self._thread.join(CLOSE_S)
            if self._thread.is_alive():
                self._say(
                    f"{' and '.join(self._live or self._makes)}: not all is written after {CLOSE_S:.0f} s; "
                    "it goes on as long as this process does"
                )

    # ------------------------------------------------------------------ in the thread
    def _run(self) -> None:
        # The first worker is up by then: what an observer imports does not hold up Ray's start.
        self._wanted.wait()
        for name in self._makes:
            self._make(name, self._past)
        del self._past
        over = False
        while not over:
            over = self._over.wait(EVERY_S)
            news = self._take()
            for name in list(self._live) if news else ():
                with self._told(name):
                    self._live[name].update(news)
        if self._failed:
            # What has failed once: the disk may have room again, the server be back.
            metrics = read_metrics(self._directory.metrics)
            for name in self._failed.copy():
                self._make(name, metrics)
        for name in list(self._live):
            with self._told(name):
                self._live[name].close(self._done)

    def _make(self, name: str, metrics: pd.DataFrame) -> None:
        with self._told(name):
            observer = self._makes[name]()
            with self._lock:
                known = self._known.copy()
            for news in known.all(metrics):
                observer.update(news)
            self._live[name] = observer

    def _take(self) -> list[News]:
        with self._lock:
            new, self._new = self._new, {}
            return [self._known.news(trial, rows) for trial, rows in new.items()]

    @contextlib.contextmanager
    def _told(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._live.pop(name, None)
            if name not in self._failed:
                self._failed.append(name)
                told = f"{type(error).__name__}: {error}".strip().splitlines()[0]
                self._say(f"{name} is not written for now, the search goes on: {told}")


def tell_all(directory: ExperimentDirectory, make: Make) -> None:
    """Have an observer write down an experiment that no run is writing."""
    records, known = Journal.read(directory.journal), _Known()
    for record in records:
        known.happened(record)
    search = recorded_search(directory.config(), records)
    known.views = dict(search.trials)
    observer = make()
    for news in known.all(read_metrics(directory.metrics)):
        observer.update(news)
    observer.close(search.done is not None)
