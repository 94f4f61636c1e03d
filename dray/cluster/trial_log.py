"""What a trial prints and logs, in a file of its own: also what its subprocesses and its libraries print."""

from __future__ import annotations

import builtins
import contextlib
import fcntl
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from ray.train.v2._internal.logging.patch_print import _original_print

from dray.cluster import stamper
from dray.masking import forms

_SHOWN_LINES = 20
_SHOWN_BYTES = 20_000
_WRITTEN_S = 10.0
"""How long all that was printed may take to be written."""
_PIPE_BYTES = 1 << 20


class Stamper:
    """The process that writes this one's logs; see `dray.cluster.stamper`. It is started when it is needed first."""

    def __init__(self) -> None:
        self._control: socket.socket | None = None

    def pipe_to(self, path: Path, secrets: Sequence[str] = ()) -> int:
        """A descriptor: what is written there comes to ``path``, line by line, without these texts."""
        reading, writing = os.pipe()
        with contextlib.suppress(OSError):  # more than a user may have
            fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        try:
            self._send(b"\0".join([os.fsencode(path), *forms(secrets)]), reading)
        finally:
            os.close(reading)
        return writing

    def written(self) -> None:
        """Wait until all that was printed is in its file."""
        try:
            self._send(b"?")
            assert self._control is not None
            told = self._control.recv(1)
        except OSError:
            told = b""
        if not told:  # it was killed, or has stopped; what comes next has another one
            self.close()

    def close(self) -> None:
        """The process ends when nobody can write to its files any more."""
        if self._control is not None:
            self._control.close()
            self._control = None

    def _send(self, message: bytes, *ends: int) -> None:
        if self._control is not None:
            try:
                socket.send_fds(self._control, [message], ends)
                return
            except OSError:  # it was killed
                self.close()
        self._control, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.settimeout(_WRITTEN_S)
        with its:
            command = [sys.executable, "-I", "-S", stamper.__file__, str(its.fileno())]
            nowhere = subprocess.DEVNULL
            subprocess.run(command, pass_fds=[its.fileno()], stdin=nowhere, stdout=nowhere, stderr=nowhere,
                           start_new_session=True, check=True)  # fmt: skip
        socket.send_fds(self._control, [message], ends)


_stamper = Stamper()


class TrialLog:
    """The file that ``printed_to`` writes.

    Attributes:
        path: of the file.
        descriptor: what is written there is in the file, too.
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path, self.descriptor = path, descriptor
        self._began = path.stat().st_size if path.exists() else 0

    def end(self) -> str:
        """The last lines of what was printed since the beginning of the block, for an error."""
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        _stamper.written()
        if not self.path.exists():
            return "    | (nothing)"
        size = self.path.stat().st_size
        with self.path.open("rb") as file:
            file.seek(max(self._began, size - _SHOWN_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
        shown = [line[stamper.STAMP_LENGTH :] for line in lines[-_SHOWN_LINES:]]
        return "\n".join(f"    | {line}" for line in shown) or "    | (nothing)"


@contextlib.contextmanager
def printed_to(path: Path, secrets: Sequence[str] = ()) -> Iterator[TrialLog]:
    """Append to ``path`` whatever this process and its children print in the block, each line with the time in UTC.

    All of it is in the file when the block is left, and soon after a process that is killed in it. Where one of the
    secrets was printed, there is an x for each of its bytes.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = _stamper.pipe_to(path, secrets)
    log = TrialLog(path, descriptor)
    before = sys.stdout, sys.stderr
    for stream in before:
        stream.flush()
    saved = os.dup(1), os.dup(2)
    try:
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        sys.stdout, sys.stderr = _lines(1), _lines(2)
        try:
            yield log
        finally:
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(ValueError, OSError):  # closed by the trial; nobody reads it any more
                    stream.flush()
    finally:
        sys.stdout, sys.stderr = before
        os.dup2(saved[0], 1)
        os.dup2(saved[1], 2)
        for number in (*saved, descriptor):
            os.close(number)
        _stamper.written()


def _lines(descriptor: int) -> IO[str]:
    return open(descriptor, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)


def print_as_python_does() -> None:
    """Undo what Ray Train has made of ``print`` in a worker: a line of its own log, and of the trial's own log too."""
    builtins.print = _original_print


def log_as_python_starts() -> None:
    """No handlers, so that a program's own ``logging.basicConfig()`` has its effect."""
    root = logging.getLogger()
    root.handlers.clear()
    root.setLevel(logging.WARNING)


def log_as_the_command_line(log_format: str) -> None:
    """What ``dray experiment create --local`` shows of a trial: all from INFO on."""
    root = logging.getLogger()
    root.handlers[:] = [logging.StreamHandler(sys.stderr)]
    root.handlers[0].setFormatter(logging.Formatter(log_format))
    root.setLevel(logging.INFO)
