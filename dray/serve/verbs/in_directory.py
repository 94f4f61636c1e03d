"""The verbs of an experiment in a directory: its driver, if it has one, is a process of this machine."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from dray.errors import AlreadyEnded
from dray.experiment.requests import Decided, Trials
from dray.records import copies
from dray.records.directory import ExperimentDirectory
from dray.records.driver_lock import last_driver
from dray.records.journal import read_journal
from dray.records.listing import StoredExperiment, open_experiment
from dray.records.logs import followed_events
from dray.records.overview import COMPLETED, Overview
from dray.serve.client import Server
from dray.serve.control import EndVerb
from dray.serve.draft import Draft
from dray.serve.refusals import WrongState, has_ended, is_running
from dray.serve.verbs.handle import Handle
from dray.serve.verbs.on_server import OnServer
from dray.storage import Location
from searchers.events import Requested
from searchers.journal import Journal

POLL_S = 0.2


class InDirectory(Trials, Handle):
    """An experiment in a directory, or in an object store. Its driver, if it has one, is a process of its own.

    Args:
        server: the one that its forks are submitted to; None: they run here.
    """

    def __init__(
        self, where: str, answered: Callable[[Decided], None] = lambda decided: None, server: Server | None = None
    ) -> None:
        location = Location.of(where)
        super().__init__(location.path if location.is_local else Path(location.name), answered)
        self._where, self.name, self.server = where, location.name, server
        self._known = 0  # records of its journal when it was run again

    @property
    def typed(self) -> str:
        with open_experiment(self._where) as stored:
            return stored.typed

    def read(self) -> Overview:
        with open_experiment(self._where) as stored:
            return stored.overview()

    def _end(self, verb: EndVerb) -> str:
        with self._here() as stored:
            driver = Journal.writer(stored.directory.journal)
            if driver is None:
                if (state := stored.overview().state) in (*COMPLETED, "ERROR"):
                    raise has_ended(self.name, state)
                return state
            _signal(stored, driver, signal.SIGKILL if verb == "kill" else signal.SIGINT)
        return self.wait().state if verb == "kill" else "STOPPING"

    def activate(self) -> str:
        if self.is_active():
            self._known = len(read_journal(ExperimentDirectory(self.path).journal))
            return "RUNNING"
        return self._run()

    def extend(self, **extension: Any) -> str:
        if self.is_active():
            raise is_running(self.name)
        from dray.serve.given import Extension, extension_of, parsed  # aiohttp

        return self._run(**extension_of(parsed(Extension, extension)))

    def _run(self, **extension: Any) -> str:
        from dray.experiment.experiment import Experiment

        experiment = Experiment.resume(self._where, **extension)
        self.ran = True
        experiment.run()
        return self.read().state

    def fork(self, changes: Mapping[str, Any] | str) -> Handle:
        if self.server is not None:
            return OnServer(self.server, self.name, self._answered).fork(changes)
        from dray.experiment.experiment import Experiment

        with open_experiment(self._where) as stored:
            draft = Draft(config=changes, forked=stored.directory.path, is_owner=True)
            with draft.code() as code:
                made = Experiment(draft.read().config, model_dir=code).prepare()
        return InDirectory(str(made.path), self._answered)

    def lines(self, say: Callable[[str], None] = lambda line: None) -> Iterator[str]:
        directory = ExperimentDirectory(self.path)
        return followed_events(directory.journal, directory.config(), self._known)

    def wait(self, say: Callable[[str], None] = lambda line: None) -> Overview:
        with self._here() as stored:
            while self.is_active():
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
            self._run()

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
