"""Writes what a trial, its subprocesses and its libraries print and log to a file of its own."""

from __future__ import annotations

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

from dray.masking import forms
from dray.worker.log import writer
from dray.worker.log.tail import last_printed

_WRITTEN_S = 10.0
"""How long it may take to write all that was printed."""
_PIPE_BYTES = 1 << 20


class Stamper:
    """The process that writes this process's logs; see `dray.worker.log.writer`. It is started when first needed."""

    def __init__(self) -> None:
        self._control: socket.socket | None = None

    def pipe_to(self, path: Path, secrets: Sequence[str] = ()) -> int:
        """A file descriptor: what is written to it goes to ``path``, line by line, without the secrets."""
        reading, writing = os.pipe()
        with contextlib.suppress(OSError):  # it may be more than a user is allowed
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
        if not told:  # the process was killed, or has stopped; the next output gets another one
            self.close()

    def close(self) -> None:
        """Let the process end, once nobody can write to its files any more."""
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
            command = [sys.executable, "-I", "-S", writer.__file__, str(its.fileno())]
            nowhere = subprocess.DEVNULL
            subprocess.run(command, pass_fds=[its.fileno()], stdin=nowhere, stdout=nowhere, stderr=nowhere,
                           start_new_session=True, check=True)  # fmt: skip
        socket.send_fds(self._control, [message], ends)


_stamper = Stamper()


class TrialLog:
    """The file that ``printed_to`` writes.

    Attributes:
        path: of the file.
        descriptor: what is written to it goes to the file too.
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path, self.descriptor = path, descriptor
        self._began = path.stat().st_size if path.exists() else 0

    def end(self) -> str:
        """The last lines printed since the block began, for an error."""
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        _stamper.written()
        return last_printed(self.path, self._began)


@contextlib.contextmanager
def printed_to(path: Path, secrets: Sequence[str] = ()) -> Iterator[TrialLog]:
    """Append to ``path`` whatever this process and its children print in the block, each line with the time in UTC.

    All of it is in the file when the block ends, or soon after the process is killed in it. Each byte of a secret that
    was printed is replaced by an x.
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
                with contextlib.suppress(ValueError, OSError):  # the trial has closed it, or nobody reads it any more
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


def log_as_python_starts() -> None:
    """Remove all handlers, so that a program's own ``logging.basicConfig()`` takes effect."""
    root = logging.getLogger()
    root.handlers.clear()
    root.setLevel(logging.WARNING)


def log_as_the_command_line(log_format: str) -> None:
    """Log as ``dray experiment create --local`` does: everything from INFO on, to stderr."""
    root = logging.getLogger()
    root.handlers[:] = [logging.StreamHandler(sys.stderr)]
    root.handlers[0].setFormatter(logging.Formatter(log_format))
    root.setLevel(logging.INFO)
