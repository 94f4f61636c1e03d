"""Redirects the output of a trial, its subprocesses and its libraries to the trial's log file."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO

from dray.masking import forms
from dray.worker.log import writer
from dray.worker.log.tail import log_tail

_FLUSH_S = 10.0
"""How long writing all output may take."""


class LogWriter:
    """The process that writes this process's logs; see `dray.worker.log.writer`. It starts when it is first needed."""

    def __init__(self) -> None:
        self._control: socket.socket | None = None
        self._lock = threading.Lock()

    def pipe_to(self, path: Path, secrets: Sequence[str] = (), *, notes_end: bool = True) -> int:
        """A file descriptor whose data is appended to ``path``, with the secrets masked. `notes_end`: the file will say
        how this process ended, if it does before `flush`."""
        reading, writing = os.pipe()
        try:
            with self._lock:
                self._send(b"\0".join([b"+" if notes_end else b"-", os.fsencode(path), *forms(secrets)]), reading)
        finally:
            os.close(reading)
        return writing

    def flush(self, *, is_over: bool = False) -> None:
        """Wait until all output is in its file. Unless `is_over`, the log will say how this process ended, if it
        does."""
        with self._lock:
            try:
                self._send(b"." if is_over else b"?")
                assert self._control is not None
                answer = self._control.recv(1)
            except OSError:
                answer = b""
            if not answer:  # the process was killed, or is stuck; the next output gets a new one
                self.close()

    def close(self) -> None:
        """Let the process end once no process can write to its pipes."""
        if self._control is not None:
            self._control.close()
            self._control = None

    def _send(self, message: bytes, *descriptors: int) -> None:
        if self._control is not None:
            try:
                socket.send_fds(self._control, [message], descriptors)
                return
            except OSError:  # it was killed
                self.close()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.settimeout(_FLUSH_S)
        with theirs:
            command = [sys.executable, "-I", "-S", writer.__file__, str(theirs.fileno()), str(os.getpid())]
            null = subprocess.DEVNULL
            subprocess.run(command, pass_fds=[theirs.fileno()], stdin=null, stdout=null, stderr=null,
                           start_new_session=True, check=True)  # fmt: skip
        socket.send_fds(self._control, [message], descriptors)


log_writer = LogWriter()


class TrialLog:
    """The log file of a trial's rank, while output is redirected to it. Data written to `descriptor` is appended;
    `flush` waits until it is in the file."""

    def __init__(self, path: Path, descriptor: int, flush: Callable[[], object] = log_writer.flush) -> None:
        self.path, self.descriptor, self._flush = path, descriptor, flush
        self._start = path.stat().st_size if path.exists() else 0

    def tail(self) -> str:
        """The last lines since the redirection began, for an error message."""
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        self._flush()
        return log_tail(self.path, self._start)


@contextlib.contextmanager
def redirect_output(path: Path, secrets: Sequence[str] = ()) -> Iterator[TrialLog]:
    """Append all output of this process and its children in the block to ``path``, each line with the UTC time. Each
    byte of a secret is replaced with an x.

    The output is in the file when the block ends, or soon after the process is killed in it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = log_writer.pipe_to(path, secrets)
    log = TrialLog(path, descriptor)
    streams = sys.stdout, sys.stderr
    for stream in streams:
        stream.flush()
    saved = os.dup(1), os.dup(2)
    try:
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        sys.stdout, sys.stderr = text_stream(1), text_stream(2)
        try:
            yield log
        finally:
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(ValueError, OSError):  # the trial has closed it, or the writer was killed
                    stream.flush()
    finally:
        sys.stdout, sys.stderr = streams
        os.dup2(saved[0], 1)
        os.dup2(saved[1], 2)
        for number in (*saved, descriptor):
            os.close(number)
        log_writer.flush(is_over=True)


@contextlib.contextmanager
def appending(path: Path, secrets: Sequence[str] = ()) -> Iterator[IO[str]]:
    """A stream whose text is appended to ``path`` like redirected output, while that goes elsewhere. It is in the file
    when the block ends."""
    descriptor = log_writer.pipe_to(path, secrets, notes_end=False)
    try:
        with text_stream(descriptor) as stream:
            yield stream
    finally:
        os.close(descriptor)
        log_writer.flush()


def text_stream(descriptor: int) -> IO[str]:
    """A stream for the text that a trial prints."""
    return open(descriptor, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)


def reset_logging() -> None:
    """Remove Ray's handlers from the root logger, so that a program's own ``logging.basicConfig()`` takes effect."""
    root = logging.getLogger()
    root.handlers.clear()
    root.setLevel(logging.WARNING)


def log_to_stderr(log_format: str) -> None:
    """Log to stderr from level INFO on, like ``dray experiment create --local``."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(log_format))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO)
