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
from pathlib import Path

from dray.errors import ConfigError, ExperimentError, Fault
from dray.groups.lent import GroupServer
from dray.serve.driver import Begun, Create, Ended, Failed, Opened, drive

START_S = 120.0
"""How long a process may take to open an experiment."""
MAX_SPARES = 3
"""How many processes in a row may end before they have begun with an experiment."""


class Driver:
    """An experiment's process. `ended` is called, in a thread, when the experiment has ended, and again when the
    process has.

    Attributes:
        path: of the experiment that it is to open, or has created; None before.
        has_begun: it has received the experiment.
        opened: the experiment; None before it is created or opened.
        failure: why the experiment can't be opened, or its search has failed; None if nothing was reported.
        exit_code: of the process, negative for a signal; None while it runs.
    """

    def __init__(self, server: GroupServer, home: str, ended: Callable[[Driver], None]) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([drive.__module__])
        self._connection, its = context.Pipe()
        self._process = context.Process(target=drive, args=(its, server, home), name="dray-experiment", daemon=True)
        self._ended = ended
        self._answered = threading.Event()
        self.path: Path | None = None
        self.has_begun = False
        self.opened: Opened | None = None
        self.failure: Failed | None = None
        self.exit_code: int | None = None
        self._process.start()
        its.close()
        threading.Thread(target=self._receive, name="dray-experiment", daemon=True).start()

    def send(self, command: object) -> None:
        """Send a command of `dray.serve.driver`. A process that has ended ignores it."""
        with suppress(OSError):
            self._connection.send(command)

    def wait_until_opened(self) -> Failed | None:
        """Wait until the experiment is created or opened. Returns why it can't be; None if it is."""
        if not self._answered.wait(START_S):
            return _import_failed(f"importing the model takes longer than {START_S:.0f} s")
        if self.failure is None and self.opened is None:
            return _import_failed(
                f"the experiment's process ended ({self.how_ended}) while it imported the model; the server's output "
                "may say why"
            )
        return self.failure

    @property
    def how_ended(self) -> str:
        """Its exit code, or the signal that killed it, in words."""
        code = self.exit_code or 0
        return f"killed by signal {-code}" if code < 0 else f"exit code {code}"

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process, unless it has ended."""
        if self.exit_code is None and self._process.pid is not None:
            with suppress(ProcessLookupError):
                os.kill(self._process.pid, number)

    def _receive(self) -> None:
        with suppress(EOFError, OSError):
            while True:
                match self._connection.recv():
                    case Begun():
                        self.has_begun = True
                    case Opened() as opened:
                        self.opened, self.path = opened, opened.path
                        self._answered.set()
                    case Failed() as failed:
                        self.failure = failed
                        self._answered.set()
                    case Ended():
                        self._ended(self)
        self._process.join()
        self.exit_code = self._process.exitcode
        self._connection.close()
        self._answered.set()
        self._ended(self)


def _import_failed(what: str) -> Failed:
    return Failed(what, (Fault("entrypoint", what),))


class Spares:
    """Keeps one process waiting for the next experiment. Thread-safe."""

    def __init__(self, start: Callable[[], Driver]) -> None:
        self._start, self._lock = start, threading.Lock()
        self._closed = False
        self._opening: set[Driver] = set()
        self._waiting = start()

    def take(self) -> Driver:
        """The process that waits; the next one starts."""
        with self._lock:
            taken = self._waiting if self._waiting.exit_code is None else self._start()
            self._waiting = self._start()
            return taken

    def replace_ended(self) -> None:
        """Start another process if the one that waits has ended."""
        with self._lock:
            if self._waiting.exit_code is not None and not self._closed:
                self._waiting = self._start()

    def create(self, config: Path, code: Path) -> Driver:
        """Create an experiment in a process, which then waits for `dray.serve.driver.Run`.

        Raises:
            ConfigError: with every fault of the config, or because its model can't be imported.
            ExperimentError: for reasons that are not the experiment's.
        """
        for _ in range(MAX_SPARES):
            process = self.take()
            with self._lock:
                self._opening.add(process)
                if self._closed:
                    process.signal(signal.SIGKILL)
            try:
                process.send(Create(config=config, code=code))
                failed = process.wait_until_opened()
            finally:
                with self._lock:
                    self._opening.remove(process)
            if self._closed:
                raise ExperimentError("the server is ending; submit it again once it is back")
            if failed is None:
                return process
            process.signal(signal.SIGKILL)
            if process.has_begun:
                raise ConfigError(failed.faults) if failed.faults else ExperimentError(failed.message)
        raise ExperimentError(
            f"{MAX_SPARES} processes in a row ended ({process.how_ended}) before they could take the experiment; the "
            "server's output may say why"
        )

    def close(self) -> None:
        """End the process that waits, and those that are creating experiments."""
        with self._lock:
            self._closed = True
            for process in (self._waiting, *self._opening):
                process.signal(signal.SIGKILL)
