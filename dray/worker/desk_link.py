"""The messages of one lease to the desk, and the desk's answers: all that a trial's host uses of Ray."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, cast

import ray

from dray.desk.messages import DeskReport, Reply, Row
from dray.worker.lease import LeaseLost, TrialLease

MAX_IN_FLIGHT = 16
"""Unanswered reports after which the trial waits for the oldest answer."""


class DeskLink:
    """Sends reports, in order, and collects the answers.

    `confirm_commit`, `saved` and `damaged` may be called in another thread.

    Args:
        desk: the desk's actor handle.
        lease: the lease that all messages belong to.
    """

    def __init__(self, desk: Any, lease: TrialLease) -> None:
        self._desk, self._lease = desk, lease
        self._kept: list[Row] = []
        self._in_flight: deque[Any] = deque()
        self._sent_at = -math.inf
        self._stop: Any = None  # the call that waits for a request to stop

    # ------------------------------------------------------------------ reports
    def send(self, report: DeskReport, *, wait: bool) -> Reply:
        """Send a report. With `wait` the answer is the search's decision on it, otherwise that on earlier ones."""
        report = report._replace(rows=[*self._kept, *report.rows])
        self._kept, self._sent_at = [], time.monotonic()
        answer = self._desk.report.remote(self._lease.number, report._asdict(), wait)
        if wait:
            return cast(Reply, ray.get(answer))
        self._in_flight.append(answer)
        return self._answered()

    def send_soon(self, rows: Sequence[Row]) -> Reply:
        """Send rows that nobody waits for, together with later ones; returns the answer to earlier reports."""
        self._kept += rows
        if time.monotonic() < self._sent_at + self._lease.send_every_s:
            return self._answered()
        return self.send(DeskReport(), wait=False)

    def _answered(self) -> Reply:
        """The first answer received that is not "continue", if there is one; otherwise "continue"."""
        reply: Reply = "continue"
        while self._in_flight and reply == "continue":
            # Only the oldest is checked: reports arrive in order.
            timeout = 0 if len(self._in_flight) <= MAX_IN_FLIGHT else None
            ready, _ = ray.wait([self._in_flight[0]], timeout=timeout)
            if not ready:
                break
            reply = ray.get(self._in_flight.popleft())
        return reply

    def flush(self) -> None:
        """Send the rows that `send_soon` has kept."""
        if self._kept:
            self.send(DeskReport(), wait=False)

    def wait_for_answers(self) -> None:
        """Wait until the desk has every report."""
        while self._in_flight:
            ray.get(self._in_flight.popleft())

    def stop_requested(self) -> bool:
        """Whether the desk wants the workers back."""
        # Asked for the first time once a trial has run for a moment: short ones never send the message.
        if self._stop is None:
            self._stop = self._desk.stop_wanted.remote(self._lease.number)
        try:
            ready, _ = ray.wait([self._stop], timeout=0)
            return bool(ready) and bool(ray.get(self._stop))
        except ray.exceptions.RayError:
            self._stop = None  # ask again: it may be unreachable for a moment; if it died, the next report fails
            return False

    # ------------------------------------------------------------------ the best of the experiment
    def offer_best(self, score: float) -> None:
        """Record a score as the best, if it is; does not wait."""
        self._desk.improves.remote(self._lease.number, score)

    def is_best(self, score: float) -> bool:
        """Record a score as the best, if it is; returns whether."""
        return bool(ray.get(self._desk.improves.remote(self._lease.number, score)))

    def best(self) -> float | None:
        """The best score of any trial; None if there is none."""
        return cast("float | None", ray.get(self._desk.best.remote(self._lease.client)))

    # ------------------------------------------------------------------ checkpoints
    def confirm_commit(self) -> None:
        """Wait until the driver has recorded all earlier reports.

        This is also the fence: a process that lost the lease must not write while another one has it.

        Raises:
            LeaseLost: the trial runs on other workers.
        """
        if not ray.get(self._desk.may_commit.remote(self._lease.number)):
            raise self.lost()

    def saved(self, checkpoint: str, batches: int, value: float | None, seconds: float | None = None) -> None:
        """A checkpoint is committed.

        Args:
            value: the search's metric at its batch, if known.
            seconds: how long it took to write and commit, if it has just been.
        """
        self._desk.saved.remote(self._lease.client, self._lease.trial_id, checkpoint, batches, value, seconds)

    def damaged(self, checkpoint: str, why: str) -> None:
        """A checkpoint can no longer be used."""
        self._desk.damaged.remote(self._lease.client, self._lease.trial_id, checkpoint, why)

    def lost(self) -> LeaseLost:
        """The error to raise when the desk has fenced off this lease."""
        return LeaseLost(f"trial {self._lease.trial_id} now runs on other workers")
