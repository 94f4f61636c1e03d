"""Logs of trials (what they print), in an object store beside their checkpoints.

A rank appends to `logs/rank_0.log` on its machine. If its trial goes on on another machine, there is another such file
there. So in the store each file has a name of its own, made from the time of its first line, and the same whoever
copies it: `logs/rank_0.20261121T190202.123Z.log`.
"""

from __future__ import annotations

import logging
import re
import threading
from pathlib import Path

from dray.storage.errors import StorageError
from dray.storage.location import Location
from dray.storage.remote import RemoteDirectory

log = logging.getLogger(__name__)

EVERY_S = 10.0
"""How often logs are copied: if a machine is lost, so much of them may be lost with it."""
PATIENCE_S = 5.0
NAME = re.compile(r"rank_(\d+)(?:\.[\dTZ.]+)?\.log")
"""A log's name, on a machine and in a store."""
_STAMP = re.compile(rb"(\d{4})-(\d\d)-(\d\d)T(\d\d):(\d\d):(\d\d\.\d{3}Z) ")


def stored_as(path: Path) -> str:
    """The name in the store of a log on this machine.

    Raises:
        FileNotFoundError: there is no such file.
    """
    with path.open("rb") as file:
        first = _STAMP.match(file.read(32))
    if first is None:
        return path.name
    year, month, day, hour, minute, second = (part.decode() for part in first.groups())
    return f"{path.stem}.{year}{month}{day}T{hour}{minute}{second}.log"


def bring_logs(trial: Location, here: Path, into: Path) -> None:
    """Download a trial's logs, but those of this machine.

    Args:
        trial: its place in the store.
        here: the directory of its logs on this machine; need not exist.
        into: a directory, which is made.

    Raises:
        StorageError: the store can't be used.
    """
    remote = RemoteDirectory(trial.child("logs"), patience_s=PATIENCE_S)
    mine = {stored_as(path) for path in here.glob("rank_*.log")}
    remote.download(into, [name for name in remote.sizes() if NAME.fullmatch(name) and name not in mine])


class LogCopies:
    """Copies growing logs into the store, in a thread of its own; its failures never end a trial."""

    def __init__(self) -> None:
        self._growing: dict[Path, RemoteDirectory] = {}
        self._ended: set[Path] = set()
        self._copied: dict[Path, int] = {}
        self._over = threading.Event()
        self._failed = False
        self._thread: threading.Thread | None = None

    def begin(self, path: Path, trial: Location) -> None:
        """Copy this log from now on.

        Args:
            path: of the log; need not exist yet.
            trial: the trial's place in the store.
        """
        self._ended.discard(path)
        self._growing[path] = RemoteDirectory(trial.child("logs"), patience_s=PATIENCE_S)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="dray-logs", daemon=True)
            self._thread.start()

    def end(self, path: Path) -> None:
        """Nothing more is written to this log: copy it once more, if `begin` was called for it."""
        if path in self._growing:
            self._ended.add(path)

    def close(self) -> None:
        """Copy what is new, and stop."""
        self._over.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        over = False
        while not over:
            over = self._over.wait(EVERY_S)
            for path, remote in list(self._growing.items()):
                ended = path in self._ended
                if self._copy(path, remote) and ended and path in self._ended:
                    self._ended.discard(path)
                    self._growing.pop(path)
                    self._copied.pop(path, None)

    def _copy(self, path: Path, remote: RemoteDirectory) -> bool:
        try:
            content = path.read_bytes()
            if content and self._copied.get(path) != len(content):
                remote.write(stored_as(path), content)
                self._copied[path] = len(content)
        except FileNotFoundError:
            pass
        except StorageError as error:
            if not self._failed:
                log.warning("the trials' logs can't be copied beside their checkpoints for now: %s", error)
            self._failed = True
            return False
        return True
