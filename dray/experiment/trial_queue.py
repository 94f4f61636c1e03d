"""The desk's queue of trials, kept in step with the search.

Two threads share the search under one lock. Tune's thread passes the trials' results to it, then carries out its
decisions (`TrialQueue.act`); the thread that called `Run.run` gives trials to worker groups, and reports their ends.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from dray.desk.messages import LeaseGranted
from dray.records.directory import ExperimentDirectory
from dray.worker.lease import TrialLease
from searchers.answers import Answer
from searchers.events import Started
from searchers.search import Search
from searchers.views import NEVER_BEST, State

_RUNNABLE: tuple[State, ...] = ("PENDING", "RUNNING")
"""States of trials that should have workers."""


class TrialQueue:
    """Queues trials at the desk as the search decides.

    Args:
        search: has been started.
        desk: the desk's actor handle.
        name: of this run, at the desk.
        directory: of the experiment.
        changed: called with the trials that the search has stopped or paused.

    Attributes:
        lock: held while the search is used.
    """

    def __init__(
        self,
        search: Search,
        *,
        desk: Any,
        name: str,
        directory: ExperimentDirectory,
        changed: Callable[[Iterable[int]], None],
    ) -> None:
        self._search, self._desk, self._name, self._directory, self._changed = search, desk, name, directory, changed
        self.lock = threading.RLock()

    def begin(self, score: Callable[[float], float]) -> None:
        """Queue the trials that can run, and set the best value so far.

        Args:
            score: a metric as the search ranks it.
        """
        trials = self._search.trials.values()
        best = [trial.best for trial in trials if trial.best is not None and trial.state not in NEVER_BEST]
        self._desk.set_best.remote(self._name, min(map(score, best), default=None))
        self._desk.enqueue.remote(self._name, [trial.id for trial in trials if trial.state in _RUNNABLE])

    def count_runnable(self) -> int:
        """How many trials could run now, including those that do."""
        with self.lock:
            return sum(self._search.states[state] for state in _RUNNABLE)

    def states(self) -> Counter[State]:
        """How many trials are in each state."""
        with self.lock:
            return self._search.states.copy()

    def act(self, answer: Answer) -> None:
        """Carry out a decision that is already in the journal. Called in Tune's thread."""
        self._desk.answer.remote(self._name, answer.trial, answer.number, answer.decision)
        if answer.stops:
            self._desk.withdraw.remote(self._name, list(answer.stops))
        if answer.resumes:
            # Before new trials: the search has chosen them as the best to train next.
            self._desk.enqueue.remote(self._name, list(answer.resumes), first=True)
        if answer.creates:
            self._desk.enqueue.remote(self._name, list(answer.creates))
        if answer.decision != "continue" or answer.stops:
            self._changed([answer.trial, *answer.stops])
        if answer.done:
            self._desk.end_search.remote(self._name)

    def bind(self, granted: LeaseGranted, *, revived: bool, send_every_s: float) -> None:
        """Draw the trial's hyperparameters, and give them to its group.

        Args:
            revived, send_every_s: of the lease, see `TrialLease`.

        Raises:
            SpaceError: no sample meets the constraint.
        """
        with self.lock:
            view = self._search.trials[granted.trial]
            if view.state not in _RUNNABLE:
                self._desk.drop.remote(granted.lease)
                return
            self._search.on(Started(trial=granted.trial))
            lease = TrialLease(
                number=granted.lease,
                client=self._name,
                trial_id=granted.trial,
                trial_seed=self._search.seed_of(granted.trial),
                hparams=self._search.params(granted.trial),
                trial_dir=self._directory.trial(granted.trial),
                store=self._directory.store(granted.trial),
                last_step=view.last_step,
                revived=revived,
                send_every_s=send_every_s,
            )
        self._desk.bind.remote(granted.lease, lease)

    def retry(self, trial: int) -> None:
        """Queue a trial that failed, before all others."""
        with self.lock:
            # If it was paused meanwhile, or paused and queued again, it continues when its turn comes.
            if self._search.trials[trial].state == "RUNNING":
                # Within the lock: a decision in Tune's thread may withdraw it, and must not reach the desk before this.
                self._desk.enqueue.remote(self._name, [trial], first=True)
