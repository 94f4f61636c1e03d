"""The process that writes a worker's trial logs: it copies pipes to files, with the UTC time before each line.

Data in a pipe outlives the process that wrote it: all output of a worker, its C libraries and its children reaches the
file, even if the worker is killed. `dray.worker.log.trial_log` runs this file as a program. It imports only small parts
of the standard library, which takes some 20 ms and 8 MB.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import selectors
import socket
import sys
import time

STAMP_LENGTH = len("2026-11-21T19:02:02.123Z ")
_READ_BYTES = 1 << 16


class _Pipe:
    """A pipe's reading end, copied to the file at ``path`` with an x for each byte of a secret."""

    def __init__(self, path: str, end: int, secrets: list[bytes]) -> None:
        os.set_blocking(end, False)
        self.end = end
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        with contextlib.suppress(OSError):  # a filesystem without locks
            fcntl.flock(self._file, fcntl.LOCK_SH)  # until the pipe is drained and closed: see `tail`
        size = os.fstat(self._file).st_size
        if size and os.pread(self._file, 1, size - 1) != b"\n":  # the previous writer was killed
            os.write(self._file, b"\n")
        self._in_line = False
        self._secrets, self._held = secrets, b""

    def drain(self) -> bool:
        """Copy everything in the pipe. Returns False once nobody can write into it."""
        while True:
            try:
                data = os.read(self.end, _READ_BYTES)
            except BlockingIOError:
                return True
            if not data:
                return False
            data = self._held + data
            for secret in self._secrets:
                data = data.replace(secret, b"x" * len(secret))
            # A possible beginning of a secret is held back until the rest arrives.
            complete = len(data) - max((partial_secret(secret, data) for secret in self._secrets), default=0)
            self._held = data[complete:]
            self._write(data[:complete])

    def flush(self) -> None:
        """Write what was held back: no more of it will come."""
        held, self._held = self._held, b""
        self._write(held)

    def close(self) -> None:
        os.close(self.end)
        os.close(self._file)

    def _write(self, data: bytes) -> None:
        if not data:
            return
        stamp = timestamp(time.time())
        ends_line = data.endswith(b"\n")
        lines = (data[:-1] if ends_line else data).replace(b"\n", b"\n" + stamp)
        left = memoryview((b"" if self._in_line else stamp) + lines + (b"\n" if ends_line else b""))
        self._in_line = not ends_line
        # A full disk loses the output of that time, but not what is printed later.
        with contextlib.suppress(OSError):
            while left:
                left = left[os.write(self._file, left) :]


def partial_secret(secret: bytes, data: bytes) -> int:
    """The length of the longest proper prefix of a secret that the data end with."""
    return next((length for length in range(len(secret) - 1, 0, -1) if data.endswith(secret[:length])), 0)


def timestamp(seconds: float) -> bytes:
    """A time as it appears before a line."""
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
    return f"{whole}.{int(seconds % 1 * 1000):03}Z ".encode()


def serve(control: socket.socket) -> None:
    """Serve until the worker, and every process that could still write into its pipes, is gone.

    The worker sends a file's path and secrets together with a pipe's reading end; or b"?", which is answered once
    everything printed before is written.
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
                message, ends, _, _ = socket.recv_fds(control, _READ_BYTES, 1)
                if not message:
                    ready.unregister(control)
                elif ends:
                    path, *secrets = message.split(b"\0")
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
