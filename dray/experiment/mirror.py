"""Keeps a complete copy of an experiment in its checkpoints' object store, so that it outlives its driver's machine.

The config, the code, the metrics, the trials' logs and the journal are copied there every few seconds while it runs,
and at its end.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import threading
from pathlib import Path

from dray.experiment.directory import ExperimentDirectory, results
from dray.experiment.errors import NoExperiment
from dray.storage import Location, RemoteDirectory, StorageError
from dray.storage.logs import NAME, stored_as
from searchers.journal import Journal

log = logging.getLogger(__name__)

EVERY_S = 10.0
"""This much of a search can be lost with its driver's machine; trials that ended in that time run again, from their
checkpoints."""
FIRST_S = 1.0
PATIENCE_S = 5.0
_TRIAL = re.compile(r"trial_(\d+)/")


class Mirror:
    """Copies an experiment to where its checkpoints are, in a thread; does nothing if that is its own directory."""

    def __init__(self, directory: ExperimentDirectory) -> None:
        self._directory = directory
        self._remote = RemoteDirectory(directory.storage, patience_s=PATIENCE_S)
        self._copied: dict[str, tuple[int, int]] = {}
        self._over = threading.Event()
        self._failed = False
        self._thread: threading.Thread | None = None
        if not directory.storage.is_local:
            self._thread = threading.Thread(target=self._run, name="dray-mirror", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Copy what is new, and end. To be called after the journal was closed."""
        self._over.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        over, wait_s = False, FIRST_S
        while not over:
            over, wait_s = self._over.wait(wait_s), EVERY_S
            try:
                if self._directory.journal.exists():
                    self._copy()
            except StorageError as error:
                if not self._failed:
                    log.warning("can't copy the experiment's journal to its checkpoint storage for now: %s", error)
                self._failed = True

    def _copy(self) -> None:
        for path in self._files():
            try:
                name = self._name_of(path)
                found = path.stat()
                state = (found.st_size, found.st_mtime_ns)
                if self._copied.get(name) != state:
                    self._remote.write(name, path.read_bytes())
                    self._copied[name] = state
            except FileNotFoundError:  # metrics that were packed meanwhile
                continue

    def _name_of(self, path: Path) -> str:
        name = path.relative_to(self._directory.path)
        return (name.with_name(stored_as(path)) if NAME.fullmatch(path.name) else name).as_posix()

    def _files(self) -> list[Path]:
        """The journal after the metrics, since it must not be ahead of them; the config last, which makes the copy
        complete."""
        directory = self._directory
        # Not the targets of links, which are too large to be code.
        root = directory.code.resolve()
        found = (path for path in sorted(directory.code.rglob("*")) if path.is_file())
        code = [path for path in found if path.resolve().is_relative_to(root)]
        metrics = [path for path in sorted(directory.metrics.glob("*")) if not path.name.startswith(".")]
        # Logs that this machine sees; workers elsewhere copy their own.
        logs = [path for path in directory.path.glob("trial_*/logs/*") if NAME.fullmatch(path.name)]
        return [*code, *logs, *metrics, directory.journal, directory.config_file]


def brought(where: str | os.PathLike[str]) -> Path:
    """The directory of an experiment on this machine. For one in an object store: its directory here, if there is one,
    else a new copy.

    Args:
        where: a local directory, or the URI above its checkpoints, used with the environment's credentials.

    Raises:
        NoExperiment: there is none.
        StorageError: the object store can't be used.
    """
    try:
        location = Location.of(where)
    except ValueError as error:
        raise NoExperiment(str(error)) from None
    if location.is_local:
        return location.path.resolve()
    remote = RemoteDirectory(location, patience_s=PATIENCE_S)
    path = results() / location.name
    if ExperimentDirectory(path).config_file.exists():
        return path
    sizes = remote.sizes()
    names = [name for name in sizes if not _TRIAL.match(name)]
    if "experiment.yaml" not in names:
        raise NoExperiment(f"no experiment in {location}: it has no experiment.yaml")
    partial = path.with_name(f".{path.name}-partial")
    shutil.rmtree(partial, ignore_errors=True)
    remote.download(partial, names)
    (partial / "code").mkdir(exist_ok=True)
    directory = ExperimentDirectory(partial)
    directory.write_storage(location)
    # Trials that began after the last copy start anew, perhaps with other hyperparameters.
    started = {record.get("trial") for record in Journal.read(directory.journal) if record["event"] == "started"}
    trials = {int(match.group(1)) for name in sizes if (match := _TRIAL.match(name))}
    for trial in trials - started:
        RemoteDirectory(location.child(f"trial_{trial}"), patience_s=PATIENCE_S).delete()
    partial.rename(path)
    return path
