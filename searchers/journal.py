"""An append-only log with one JSON object per line, written to disk before `append` returns or a `batch` ends.

If a process dies while it writes, the last line may be incomplete. Such a line was never acknowledged, and is dropped.
A bad line anywhere else raises `DamagedFile`, see `searchers.rows`. The lock file has the number of records on disk, so
that a file that was emptied, cut, or replaced by an older copy can be recognised (`Journal.num_lost`).
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType

from searchers import rows
from searchers.errors import JournalError
from searchers.rows import Check, is_object

Record = dict[str, object]

_LOCK_TIMEOUT_S = 0.2  # `Journal.writer` in another process may hold the lock for a moment


class Journal:
    """A journal, open for appending by this process only.

    Opening creates the file and its directory if needed, and removes an incomplete last line. The lock is the file
    `<path>.lock`; it is released at the latest when the process ends. Its lines are the process id and the number of
    records.

    Raises:
        JournalError: Another process has the journal open.
        DamagedFile: It can't be read.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "journal.jsonl"
    >>> with Journal(path) as journal:
    ...     journal.append({"event": "started", "trial": 0})
    >>> Journal.read(path)
    [{'event': 'started', 'trial': 0}]
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._mutex = threading.Lock()
        self._unwritten = b""
        self._batch_thread: int | None = None
        self._lock, known = _lock(self.path)
        try:
            data = rows.read(self.path, missing=b"")
            self._size = rows.complete_size(data)
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            self._count = data.count(b"\n", 0, self._size)
            self._count += _num_lost(self._count, known)  # to be found by the next reader too
            os.ftruncate(self._file, self._size)
            os.fsync(self._file)
            _fsync_directory(self.path.parent)
            self._note_count()
        except BaseException:
            os.close(self._lock)
            raise

    @staticmethod
    def writer(path: str | os.PathLike[str]) -> int | None:
        """Return the process id of the journal's writer; 0 if it is unknown, None if there is none.

        This holds the lock for a moment; opening a `Journal` waits for that.
        """
        try:
            descriptor = os.open(lock_path(path), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return _read_lock(descriptor)[0]
        finally:
            os.close(descriptor)
        return None

    @staticmethod
    def num_lost(path: str | os.PathLike[str], count: int) -> int | None:
        """Return how many of the records that were on disk are not among the `count` that are left; None if unknown.

        The loss of the last one alone is 0: its line may be incomplete.
        """
        try:
            _, known = _read_lock(descriptor := os.open(lock_path(path), os.O_RDONLY | os.O_CLOEXEC))
        except FileNotFoundError:
            return None
        os.close(descriptor)
        return _num_lost(count, known) if known else None

    def append(self, record: Mapping[str, object], *, wait: bool = True) -> None:
        """Write the record as one line, and return once it is on disk. Thread-safe.

        Args:
            record: A JSON object.
            wait: False for a record that may be lost in a crash: it is written with the next record or on `close`.

        Raises:
            ValueError: The record is not strict JSON, e.g. has a NaN. Nothing is written.
            OSError: The write failed. A partly written line is removed.
        """
        line = json.dumps(record, allow_nan=False, separators=(",", ":")).encode() + b"\n"
        with self._mutex:
            assert self._lock >= 0, f"the journal {self.path} was closed"
            if wait and self._batch_thread != threading.get_ident():
                self._write(line)
            else:
                self._unwritten += line

    @contextlib.contextmanager
    def batch(self) -> Iterator[None]:
        """Write all records that this thread appends in the block at once, when the block ends.

        Only one thread at a time may use it.
        """
        self._batch_thread = threading.get_ident()
        try:
            yield
        finally:
            self._batch_thread = None
            with self._mutex:
                self._write(b"")

    def _write(self, line: bytes) -> None:
        line, self._unwritten = self._unwritten + line, b""
        if line:
            try:
                written = 0
                while written < len(line):
                    written += os.write(self._file, line[written:])
                os.fsync(self._file)
            except BaseException:
                # Otherwise the next record would follow half a line and damage the journal.
                os.ftruncate(self._file, self._size)
                raise
            self._size += len(line)
            self._count += line.count(b"\n")
            self._note_count()

    def _note_count(self) -> None:
        with contextlib.suppress(OSError):  # a full disk
            os.pwrite(self._lock, lock_content(self._count, process=os.getpid()), 0)

    def close(self) -> None:
        """Write pending records, and release the lock. Idempotent."""
        with self._mutex:
            if self._lock >= 0:
                try:
                    self._write(b"")
                finally:
                    os.close(self._file)
                    os.close(self._lock)
                    self._file = self._lock = -1

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    @staticmethod
    def read(path: str | os.PathLike[str], check: Check = is_object) -> list[Record]:
        """Read all complete records; record n is line n + 1. Another process may append meanwhile.

        Args:
            path: The journal.
            check: What each record must be, see `searchers.rows`; by default any JSON object.

        Raises:
            FileNotFoundError: There is no such file.
            DamagedFile: It can't be read, or a line other than an incomplete last one is not a record.
        """
        return rows.strict(rows.read(Path(path)), path, check)


def _lock(path: Path) -> tuple[int, int]:
    """Take the lock, and return its descriptor and the number of records that it has noted."""
    # The lock is a separate file, because the journal is read while it is open, and with POSIX locks (NFS) closing any
    # descriptor of a file releases the process's lock on it. The file is never deleted: otherwise two processes could
    # lock two different files.
    descriptor = os.open(lock_path(path), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    deadline = time.monotonic() + _LOCK_TIMEOUT_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except OSError:
            if time.monotonic() > deadline:
                owner, _ = _read_lock(descriptor)
                os.close(descriptor)
                raise JournalError(
                    f"{path} is being written by another run, process {owner or 'unknown'}; wait until it ends, "
                    "or stop it"
                ) from None
        time.sleep(_LOCK_TIMEOUT_S / 20)
    _, known = _read_lock(descriptor)
    content = lock_content(known, process=os.getpid())
    os.pwrite(descriptor, content, 0)
    os.ftruncate(descriptor, len(content))
    return descriptor, known


def lock_path(path: str | os.PathLike[str]) -> Path:
    return Path(f"{os.fspath(path)}.lock")


def lock_content(count: int, *, process: int = 0) -> bytes:
    """Return the content of a lock file: the process that writes the journal, or 0, and the number of records."""
    return b"%d\n%d\n" % (process, count)


def _read_lock(descriptor: int) -> tuple[int, int]:
    """Return the process and the number of records in a lock file; 0 for what it lacks."""
    fields = os.pread(descriptor, 64, 0).split()
    process, count, *_ = [int(field) if field.isdigit() else 0 for field in fields] + [0, 0]
    return process, count


def _num_lost(count: int, known: int) -> int:
    return known - count if known > count + 1 else 0


def _fsync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
