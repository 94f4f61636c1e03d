"""One driver at a time for an experiment in an object store.

On one machine the journal's lock sees to that. Between machines there is only the store, and no lock that every store
has. So the driver that runs the experiment writes `driver.json` there every few seconds. One elsewhere that is to
continue the experiment first waits until that file has not changed for a while; and a driver that finds another's file
in its place ends, for it was taken for dead while its machine or network was away. Of two drivers one always goes on:
each looks before it writes, and the one that finds the other's file does not write again.
"""

from __future__ import annotations

import contextlib
import json
import logging
import platform
import threading
import time
import uuid
from dataclasses import asdict, dataclass, replace

from dray.errors import ExperimentError
from dray.records.directory import ExperimentDirectory
from dray.storage import Location, RemoteDirectory, StorageError

log = logging.getLogger(__name__)

FILE = "driver.json"
EVERY_S = 10.0
"""Seconds between two writes."""
SILENT_S = 3 * EVERY_S
"""A driver that has not written for so long is taken for dead."""
PATIENCE_S = 5.0
"""How long the store is tried for each request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Driver:
    """What `driver.json` says.

    Attributes:
        directory: an id of the experiment's directory on the driver's machine; a copy of the experiment gets another.
        host, path: the machine's name, and that directory.
        time: when it was written, in seconds since 1970 by the driver's clock.
        runs: False once it has ended properly.
    """

    directory: str
    host: str
    path: str
    time: float
    runs: bool = True

    def __str__(self) -> str:
        return f"the driver on {self.host} ({self.path})"

    @property
    def seems_to_run(self) -> bool | None:
        """Whether it runs, as far as one look tells; None if it has not ended properly, or the clocks differ."""
        if not self.runs:
            return False
        return True if abs(time.time() - self.time) < SILENT_S else None


class DriverLock:
    """Held by the driver that runs an experiment; for one that is not in an object store it does nothing.

    Attributes:
        lost_to: who has taken over the experiment, as text, because this driver was silent; None while nobody has.
    """

    def __init__(self, directory: ExperimentDirectory) -> None:
        self.lost_to: str | None = None
        self._directory, self._remote = directory, RemoteDirectory(directory.storage, patience_s=PATIENCE_S)
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def acquire(self) -> None:
        """Hold it from now on. To be called by the one process that has the journal open.

        Raises:
            ExperimentError: another driver runs the experiment, or another directory has continued it.
            StorageError: the store can't be used.
        """
        place, path = self._directory.storage, self._directory.path
        if place.is_local:
            return
        last, self._driver = last_driver(self._directory), _driver_of(self._directory)
        is_other = last is not None and last.directory != self._driver.directory
        if is_other and self._directory.config_file.name in self._remote.sizes():
            raise ExperimentError(
                f"{last} has continued this experiment since; what is in {path} is older than what is in {place}. "
                f"Continue it there, or move {path} away to continue from the newest copy. To go back to the state in "
                f"{path} instead, delete {place}/{FILE} first"
            )
        self._write(runs=True)
        self._thread = threading.Thread(target=self._run, name="dray-driver-lock", daemon=True)
        self._thread.start()

    def is_held(self) -> bool:
        """Look whether it is held.

        Raises:
            StorageError: the store can't be used.
        """
        if self._thread is None:
            return False
        if self.lost_to is None:
            found = read_driver(self._remote)
            if found is not None and found.directory != self._driver.directory:
                self.lost_to = str(found)
        return self.lost_to is None

    def close(self) -> None:
        """Release it, if it is held."""
        self._over.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while self.lost_to is None:
            is_over = self._over.wait(EVERY_S)
            with contextlib.suppress(StorageError):
                if self.is_held():
                    self._write(runs=not is_over)
            if is_over:
                return

    def _write(self, *, runs: bool) -> None:
        with contextlib.suppress(StorageError):  # the copies of the experiment go there too, and say so
            write_driver(self._remote, replace(self._driver, time=time.time(), runs=runs))


def last_driver(directory: ExperimentDirectory) -> Driver | None:
    """The driver that ran an experiment last, if it is in an object store and had one, once no driver runs it.

    Args:
        directory: of the experiment. No process on this machine has its journal open.

    Raises:
        ExperimentError: a driver runs it.
        StorageError: the store can't be used.
    """
    if directory.storage.is_local:
        return None
    return wait_for_silence(directory.storage, own=_driver_of(directory).directory)


def wait_for_silence(place: Location, own: str | None = None) -> Driver | None:
    """Wait until no driver runs the experiment at this place. Returns the last one that did, if any.

    Args:
        own: the id of a directory on this machine that no driver uses now, as its journal's lock shows.

    Raises:
        ExperimentError: one runs it.
        StorageError: the store can't be used.
    """
    remote = RemoteDirectory(place, patience_s=PATIENCE_S)
    last = read_driver(remote)
    if last is None or not last.runs or (last.directory == own and last.host == platform.node()):
        return last
    log.warning(
        "%s did not end properly, or still runs the experiment in %s: looking for %g s whether it does",
        last, place, SILENT_S,
    )  # fmt: skip
    deadline = time.monotonic() + SILENT_S
    while time.monotonic() < deadline:
        time.sleep(min(1.0, SILENT_S / 10))
        now = read_driver(remote)
        if now is None or not now.runs:
            return now
        if now != last:
            raise ExperimentError(f"{now} runs this experiment, which is in {place}; stop that one first")
    return last


def take_over(directory: ExperimentDirectory) -> None:
    """Say that this copy of an experiment, just made, is the one that goes on."""
    write_driver(RemoteDirectory(directory.storage, patience_s=PATIENCE_S), _driver_of(directory))


def read_driver(remote: RemoteDirectory) -> Driver | None:
    """What is in the file in an experiment's place in a store; None if there is none."""
    try:
        return Driver(**json.loads(remote.read(FILE)))
    except (FileNotFoundError, ValueError, TypeError):
        return None


def write_driver(remote: RemoteDirectory, driver: Driver) -> None:
    """Write the file."""
    remote.write(FILE, json.dumps(asdict(driver), indent=1).encode())


def _driver_of(directory: ExperimentDirectory) -> Driver:
    file = directory.path / FILE  # made at its first use
    if not file.exists():
        file.write_text(json.dumps({"directory": uuid.uuid4().hex}))
    mine = str(json.loads(file.read_text())["directory"])
    return Driver(directory=mine, host=platform.node(), path=str(directory.path), time=time.time())
