"""An append-only log, one JSON object per line, on disk before `append` returns or, in `together`, before that ends.

A process can die while it writes, so the last line may be torn: it was never acknowledged, and is dropped. A bad line
anywhere else means that the file is damaged, and raises.
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

from searchers.errors import JournalError

Record = dict[str, object]

_LOCK_PATIENCE_S = 0.2  # how long to try for the lock, which `Journal.writer` in another process may hold for a moment


class Journal:
    """The journal at `path`, open for appending by this process only; created, with its directory, if missing.

    A torn last line is removed on opening. The lock is the file `<path>.lock`, and is released when the process ends.

    Raises:
        JournalError: Another process has it open.

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
        self._together_thread: int | None = None
        self._lock = _lock(self.path)
        try:
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            self._size = _whole_bytes(self.path.read_bytes())
            os.ftruncate(self._file, self._size)
            os.fsync(self._file)
            _fsync_directory(self.path.parent)
        except BaseException:
            os.close(self._lock)
            raise

    @staticmethod
    def writer(path: str | os.PathLike[str]) -> int | None:
        """The process id of the writer that has the journal at `path` open; 0 if unknown, None if there is none.

        This takes the lock for a moment, which `Journal` waits out.
        """
        try:
            descriptor = os.open(_lock_path(Path(path)), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            owner = os.read(descriptor, 64).strip()
            return int(owner) if owner.isdigit() else 0
        finally:
            os.close(descriptor)
        return None

    def append(self, record: Mapping[str, object], *, wait: bool = True) -> None:
        """Write the record as one line, and return once it is on disk. Thread-safe."""
        line = json.dumps(record, allow_nan=False, separators=(",", ":")).encode() + b"\n"
        with self._mutex:
            assert self._lock >= 0, f"the journal {self.path} was closed"
            if wait and self._together_thread != threading.get_ident():
                self._write(line)
            else:
                self._unwritten += line

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Write all records that this thread appends in the block at once, when the block ends.

        For one thread at a time.
        """
        self._together_thread = threading.get_ident()
        try:
            yield
        finally:
            self._together_thread = None
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
                # Otherwise the next record would follow half a line, and the journal would be damaged.
                os.ftruncate(self._file, self._size)
                raise
            self._size += len(line)

    def close(self) -> None:
        """Write what is left, and release the lock. Idempotent."""
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
    def read(path: str | os.PathLike[str]) -> list[Record]:
        """All complete records; record n is line n + 1. Works while another process appends."""
        return Journal.parse(Path(path).read_bytes(), where=str(path))

    @staticmethod
    def parse(data: bytes, *, where: str) -> list[Record]:
        """Like `read`, from the content of a journal; `where` is its name in errors."""
        lines = data.count(b"\n")
        try:
            # All at once takes half the time. If that fails, line by line finds the bad one.
            whole = data[: data.rfind(b"\n")].replace(b"\n", b",")
            records: list[Record] = json.loads(b"[%b]" % whole) if lines else []
        except (ValueError, RecursionError):
            records = []
        if len(records) == lines and all(isinstance(record, dict) for record in records):
            return records
        return _parse(data, where=where)


def _parse(data: bytes, *, where: str) -> list[Record]:
    """As `Journal.parse`, line by line, to name the damaged one."""
    records: list[Record] = []
    begin, number = 0, 1
    while begin < len(data):
        newline = data.find(b"\n", begin)
        end = len(data) if newline < 0 else newline + 1
        record = _record(data[begin:end]) if newline >= 0 else None
        if record is None:
            if end == len(data):  # torn: a line without its end, or one that did not reach the disk whole
                break
            shown = data[begin:end][:60]
            raise JournalError(
                f"{where}: line {number} is damaged: expected a JSON object, got {shown!r}; "
                "restore the file from a backup, or truncate it before this line to continue from there"
            )
        records.append(record)
        begin, number = end, number + 1
    return records


def _record(line: bytes) -> Record | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):  # also UnicodeDecodeError
        return None
    return record if isinstance(record, dict) else None


def _whole_bytes(data: bytes) -> int:
    """Length of the data up to the end of its last complete line; only the last two lines are parsed."""
    end = data.rfind(b"\n") + 1
    begin = data.rfind(b"\n", 0, max(end - 1, 0)) + 1
    return end if end == begin or _record(data[begin:end]) is not None else begin


def _lock(path: Path) -> int:
    # A separate file: closing *any* descriptor of a file can drop the process's lock on it where locks are POSIX's
    # (NFS), and the journal is read while it is open. It is never deleted: two processes could then hold two files.
    descriptor = os.open(_lock_path(path), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    deadline = time.monotonic() + _LOCK_PATIENCE_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except OSError:
            if time.monotonic() > deadline:
                owner = os.read(descriptor, 64).decode(errors="replace").strip() or "unknown"
                os.close(descriptor)
                raise JournalError(
                    f"{path} is being written by another run, process {owner}; wait until it ends, or stop it"
                ) from None
        time.sleep(_LOCK_PATIENCE_S / 20)
    os.ftruncate(descriptor, 0)
    os.write(descriptor, f"{os.getpid()}\n".encode())
    return descriptor


def _lock_path(path: Path) -> Path:
    return path.with_name(path.name + ".lock")


def _fsync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
