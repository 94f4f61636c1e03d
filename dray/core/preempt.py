"""Preemption: requests that a program save its state and return."""

from __future__ import annotations

import enum
import logging
import uuid
from typing import Any

from dray.core.train import Program

log = logging.getLogger(__name__)


class PreemptMode(enum.Enum):
    """Selects the ranks that call `should_preempt()`.

    Attributes:
        WorkersAskChief: all ranks together, and all get the chief's answer.
        ChiefOnly: only the chief, and the program passes the answer on.
        WorkersAskMaster: each rank at any time. All ranks get a positive answer at about the same time.
    """

    WorkersAskChief = "WORKERS_ASK_CHIEF"
    ChiefOnly = "CHIEF_ONLY"
    WorkersAskMaster = "WORKERS_ASK_MASTER"


class PreemptContext:
    """Tells a program when to stop: when the search stops or pauses the trial, when its workers are needed elsewhere,
    or when the experiment is interrupted; in a local run, after a SIGTERM."""

    def __init__(self, program: Program, mode: PreemptMode) -> None:
        self._program, self._mode = program, PreemptMode(mode)
        self._store: Any = None
        self._key = ""

    def start(self) -> PreemptContext:
        """Prepare for `should_preempt()`. `core.Context` calls this on all ranks."""
        if self._mode is PreemptMode.WorkersAskMaster and self._store is None:
            self._store = self._program.peers.side_store()
            # Unique, since the processes may have run another trial before.
            self._key = self._program.peers.broadcast(f"preempt/{uuid.uuid4().hex}")
        return self

    def should_preempt(self, auto_ack: bool = True) -> bool:
        """Return whether the program should save its state and return. A paused or interrupted trial is resumed later.

        Args:
            auto_ack: acknowledge a True answer at once. With False, call `acknowledge_preemption_signal()` when the
                program returns because of it.

        Raises:
            RuntimeError: called on a rank other than the chief, with `PreemptMode.ChiefOnly`.
        """
        program = self._program
        program.pulse()
        if self._mode is PreemptMode.ChiefOnly:
            program.check_chief("should_preempt", "with PreemptMode.ChiefOnly, ")
        asks = program.is_chief or self._mode is not PreemptMode.WorkersAskChief
        stop = asks and (program.stop_requested or program.host.stop_requested())
        if self._mode is PreemptMode.WorkersAskChief:
            stop = program.peers.broadcast(stop)
        elif self._store is not None:
            try:
                if stop:
                    self._store.set(self._key, b"1")
                # Checked even after the set, which does not wait for the store: True once every rank would see it.
                stop = bool(self._store.check([self._key]))
            except RuntimeError as error:
                # The chief serves the store. It has returned, so a stop was requested.
                log.info("rank %d returns, since the chief has: %s", program.peers.rank, error)
                stop = True
        if stop and auto_ack:
            self.acknowledge_preemption_signal()
        return stop

    def acknowledge_preemption_signal(self) -> None:
        """Confirm that the program returns early because it was preempted, so that the trial is resumed later."""
        self._program.host.interrupted()
