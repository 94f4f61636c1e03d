"""Keeps a complete copy of an experiment in the object store of its checkpoints, so that it outlives the machine.

The config, the code and its variants, the metrics, the trials' logs and the journal are copied every few seconds while
it runs, and at its end. A file in an object store can't be appended to, so a file that has grown is copied again, and a
large experiment is copied less often: while it runs, copies take at most `BYTES_PER_S` on average.
"""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import re
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from dray.errors import ExperimentError, NoExperiment
from dray.records import driver_lock
from dray.records.directory import ExperimentDirectory, results_root
from dray.records.driver_lock import PATIENCE_S
from dray.records.journal import lost_records, read_journal
from dray.records.lookup import parse_location
from dray.storage import Location, RemoteDirectory
from dray.storage.errors import Outage
from dray.storage.logs import BYTES_PER_S, NAME, stored_as
from dray.text import some
from searchers.journal import lock_content, lock_path

log = logging.getLogger(__name__)

EVERY_S = 10.0
"""Seconds between two copies, and so the part of a search that can be lost with its driver's machine. It is longer if
the growing files (journal, newest metrics, logs) exceed `EVERY_S * BYTES_PER_S`: 100 s for 100 MiB, a million events.
Trials that ended in that time run again, from their checkpoints."""
FIRST_S = 1.0
"""Seconds from the beginning of the run to the first copy."""
LAST_PATIENCE_S = 60.0
"""How long the last copy is retried while the store is unavailable."""
_SHOWN = 5
_TRIAL = re.compile(r"trial_(\d+)/")


