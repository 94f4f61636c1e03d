"""A lock across machines: only one driver at a time runs an experiment that is in an object store.

On one machine the journal's lock ensures that. Across machines there is only the store, and no lock that every store
supports. So the running driver rewrites `driver.json` there every few seconds, as a heartbeat. A driver on another
machine takes over only after the heartbeat has stopped for a while. A driver that finds another driver's file in place
of its own has been presumed dead, for example during a network failure, and exits. One of two drivers always goes on:
each reads the file before it writes, and a driver that reads the other's file does not write again.
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
from pathlib import Path
from types import NoneType

from dray.errors import ExperimentError
from dray.records.directory import ExperimentDirectory
from dray.storage import Location, RemoteDirectory, StorageError
from searchers import rows
from searchers.errors import DamagedFile
from searchers.rows import NUMBER, has_fields

log = logging.getLogger(__name__)

FILE = "driver.json"
EVERY_S = 10.0
"""Seconds between heartbeats."""
SILENT_S = 3 * EVERY_S
"""A driver without a heartbeat for this long is presumed dead."""
POLL_S = 1.0
"""How often another driver's heartbeat is checked."""
PATIENCE_S = 5.0
"""How long an object store is retried: a user, or the next heartbeat or copy, is waiting."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Driver:
    """The contents of `driver.json`.

    Attributes:
        directory: a unique id of the experiment's directory on the driver's machine; a copy gets its own id.
        host, path: the machine's name, and the path of that directory.
        time: the heartbeat, in Unix time (s) by the driver's clock.
        runs: False after a clean exit.
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
        """Whether the driver runs, judged by its last heartbeat; None if it may have died, or the clocks differ."""
        if not self.runs:
            return False
        return True if abs(time.time() - self.time) < SILENT_S else None


_is_driver = has_fields({"directory": (str,), "host": (str,), "path": (str,), "time": NUMBER, "runs": (bool, NoneType)})


class DriverLock:
    """The lock that a running driver holds; a no-op for an experiment without an object store. `lost_to`: a
    description of the driver that has taken over the experiment, or None."""

    def __init__(self, directory: ExperimentDirectory) -> None:
        self.lost_to: str | None = None
        self._directory, self._remote = directory, RemoteDirectory(directory.storage, patience_s=PATIENCE_S)
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def acquire(self) -> None:
        """Take the lock. The caller must have the journal open.

        Raises:
            ExperimentError: another driver runs the experiment, or another directory has continued it.
            StorageError: the store can't be used.
        """
        place, path = self._directory.storage, self._directory.path
        if place.is_local:
            return
        self._driver = _driver_of(self._directory, path)
        last = wait_for_silence(place, own=self._driver.directory)
        is_other = last is not None and last.directory != self._driver.directory
        if is_other and self._directory.config_file.name in self._remote.sizes():
            raise ExperimentError(
                f"{last} has continued this experiment since, so {path} is older than {place}. Resume it there, or "
                f"move {path} away to resume from the newest copy. To go back to the state in {path} instead, delete "
                f"{place}/{FILE} first"
            )
        with contextlib.suppress(StorageError):  # `Mirror` writes to the same store, and reports its failures
            self._write(runs=True)
        self._thread = threading.Thread(target=self._run, name="dray-driver-lock", daemon=True)
        self._thread.start()

    def is_held(self) -> bool:
        if self._thread is None:
            return False
        if self.lost_to is None:
            found = read_driver(self._remote)
            if found is not None and found.directory != self._driver.directory:
                self.lost_to = str(found)
        return self.lost_to is None

    def close(self) -> None:
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
        write_driver(self._remote, replace(self._driver, time=time.time(), runs=runs))


def last_driver(directory: ExperimentDirectory) -> Driver | None:
    """The last driver of an experiment in an object store, or None; an `ExperimentError` if a driver runs it. No
    process on this machine may have its journal open."""
    if directory.storage.is_local:
        return None
    return wait_for_silence(directory.storage, own=_driver_of(directory, directory.path).directory)


def wait_for_silence(place: Location, own: str | None = None) -> Driver | None:
    """Wait until the last driver of an experiment has been silent for long enough. Returns that driver, if any.

    Args:
        own: the id of a directory on this machine; its journal's lock shows that no driver uses it.

    Raises:
        ExperimentError: the driver is running.
    """
    remote = RemoteDirectory(place, patience_s=PATIENCE_S)
    last = read_driver(remote)
    if last is None or not last.runs or (last.directory == own and last.host == platform.node()):
        return last
    log.warning(
        "%s did not exit cleanly, or is still running the experiment in %s: watching its heartbeat for %g s",
        last, place, SILENT_S,
    )  # fmt: skip
    deadline = time.monotonic() + SILENT_S
    while time.monotonic() < deadline:
        time.sleep(POLL_S)
        now = read_driver(remote)
        if now is None or not now.runs:
            return now
        if now != last:
            raise ExperimentError(f"{now} is running this experiment, in {place}; stop it first")
    return last


def take_over(directory: ExperimentDirectory, path: Path) -> None:
    """Record in the store that this copy of an experiment, which is about to move to `path`, is the current one."""
    remote = RemoteDirectory(directory.storage, patience_s=PATIENCE_S)
    write_driver(remote, replace(_driver_of(directory, path), runs=False))


def read_driver(remote: RemoteDirectory) -> Driver | None:
    """The driver recorded in a store; None if there is none."""
    for _ in range(3):  # a file that is replaced while it is read may be cut to its former size
        try:
            return Driver(**rows.parse_document(remote.read(FILE), FILE, _is_driver))
        except FileNotFoundError:
            break
        except (DamagedFile, TypeError):
            continue
    return None


def write_driver(remote: RemoteDirectory, driver: Driver) -> None:
    remote.write(FILE, json.dumps(asdict(driver), indent=1).encode())


def _driver_of(directory: ExperimentDirectory, path: Path) -> Driver:
    file = directory.path / FILE  # created on first use
    if not file.exists():
        file.write_text(json.dumps({"directory": uuid.uuid4().hex}))
    mine = rows.document(file, has_fields({"directory": (str,)}))["directory"]
    return Driver(directory=mine, host=platform.node(), path=str(path), time=time.time())
