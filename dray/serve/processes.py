"""The processes of experiments: each is the driver of one, forked from a template that has imported what drivers need.

One waits, connected to Ray, for the next experiment: imports take seconds, and a connection to Ray half of one. A
process dies with its server; the next server finds the experiment in its queue, and resumes it from its journal.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress

from dray.groups.lent import GroupServer
from dray.serve.driver import Failed, Opened, drive

START_S = 120.0
"""How long a process may take to open an experiment."""


class Driver:
    """An experiment's process.

    Args:
        server: that lends groups.
        home: the results directory.
        ended: called, in a thread, when the process has ended.

    Attributes:
        opened: the experiment; None before it is created or opened.
        failure: why the experiment can't be opened, or its search has failed; None if nothing was reported.
        exit_code: of the process, negative for a signal; None while it runs.
        met_full_disk: whether the disk of the results was full while it ran an experiment, for the server to note.
    """

    def __init__(self, server: GroupServer, home: str, ended: Callable[[Driver], None]) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([drive.__module__])
        self._connection, its = context.Pipe()
        self._process = context.Process(target=drive, args=(its, server, home), name="dray-experiment", daemon=True)
        self._ended = ended
        self._answered = threading.Event()
        self.opened: Opened | None = None
        self.failure: Failed | None = None
        self.exit_code: int | None = None
        self.met_full_disk = False
        self._process.start()
        its.close()
        threading.Thread(target=self._receive, name="dray-experiment", daemon=True).start()

    def send(self, command: object) -> None:
        """Send a command of `dray.serve.driver`. A process that has ended ignores it."""
        with suppress(OSError):
            self._connection.send(command)

    def wait_until_opened(self) -> Failed | None:
        """Wait until the experiment is created or opened. Returns why it can't be; None if it is."""
        self._answered.wait(START_S)
        if self.failure is None and self.opened is None:
            return Failed(
                f"the experiment's process ended (exit code {self.exit_code}) before it was opened; the server's "
                "output says why"
            )
        return self.failure

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process, unless it has ended."""
        if self.exit_code is None and self._process.pid is not None:
            with suppress(ProcessLookupError):
                os.kill(self._process.pid, number)

    def _receive(self) -> None:
        with suppress(EOFError, OSError):
            while True:
                match self._connection.recv():
                    case Opened() as opened:
                        self.opened = opened
                        self._answered.set()
                    case Failed() as failed:
                        self.failure = failed
                        self._answered.set()
        self._process.join()
        self.exit_code = self._process.exitcode
        self._connection.close()
        self._answered.set()
        self._ended(self)