class Mirror:
    """Copies an experiment to the object store of its checkpoints, in a thread; a no-op without an object store.

    Args:
        directory: the experiment's directory.
        may_copy: returns whether this process is still the experiment's driver.

    Attributes:
        missing: after `close`, an error that says what the copy lacks and how to copy it; None if it is complete.
    """

    def __init__(self, directory: ExperimentDirectory, may_copy: Callable[[], bool] = lambda: True) -> None:
        self._directory, self._may_copy = directory, may_copy
        self._remote = RemoteDirectory(directory.storage, patience_s=PATIENCE_S)
        self._copied: dict[str, tuple[int, int]] = {}
        self._over = threading.Event()
        self._outage = Outage(
            log,
            fails="can't copy the experiment to its checkpoint storage for now, will try again",
            works="the experiment is copied to its checkpoint storage again, and nothing is missing there",
        )
        self._thread: threading.Thread | None = None
        self.missing: str | None = None
        if not directory.storage.is_local:
            self._thread = threading.Thread(target=self._run, name="dray-mirror", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Make the last copy, and end the thread. Close the journal before."""
        self._over.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        wait_s = FIRST_S
        while not self._over.wait(wait_s):
            wait_s = EVERY_S
            if self._directory.journal.exists():
                try:
                    wait_s = max(EVERY_S, self._copy() / BYTES_PER_S)
                except OSError as error:  # StorageError, or a local file that can't be read
                    self._outage.began(error)
        if not self._directory.journal.exists():  # it has not started, or was deleted
            return
        self._remote = RemoteDirectory(self._directory.storage, patience_s=LAST_PATIENCE_S)
        try:
            self._copy()
        except OSError as error:
            self._report_missing(error)

    def _copy(self) -> int:
        """Copy the changed files, and return the number of bytes sent."""
        sent = 0
        if not self._may_copy():
            return 0
        for path, name, state in self._changed():
            with contextlib.suppress(FileNotFoundError):  # metrics that moved to another part meanwhile
                content = path.read_bytes()
                self._remote.write(name, content)
                self._copied[name] = state
                sent += len(content)
                if path == self._directory.journal:
                    self._remote.write(lock_path(name).name, lock_content(content.count(b"\n")))
        if self._directory.journal.exists():
            self._outage.ended()
        return sent

    def _report_missing(self, error: OSError) -> None:
        names = [name for _, name, _ in self._changed()][::-1]
        here, there = self._directory.path, self._directory.storage
        self.missing = (
            f"{there} lacks a part of the experiment, which is complete only in {here} on {platform.node()}. "
            f"Not copied were {some(names, _SHOWN)}: {error}. Copy them before this machine is gone: "
            f"dray experiment resume {here}"
        )
        log.error("%s", self.missing)

    def _changed(self) -> Iterator[tuple[Path, str, tuple[int, int]]]:
        """The files that differ from their copies, each checked when its turn comes."""
        for path in self._files():
            with contextlib.suppress(FileNotFoundError):
                name, found = self._name_of(path), path.stat()
                state = (found.st_size, found.st_mtime_ns)
                if self._copied.get(name) != state:
                    yield path, name, state

    def _name_of(self, path: Path) -> str:
        name = path.relative_to(self._directory.path)
        return (name.with_name(stored_as(path)) if NAME.fullmatch(path.name) else name).as_posix()

    def _files(self) -> list[Path]:
        """The files to copy: the journal after the metrics, because it must not be ahead of them, and the config last,
        because a copy with a config is complete."""
        directory = self._directory
        # Targets of links are too large to be code.
        code = []
        for root in (directory.code, *sorted(directory.variants.glob("[!.]*"))):
            found = (path for path in sorted(root.rglob("*")) if path.is_file())
            code += [path for path in found if path.resolve().is_relative_to(root.resolve())]
        metrics = [path for path in sorted(directory.metrics.glob("*")) if not path.name.startswith(".")]
        # Only this machine's logs: workers elsewhere copy their own.
        logs = [path for path in directory.path.glob("trial_*/logs/*") if NAME.fullmatch(path.name)]
        return [*code, *logs, *metrics, directory.journal, directory.config_file]


def fetch_experiment(where: str | os.PathLike[str]) -> Path:
    """The directory of an experiment on this machine. An experiment in an object store is copied here first, unless it
    has a directory here.

    Args:
        where: a local directory, or the URI above its checkpoints, used with the environment's credentials.

    Raises:
        NoExperiment: there is none.
        ExperimentError: a driver runs it elsewhere.
        StorageError: the object store can't be used.
    """
    location = parse_location(where)
    if location.is_local:
        return location.path.resolve()
    path = results_root() / location.name
    if not ExperimentDirectory(path).config_file.exists():
        fetch_to(path, location)
    return path


def fetch_to(path: Path, location: Location) -> None:
    """Copy an experiment from an object store to a new directory, in order to continue it there."""
    directory = ExperimentDirectory(path.with_name(f".{path.name}-partial"))
    shutil.rmtree(directory.path, ignore_errors=True)
    driver_lock.wait_for_silence(location)
    trials = fetch_without_trials(location, directory)
    directory.code.mkdir(exist_ok=True)
    records = read_journal(directory.journal)
    started = {record.get("trial") for record in records if record["event"] == "started"}
    if why := lost_records(directory, len(records), where=location):
        raise ExperimentError(why)
    _delete(trials - started, location)
    # Before the rename: without it, the directory could not be resumed.
    driver_lock.take_over(directory, path)
    directory.path.rename(path)


def delete_trials(location: Location) -> None:
    """Delete the trials' files of an experiment that was never copied to the store."""
    _delete(_trials_of(RemoteDirectory(location, patience_s=PATIENCE_S).sizes()), location)


def _delete(trials: Iterable[int], location: Location) -> None:
    """Delete trials that are in no journal: they start from scratch, perhaps with other hyperparameters."""
    for trial in trials:
        RemoteDirectory(location.child(f"trial_{trial}"), patience_s=PATIENCE_S).delete()


def _trials_of(names: Iterable[str]) -> set[int]:
    return {int(found[1]) for name in names if (found := _TRIAL.match(name))}


def fetch_without_trials(location: Location, directory: ExperimentDirectory) -> set[int]:
    """Copy an experiment from an object store, except its trials, into a directory.

    Returns:
        The trials that have files in the store.
    """
    remote = RemoteDirectory(location, patience_s=PATIENCE_S)
    stored = remote.sizes()
    names = [name for name in stored if not _TRIAL.match(name) and name != driver_lock.FILE]
    if directory.config_file.name not in names:
        raise NoExperiment(f"no experiment in {location}: it has no {directory.config_file.name}")
    remote.download(directory.path, names)
    directory.write_storage(location)
    return _trials_of(stored)
