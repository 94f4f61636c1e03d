"""The desk's queue of trials, kept in step with the search.

Two threads share the search under one lock. Tune's thread passes the trials' results to it, then carries out its
decisions (`TrialQueue.act`); the thread that called `Run.run` gives trials to worker groups, and reports their ends.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable

from dray.desk.connection import DeskConnection
from dray.desk.messages import LeaseGranted
from dray.records.directory import ExperimentDirectory
from dray.worker.lease import TrialLease
from searchers.answers import Answer
from searchers.events import Reason, Started
from searchers.search import Search
from searchers.views import NEVER_BEST, State, TrialView


class TrialQueue:
    """Queues trials at the desk as the search decides.

    Args:
        search: has been started.
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
        name: str,
        directory: ExperimentDirectory,
        changed: Callable[[Iterable[int]], None],
    ) -> None:
        self._search, self._name, self._directory, self._changed = search, name, directory, changed
        self.lock = threading.RLock()

    def begin(self, desk: DeskConnection, score: Callable[[float], float]) -> None:
        """Queue the trials that can run, and set the best value so far. The first call, but for the counts.

        Args:
            desk: the connection to the desk.
            score: a metric as the search ranks it.
        """
        self._desk = desk
        trials = self._search.trials.values()
        best = [trial.best for trial in trials if trial.best is not None and trial.state not in NEVER_BEST]
        self._desk.set_best(self._name, min(map(score, best), default=None))
        self._desk.enqueue(self._name, [trial.id for trial in trials if _is_runnable(trial)])

    def count_runnable(self) -> int:
        """How many trials could run now, including those that do."""
        with self.lock:
            return sum(map(_is_runnable, self._search.trials.values()))

    def states(self) -> Counter[State]:
        """How many trials are in each state."""
        with self.lock:
            return Counter(view.state for view in self._search.trials.values())

    def act(self, answer: Answer) -> None:
        """Carry out a decision that is already in the journal. Called in Tune's thread."""
        self._desk.answer(self._name, answer.trial, answer.number, answer.decision)
        if answer.stops:
            self._desk.withdraw(self._name, list(answer.stops))
        if answer.resumes:
            # Before new trials: the search has chosen them as the best to train next.
            self._desk.enqueue(self._name, list(answer.resumes), first=True)
        if answer.creates:
            self._desk.enqueue(self._name, list(answer.creates))
        if answer.decision != "continue" or answer.stops:
            self._changed([answer.trial, *answer.stops])
        if answer.done:
            self._desk.end_search(self._name)

    def bind(self, granted: LeaseGranted, *, revived: bool, send_every_s: float) -> None:
        """Draw the trial's hyperparameters, and give them to its group.

        Args:
            revived, send_every_s: of the lease, see `TrialLease`.

        Raises:
            SpaceError: no sample meets the constraint.
        """
        with self.lock:
            view = self._search.trials[granted.trial]
            if not _is_runnable(view):
                self._desk.drop(granted.lease)
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
        self._desk.bind(granted.lease, lease)

    def end(self, trial: int, reason: Reason) -> None:
        """Tell the search, through Tune, that a trial has ended other than by its last report."""
        self._desk.end_trial(self._name, trial, reason)

    def retry(self, trial: int) -> None:
        """Queue a trial that failed, before all others."""
        with self.lock:
            # If it was paused meanwhile, or paused and queued again, it continues when its turn comes.
            if self._search.trials[trial].state == "RUNNING":
                # Within the lock: a decision in Tune's thread may withdraw it, and must not reach the desk before this.
                self._desk.enqueue(self._name, [trial], first=True)


def _is_runnable(trial: TrialView) -> bool:
    """Whether the trial should have workers."""
    return trial.state in ("PENDING", "RUNNING")
