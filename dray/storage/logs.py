"""Uploads the logs of trials to the object store that has their checkpoints, and downloads them.

A rank appends to `logs/rank_0.log` on its machine. If its trial continues on another machine, there is another such
file there. In the store the name of each file therefore includes the time of its first line, whoever copies it:
`logs/rank_0.20261121T190202.123Z.log`.
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
"""How often logs are uploaded: a lost machine loses at most this much of them."""
BYTES_PER_S = 1 << 20
"""The average upload rate is at most this. An object can't be appended to: a log that has grown is uploaded as a whole
again, so logs of many MiB are uploaded less often."""
PATIENCE_S = 5.0
NAME = re.compile(r"rank_(\d+)(?:\.[\dTZ.]+)?\.log")
"""A log's name, on a machine or in a store."""
_STAMP = re.compile(rb"(\d{4})-(\d\d)-(\d\d)T(\d\d):(\d\d):(\d\d\.\d{3}Z) ")


def stored_as(path: Path) -> str:
    """The name that a local log has in the store.

    Raises:
        FileNotFoundError: There is no such file.
    """
    with path.open("rb") as file:
        first = _STAMP.match(file.read(32))
    if first is None:
        return path.name
    year, month, day, hour, minute, second = (part.decode() for part in first.groups())
    return f"{path.stem}.{year}{month}{day}T{hour}{minute}{second}.log"


def fetch_logs(trial: Location, local: Path, into: Path) -> None:
    """Download a trial's logs, except those of this machine.

    Args:
        trial: The trial's location in the store.
        local: The directory of its logs on this machine; need not exist.
        into: A directory, which is created.

    Raises:
        StorageError: The store can't be read.
    """
    remote = RemoteDirectory(trial.child("logs"), patience_s=PATIENCE_S)
    mine = {stored_as(path) for path in local.glob("rank_*.log")}
    remote.download(into, [name for name in remote.sizes() if NAME.fullmatch(name) and name not in mine])


class LogUploader:
    """Uploads growing logs from a background thread. A failure does not affect the trial."""

    def __init__(self) -> None:
        self._growing: dict[Path, RemoteDirectory] = {}
        self._ended: set[Path] = set()
        self._uploaded: dict[Path, int] = {}
        self._over = threading.Event()
        self._outage = Outage(
            log,
            fails="can't upload the trials' logs to the checkpoint storage, will retry",
            works="the trials' logs are uploaded to the checkpoint storage again, and none is missing",
        )
        self._thread: threading.Thread | None = None

    def begin(self, path: Path, trial: Location) -> None:
        """Upload this log from now on.

        Args:
            path: The log, which need not exist yet.
            trial: The trial's location in the store.
        """
        self._ended.discard(path)
        self._growing[path] = RemoteDirectory(trial.child("logs"), patience_s=PATIENCE_S)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="dray-logs", daemon=True)
            self._thread.start()

    def end(self, path: Path) -> None:
        """Upload this log once more: nothing more is written to it. Does nothing without `begin`."""
        if path in self._growing:
            self._ended.add(path)

    def close(self) -> None:
        """Upload what is new, and stop."""
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
                    sent += self._upload(path, remote)
                except OSError as error:  # StorageError, or a local file that can't be read
                    failures[path] = error
                    continue
                if ended and path in self._ended:
                    self._ended.discard(path)
                    self._growing.pop(path)
                    self._uploaded.pop(path, None)
            wait_s = max(EVERY_S, sent / BYTES_PER_S)
            if not failures:
                self._outage.ended()
            for path, failure in failures.items():
                if over:
                    log.error(
                        "the end of %s on %s was not uploaded: %s",
                        path,
                        platform.node(),
                        failure,
                    )
                else:
                    self._outage.began(failure)

    def _upload(self, path: Path, remote: RemoteDirectory) -> int:
        """Upload a log if it has grown. Returns the number of bytes sent."""
        with contextlib.suppress(FileNotFoundError):
            content = path.read_bytes()
            if content and self._uploaded.get(path) != len(content):
                remote.write(stored_as(path), content)
                self._uploaded[path] = len(content)
                return len(content)
        return 0
