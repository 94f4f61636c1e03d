"""The messages of one lease to its driver and to the desk, and their answers."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from dray.leases.messages import DeskReport, Reply, Row
from dray.rpc.calls import PeerUnreachable
from dray.rpc.connection import Connection
from dray.worker.lease import DriverLost, LeaseLost, TrialLease

MAX_IN_FLIGHT = 16
"""Unanswered reports after which the trial waits for the oldest answer."""

FRESH_S = 5.0
"""An answer that took longer to come, as where the connection was lost meanwhile, may no longer be true."""


class TrialLink:
    """Sends reports to the trial's driver, in order, and collects the answers; asks the desk, which may be in the same
    process, whether to stop.

    `send_at_once`, `confirm_commit`, `saved` and `damaged` may be called in a different thread.
    """

    def __init__(self, driver: Connection, desk: Connection, lease: TrialLease) -> None:
        self._driver, self._desk, self._lease = driver, desk, lease
        self._kept: list[Row] = []
        self._in_flight: deque[Future[Reply]] = deque()
        self._sent_at = -math.inf
        self._stop: Future[bool] | None = None  # the call that waits for a request to stop

    # ------------------------------------------------------------------ reports
    def send(self, report: DeskReport, *, wait: bool) -> Reply:
        """Send a report. With `wait`, return the search's decision on it, otherwise the answer to earlier reports."""
        report = replace(report, rows=[*self._kept, *report.rows])
        self._kept, self._sent_at = [], time.monotonic()
        answer: Future[Reply] = self._driver.report(self._lease.number, report, wait)
        if wait:
            reply: Reply = self._result(answer)
            return reply
        self._in_flight.append(answer)
        return self._answered()

    def send_soon(self, rows: Sequence[Row]) -> Reply:
        """Send rows that are not urgent, together with later ones. Returns the answer to earlier reports."""
        self._kept += rows
        if time.monotonic() < self._sent_at + self._lease.send_every_s:
            return self._answered()
        return self.send(DeskReport(), wait=False)

    def send_at_once(self, row: Row) -> None:
        """Send a row, without an answer."""
        self._driver.tell("report", self._lease.number, DeskReport(rows=[row]), False)

    def _answered(self) -> Reply:
        """The first received answer other than "continue", if any; otherwise "continue"."""
        reply: Reply = "continue"
        while self._in_flight and reply == "continue":
            # Only the oldest is checked, because reports arrive in order.
            if len(self._in_flight) <= MAX_IN_FLIGHT and not self._in_flight[0].done():
                break
            reply = self._result(self._in_flight.popleft())
        return reply

    def flush(self) -> None:
        """Send the rows that `send_soon` has kept."""
        if self._kept:
            self.send(DeskReport(), wait=False)

    def wait_for_answers(self) -> None:
        """Wait until the driver has every report."""
        while self._in_flight:
            self._result(self._in_flight.popleft())

    def stop_requested(self) -> bool:
        """Whether the desk wants the workers back."""
        # The message is sent at the first question, so trials that end quickly never send it.
        if self._stop is None:
            self._stop = self._desk.stop_wanted(self._lease.number)
        try:
            return self._stop.done() and self._stop.result()
        except PeerUnreachable:  # the next report fails
            return False

    # ------------------------------------------------------------------ the best of the experiment
    def offer_best(self, score: float) -> None:
        """Record a score as the best if it is, without waiting."""
        self._driver.tell("improves", self._lease.number, score)

    def is_best(self, score: float) -> bool:
        """Record a score as the best if it is, and return whether it is."""
        return bool(self._result(self._driver.improves(self._lease.number, score)))

    def best(self) -> float | None:
        """The best score of all trials, or None."""
        best: float | None = self._result(self._driver.best())
        return best

    # ------------------------------------------------------------------ checkpoints
    def confirm_commit(self) -> None:
        """Ask whether a checkpoint may be committed, after the driver has recorded all earlier reports: a process that
        has lost the lease must not write while another one has it."""
        asked_at = -math.inf
        while time.monotonic() > asked_at + FRESH_S:
            asked_at = time.monotonic()
            if not self._result(self._driver.may_commit(self._lease.number)):
                raise self.lost()

    def saved(self, checkpoint: str, batches: int, value: float | None, seconds: float | None = None) -> None:
        """Report a committed checkpoint, with the search's metric at its batch, if known. `seconds`: the time to write
        it; None if it existed before."""
        self._driver.tell("saved", self._lease.trial_id, checkpoint, batches, value, seconds)

    def damaged(self, checkpoint: str, why: str) -> None:
        """Report a checkpoint that can no longer be used."""
        self._driver.tell("damaged", self._lease.trial_id, checkpoint, why)

    def _result(self, answer: Future[Any]) -> Any:
        """The driver's answer; `DriverLost` if the driver has ended or can't be reached."""
        try:
            return answer.result()
        except PeerUnreachable as error:
            raise DriverLost(f"trial {self._lease.trial_id} has lost its driver: {error}") from None

    def lost(self) -> LeaseLost:
        """The error for a lease that the driver has fenced off."""
        return LeaseLost(f"trial {self._lease.trial_id} now runs on other workers")
