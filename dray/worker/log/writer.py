"""Writes what comes through pipes to files, with the UTC time before each line: a process beside each worker.

What is in a pipe outlives the process that wrote it: whatever a worker, its C libraries and its children have printed
gets to its file, even if the worker is killed. `dray.worker.log.trial_log` starts this file as a program, which imports
only small parts of the standard library: that takes some 20 ms and 8 MB.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import sys
import time

STAMP_LENGTH = len("2026-11-21T19:02:02.123Z ")
_AT_ONCE = 1 << 16


class _Pipe:
    """A pipe's reading end, and the file at ``path`` that it is written to, with an x for each byte of a secret."""

    def __init__(self, path: str, end: int, secrets: list[bytes]) -> None:
        os.set_blocking(end, False)
        self.end = end
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        size = os.fstat(self._file).st_size
        if size and os.pread(self._file, 1, size - 1) != b"\n":  # its last writer was killed
            os.write(self._file, b"\n")
        self._in_line = False
        self._secrets, self._held = secrets, b""

    def drain(self) -> bool:
        """Write all that there is; False if nobody can write into the pipe any more."""
        while True:
            try:
                data = os.read(self.end, _AT_ONCE)
            except BlockingIOError:
                return True
            if not data:
                return False
            data = self._held + data
            for secret in self._secrets:
                data = data.replace(secret, b"x" * len(secret))
            # What may be the beginning of a secret waits for its end.
            whole = len(data) - max((_begun(secret, data) for secret in self._secrets), default=0)
            self._held = data[whole:]
            self._keep(data[:whole])

    def flush(self) -> None:
        """Write what was held back: no more of it comes."""
        held, self._held = self._held, b""
        self._keep(held)

    def _keep(self, data: bytes) -> None:
        # The disk may be full: what comes meanwhile is lost, later output need not be.
        with contextlib.suppress(OSError):
            if data:
                self._write(data)

    def _write(self, data: bytes) -> None:
        stamp = stamped(time.time())
        whole = data.endswith(b"\n")
        lines = (data[:-1] if whole else data).replace(b"\n", b"\n" + stamp)
        left = memoryview((b"" if self._in_line else stamp) + lines + (b"\n" if whole else b""))
        self._in_line = not whole
        while left:
            left = left[os.write(self._file, left) :]

    def close(self) -> None:
        os.close(self.end)
        os.close(self._file)


def _begun(secret: bytes, data: bytes) -> int:
    """How many of a secret's first bytes, but not all, the data end with."""
    return next((length for length in range(len(secret) - 1, 0, -1) if data.endswith(secret[:length])), 0)


def stamped(seconds: float) -> bytes:
    """A time as it stands before a line."""
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
    return f"{whole}.{int(seconds % 1 * 1000):03}Z ".encode()


def serve(control: socket.socket) -> None:
    """Serve until the worker, and everything that could still print to its pipes, is gone.

    The worker sends a file's path and secrets with a pipe's reading end; or b"?", which is answered once everything
    printed before is written.
    """
    with selectors.DefaultSelector() as ready:
        ready.register(control, selectors.EVENT_READ)
        while ready.get_map():
            events = [key for key, _ in ready.select()]
            for pipe in [key.data for key in events if key.data is not None]:
                if not pipe.drain():
                    pipe.flush()
                    ready.unregister(pipe.end)
                    pipe.close()
            if any(key.data is None for key in events):
                asked, ends, _, _ = socket.recv_fds(control, _AT_ONCE, 1)
                if not asked:
                    ready.unregister(control)
                elif ends:
                    path, *secrets = asked.split(b"\0")
                    pipe = _Pipe(os.fsdecode(path), ends[0], secrets)
                    ready.register(pipe.end, selectors.EVENT_READ, pipe)
                else:
                    for key in list(ready.get_map().values()):
                        if key.data is not None:
                            key.data.drain()
                            key.data.flush()
                    control.send(b"!")


if __name__ == "__main__":
    # Not as a child of the worker: children are ended after a trial, and with the worker.
    if os.fork():
        os._exit(0)
    with contextlib.suppress(OSError):
        serve(socket.socket(fileno=int(sys.argv[1])))
