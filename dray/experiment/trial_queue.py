"""The desk's queue of trials, kept in step with the search.

Two threads share the search under one lock. Tune's thread passes the trials' results to it, then carries out its
decisions (`TrialQueue.act`); the thread that called `Run.run` gives trials to worker groups, and reports their ends.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Container, Iterable, Sequence
from contextlib import AbstractContextManager

from dray.desk.connection import DeskConnection
from dray.desk.messages import LeaseGranted
from dray.records.directory import ExperimentDirectory
from dray.worker.lease import TrialLease
from searchers.answers import Answer
from searchers.events import Reason, Started
from searchers.search import Search
from searchers.views import NEVER_BEST, State

_RUNNABLE: tuple[State, ...] = ("PENDING", "RUNNING")
"""States of trials that should have workers."""


class TrialQueue:
    """Queues trials at the desk as the search decides.

    Args:
        search: has been started.
        name: of this run, at the desk.
        directory: of the experiment.
        together: entered around several events, so that the journal waits for the disk only once.
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
        together: Callable[[], AbstractContextManager[None]],
        changed: Callable[[Iterable[int]], None],
    ) -> None:
        self._search, self._name, self._directory, self._changed = search, name, directory, changed
        self._together = together
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
        self._desk.tell("set_best", self._name, min(map(score, best), default=None))
        self._desk.tell("enqueue", self._name, [trial.id for trial in trials if trial.state in _RUNNABLE])

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
        self._desk.tell("answer", self._name, answer.trial, answer.number, answer.decision)
        if answer.stops:
            self._desk.tell("withdraw", self._name, list(answer.stops))
        if answer.resumes:
            # Before new trials: the search has chosen them as the best to train next.
            self._desk.tell("enqueue", self._name, list(answer.resumes), first=True)
        if answer.creates:
            self._desk.tell("enqueue", self._name, list(answer.creates))
        if answer.decision != "continue" or answer.stops:
            self._changed([answer.trial, *answer.stops])
        if answer.done:
            self._desk.tell("end_search", self._name)

    def bind(self, granted: Sequence[LeaseGranted], *, revived: Container[int], send_every_s: float) -> None:
        """Draw the hyperparameters of the trials of these leases, and give them to their groups.

        Args:
            revived: trials that had ended before; see `TrialLease`.
            send_every_s: of the leases, likewise.

        Raises:
            SpaceError: no sample meets the constraint.
        """
        leases: list[TrialLease] = []
        with self.lock, self._together():
            for each in granted:
                view = self._search.trials[each.trial]
                if view.state not in _RUNNABLE:
                    self._desk.tell("drop", each.lease)
                    continue
                self._search.on(Started(trial=each.trial))
                lease = TrialLease(
                    number=each.lease,
                    client=self._name,
                    trial_id=each.trial,
                    trial_seed=self._search.seed_of(each.trial),
                    hparams=self._search.params(each.trial),
                    trial_dir=self._directory.trial(each.trial),
                    store=self._directory.store(each.trial),
                    last_step=view.last_step,
                    revived=each.trial in revived,
                    send_every_s=send_every_s,
                )
                leases.append(lease)
        for lease in leases:
            self._desk.tell("bind", lease.number, lease)

    def end(self, trial: int, reason: Reason) -> None:
        """Tell the search, through Tune, that a trial has ended other than by its last report."""
        self._desk.tell("end_trial", self._name, trial, reason)

    def retry(self, trial: int) -> None:
        """Queue a trial that failed, before all others."""
        with self.lock:
            # If it was paused meanwhile, or paused and queued again, it continues when its turn comes.
            if self._search.trials[trial].state == "RUNNING":
                # Within the lock: a decision in Tune's thread may withdraw it, and must not reach the desk before this.
                self._desk.tell("enqueue", self._name, [trial], first=True)
