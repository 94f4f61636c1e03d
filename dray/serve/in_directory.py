"""The verbs of an experiment in a directory: its driver, if it has one, is a process of this machine."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from dray.errors import AlreadyEnded
from dray.experiment.requests import Decided, Trials
from dray.records import copies
from dray.records.driver_lock import last_driver
from dray.records.listing import StoredExperiment, open_experiment
from dray.records.overview import COMPLETED, Overview
from dray.serve.control import EndVerb
from dray.serve.refusals import WrongState, has_ended, is_running
from dray.storage import Location
from searchers.events import Requested
from searchers.journal import Journal

POLL_S = 0.2


class InDirectory(Trials):
    """An experiment in a directory, or in an object store. Its driver, if it has one, is a process of its own.
    `dray.serve.client.OnServer` describes the verbs."""

    is_on_server, ran = False, False

    def __init__(self, where: str, answered: Callable[[Decided], None]) -> None:
        location = Location.of(where)
        super().__init__(location.path if location.is_local else Path(location.name), answered)
        self._where, self.name = where, location.name

    @property
    def typed(self) -> str:
        with open_experiment(self._where) as stored:
            return stored.typed

    def read(self) -> Overview:
        with open_experiment(self._where) as stored:
            return stored.overview()

    def end(self, verb: EndVerb) -> str:
        with self._here() as stored:
            driver = Journal.writer(stored.directory.journal)
            if driver is None:
                if (state := stored.overview().state) in (*COMPLETED, "ERROR"):
                    raise has_ended(self.name, state)
                return state
            _signal(stored, driver, signal.SIGKILL if verb == "kill" else signal.SIGINT)
        return self.wait().state if verb == "kill" else "STOPPING"

    def go_on(self, **extension: Any) -> None:
        from dray.experiment.experiment import Experiment

        if extension and self.is_active():
            raise is_running(self.name)
        experiment = Experiment.resume(self._where, **extension)
        self.ran = True
        experiment.run()

    def wait(self, say: Callable[[str], None] = lambda line: None) -> Overview:
        with self._here() as stored:
            while Journal.writer(stored.directory.journal) is not None:
                time.sleep(POLL_S)
            return stored.overview()

    def delete(self) -> None:
        with open_experiment(self._where) as stored:
            if not stored.is_copy and self.is_active():
                raise is_running(self.name)
            last_driver(stored.directory)  # raises if one runs it on another machine
            copies.delete(stored)

    def ask(self, make: Any) -> Decided:
        with self._here():
            return super().ask(make)

    def run_again(self, request: Requested) -> None:
        with suppress(AlreadyEnded):  # the request waits until the limits are raised
            self.go_on()

    @contextmanager
    def _here(self) -> Iterator[StoredExperiment]:
        with open_experiment(self._where) as stored:
            if stored.is_copy:
                where = "give its directory on the machine of its driver"
                raise WrongState(f"{stored.where} is in an object store, which is only read; {where}")
            yield stored


def _signal(stored: StoredExperiment, driver: int, number: signal.Signals) -> None:
    """Send a signal to an experiment's driver. `WrongState` if it is no process of this user on this machine."""
    lock = stored.directory.journal.with_name(f"{stored.directory.journal.name}.lock")
    try:
        # 0: the lock names no process; it may be held on another machine.
        if not driver or not _has_open(driver, lock):
            raise ProcessLookupError
        os.kill(driver, number)
    except ProcessLookupError:
        there = f", as process {driver} there" if driver else ""
        where = f"is running on another machine or in another container{there}"
        raise WrongState(f"{stored.where} {where}; stop it there") from None
    except PermissionError:
        raise WrongState(f"{stored.where} is running in process {driver} of another user, who can stop it") from None


def _has_open(process: int, file: Path) -> bool:
    """Whether a process has the file open. The journal's lock may name a process of another machine."""
    try:
        descriptors = list(Path(f"/proc/{process}/fd").iterdir())
    except FileNotFoundError:
        raise ProcessLookupError from None
    mine = file.stat()
    for descriptor in descriptors:
        try:
            if os.path.samestat(descriptor.stat(), mine):
                return True
        except FileNotFoundError:  # closed meanwhile, or not a file
            continue
    return False
