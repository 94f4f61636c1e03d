"""Uploads the logs of trials to the object store with their checkpoints, and downloads them.

A rank appends to `logs/rank_0.log` on its machine. If its trial continues on another machine, that has a file of the
same name. In the store, a file's name therefore includes the time of its first line:
`logs/rank_0.20261121T190202.123Z.log`.
"""

from __future__ import annotations

import contextlib
import logging
import platform
import re
import threading
from dataclasses import dataclass
from pathlib import Path

from dray.storage.errors import Outage
from dray.storage.location import Location
from dray.storage.remote import RemoteDirectory

log = logging.getLogger(__name__)

EVERY_S = 10.0  # how often logs are uploaded: a lost machine loses at most this much of them
#: The maximum average rate. A log that has grown is uploaded again as a whole, so large logs are uploaded less often.
BYTES_PER_S = 1 << 20
PATIENCE_S = 5.0
NAME = re.compile(r"rank_(\d+)(?:\.[\dTZ.]+)?\.log")  # a log's name, on a machine or in a store
_STAMP = re.compile(rb"(\d{4})-(\d\d)-(\d\d)T(\d\d):(\d\d):(\d\d\.\d{3}Z) ")


def stored_as(path: Path) -> str:
    with path.open("rb") as file:
        first = _STAMP.match(file.read(32))
    if first is None:
        return path.name
    year, month, day, hour, minute, second = (part.decode() for part in first.groups())
    return f"{path.stem}.{year}{month}{day}T{hour}{minute}{second}.log"


def fetch_logs(trial: Location, local: Path, into: Path) -> None:
    """Download a trial's logs into a directory, except this machine's, which are in `local`."""
    remote = RemoteDirectory(trial.child("logs"), patience_s=PATIENCE_S)
    local_names = {stored_as(path) for path in local.glob("rank_*.log")}
    remote.download(into, [name for name in remote.sizes() if NAME.fullmatch(name) and name not in local_names])


@dataclass(slots=True)
class _Log:
    remote: RemoteDirectory
    size: int = 0  # bytes in the store
    ended: bool = False


class LogUploader:
    """Uploads growing logs from a background thread. A failure does not affect the trial."""

    def __init__(self) -> None:
        self._logs: dict[Path, _Log] = {}
        self._over = threading.Event()
        self._outage = Outage(
            log,
            fails="can't upload the trials' logs to the checkpoint storage, will retry",
            works="the trials' logs are uploaded to the checkpoint storage again, and none is missing",
        )
        self._thread: threading.Thread | None = None

    def begin(self, path: Path, trial: Location) -> None:
        """Start to upload a log, which need not exist yet, to the trial's location in the store."""
        self._logs[path] = _Log(RemoteDirectory(trial.child("logs"), patience_s=PATIENCE_S))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="dray-logs", daemon=True)
            self._thread.start()

    def end(self, path: Path) -> None:
        """Upload this log a last time: it is complete. No-op without `begin`."""
        if path in self._logs:
            self._logs[path].ended = True

    def close(self) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        over, wait_s = False, EVERY_S
        while not over:
            over = self._over.wait(wait_s)
            sent, failures = 0, dict[Path, OSError]()
            for path, growing in list(self._logs.items()):
                ended = growing.ended
                try:
                    sent += _upload(path, growing)
                except OSError as error:  # StorageError, or a local file that can't be read
                    failures[path] = error
                    continue
                if ended and self._logs[path] is growing:  # otherwise the trial is back, and its log grows again
                    del self._logs[path]
            wait_s = max(EVERY_S, sent / BYTES_PER_S)
            if not failures:
                self._outage.ended()
            for path, failure in failures.items():
                if over:
                    log.error("the end of %s on %s was not uploaded: %s", path, platform.node(), failure)
                else:
                    self._outage.began(failure)


def _upload(path: Path, growing: _Log) -> int:
    """Upload a log if it has grown, and return the number of bytes sent."""
    with contextlib.suppress(FileNotFoundError):
        content = path.read_bytes()
        if len(content) != growing.size:
            growing.remote.write(stored_as(path), content)
            growing.size = len(content)
            return len(content)
    return 0
