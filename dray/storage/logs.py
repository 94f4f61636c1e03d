"""Logs of trials (what they print), in an object store beside their checkpoints.

A rank appends to `logs/rank_0.log` on its machine. If its trial goes on on another machine, there is another such file
there. So in the store each file has a name of its own, made from the time of its first line, and the same whoever
copies it: `logs/rank_0.20261121T190202.123Z.log`.
"""

from __future__ import annotations

import contextlib
import logging
import platform
import re
import threading
from pathlib import Path

from dray.storage.location import Location
from dray.storage.outage import Outage
from dray.storage.remote import RemoteDirectory

log = logging.getLogger(__name__)

EVERY_S = 10.0
"""How often logs are copied: if a machine is lost, so much of them may be lost with it."""
BYTES_PER_S = 1 << 20
"""What copying takes at most, on average. A file in an object store can't be appended to: all of a log is copied again
when it has grown, so those of many MiB are copied more rarely."""
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
        self._outage = Outage(
            log,
            fails="the trials' logs can't be copied beside their checkpoints for now, will try again",
            works="the trials' logs are copied beside their checkpoints again, and nothing is missing there",
        )
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
        over, wait_s = False, EVERY_S
        while not over:
            over = self._over.wait(wait_s)
            sent, failures = 0, dict[Path, OSError]()
            for path, remote in list(self._growing.items()):
                ended = path in self._ended
                try:
                    sent += self._copy(path, remote)
                except OSError as error:  # StorageError, or a file here that can't be read
                    failures[path] = error
                    continue
                if ended and path in self._ended:
                    self._ended.discard(path)
                    self._growing.pop(path)
                    self._copied.pop(path, None)
            wait_s = max(EVERY_S, sent / BYTES_PER_S)
            if not failures:
                self._outage.ended()
            for path, failure in failures.items():
                if over:
                    log.error("the end of %s on %s is not in the trial's store: %s", path, platform.node(), failure)
                else:
                    self._outage.began(failure)

    def _copy(self, path: Path, remote: RemoteDirectory) -> int:
        """Copy a log if it has grown; returns the bytes that were sent."""
        with contextlib.suppress(FileNotFoundError):
            content = path.read_bytes()
            if content and self._copied.get(path) != len(content):
                remote.write(stored_as(path), content)
                self._copied[path] = len(content)
                return len(content)
        return 0
