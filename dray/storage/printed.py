"""What trials print, in an object store beside their checkpoints.

A rank of a trial appends to `logs/rank_0.log` on the machine that it runs on. A trial that goes on on another machine
has another such file there. So each has in the store a name of its own, with the time of its first line, and whoever
copies a file finds the same name: `logs/rank_0.20261121T190202.123Z.log`.
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
"""So much of what a machine that is lost has printed may be lost with it."""
PATIENCE_S = 5.0
NAME = re.compile(r"rank_(\d+)(?:\.[\dTZ.]+)?\.log")
"""Of a log, here and in a store."""
_STAMP = re.compile(rb"(\d{4})-(\d\d)-(\d\d)T(\d\d):(\d\d):(\d\d\.\d{3}Z) ")


def stored_as(path: Path) -> str:
    """The name in a store of a log of this machine.

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
    """Bring the logs of a trial that are not those of this machine.

    Args:
        trial: its place in the store.
        here: the directory of its logs on this machine; it need not exist.
        into: a directory, which is made.

    Raises:
        StorageError: the store can't be used.
    """
    remote = RemoteDirectory(trial.child("logs"), patience_s=PATIENCE_S)
    mine = {stored_as(path) for path in here.glob("rank_*.log")}
    remote.download(into, [name for name in remote.sizes() if NAME.fullmatch(name) and name not in mine])


class LogCopies:
    """Copies logs into the store while they grow, in a thread of its own; it never ends a trial."""

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
            path: of the log; it need not exist yet.
            trial: the place of its trial.
        """
        self._ended.discard(path)
        self._growing[path] = RemoteDirectory(trial.child("logs"), patience_s=PATIENCE_S)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="dray-logs", daemon=True)
            self._thread.start()

    def end(self, path: Path) -> None:
        """Nothing more is written to this log: it is copied once more. Of one that was not begun: nothing."""
        if path in self._growing:
            self._ended.add(path)

    def close(self) -> None:
        """Copy what is new, and end."""
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
                log.warning("what trials print is not copied beside their checkpoints for now: %s", error)
            self._failed = True
            return False
        return True
