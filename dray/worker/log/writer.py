"""The process that writes a worker's trial logs: it copies pipes to files, with the UTC time before each line.

Data in a pipe outlives the process that wrote it: all output of a worker, its C libraries and its children reaches the
file, even if the worker is killed. `dray.worker.log.trial_log` runs this file as a program. It imports only small parts
of the standard library, so that it takes only some 20 ms and 8 MB.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import selectors
import signal
import socket
import struct
import sys
import time

STAMP_LENGTH = len("2026-11-21T19:02:02.123Z ")
ENDING = "dray: the process ended: "
"""Begins the last line of a log if the process ended in a trial; it continues with how the process ended."""
_READ_BYTES = 1 << 16
_ENDS_WITHIN_S = 1.0
"""How long a process that has closed its pipes may take to end."""
# <linux/pidfd.h>, since Linux 6.15.
_PIDFD_GET_INFO = 0xC040FF0B
_PIDFD_INFO_EXIT = 8
_INFO = struct.Struct("QQ11Ii")


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
        """Copy everything in the pipe. Returns False once no process can write into it."""
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
        """Write the data that was held back, because its rest will not come."""
        held, self._held = self._held, b""
        self._write(held)

    def note(self, ending: str) -> None:
        """Write how the process ended."""
        self.drain()
        self.flush()
        self._write((b"\n" if self._in_line else b"") + f"{ENDING}{ending}\n".encode())

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
    """The length of the longest proper prefix of a secret at the end of the data."""
    return next((length for length in range(len(secret) - 1, 0, -1) if data.endswith(secret[:length])), 0)


def timestamp(seconds: float) -> bytes:
    """A time in the format at the beginning of a line."""
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
    return f"{whole}.{int(seconds % 1 * 1000):03}Z ".encode()


def ending(process: int, pid: int) -> str:
    """How an ending process ended: "exited with code 3", "killed by SIGKILL"; "" if unknown.

    Only its parent, Ray, can wait for it. Other processes can ask Linux from 6.15 on; older versions answer only until
    Ray has waited for it, often for less than a millisecond.
    """
    until = time.monotonic() + _ENDS_WITHIN_S
    status, is_there = None, True
    while status is None and is_there and time.monotonic() < until:
        try:
            with open(f"/proc/{pid}/stat", "rb") as file:
                state, *_, code = file.read().rpartition(b")")[2].split()
            status = int(code) if state in b"ZX" else None
        except OSError:
            is_there = False
        with contextlib.suppress(OSError):
            info = bytearray(_INFO.pack(_PIDFD_INFO_EXIT, *[0] * 13))
            fcntl.ioctl(process, _PIDFD_GET_INFO, info)
            mask, *_, code = _INFO.unpack(info)
            status = code if mask & _PIDFD_INFO_EXIT else status
        time.sleep(0.001)
    if status is None:
        return ""
    if os.WIFEXITED(status):
        return f"exited with code {os.WEXITSTATUS(status)}"
    return f"killed by {signal.Signals(os.WTERMSIG(status)).name}"


def serve(control: socket.socket, process: int | None, pid: int) -> None:
    """Serve until the worker, and all processes that could still write into its pipes, are gone.

    The worker sends b"+" or b"-", a file's path and secrets together with a pipe's reading end; b"?", which is answered
    after all earlier output is written; or b".", which also ends the trial. If the worker ends before that, the logs
    that were sent with b"+" say how.

    Args:
        process: a file descriptor of the worker's process; None if the system has no pidfd.
    """
    unfinished: list[_Pipe] = []
    with selectors.DefaultSelector() as ready:
        ready.register(control, selectors.EVENT_READ)
        if process is not None:
            ready.register(process, selectors.EVENT_READ)

        def finish() -> None:
            for pipe in unfinished:
                if pipe.end not in ready.get_map():
                    pipe.close()
            unfinished.clear()

        while sources := [key for key in ready.get_map().values() if key.fd != process] or unfinished:
            # A process closes its pipes shortly before it has ended.
            events = {
                key.fd: key.data for key, _ in ready.select(None if sources is not unfinished else _ENDS_WITHIN_S)
            }
            if not events:
                return
            for pipe in [each for each in events.values() if each is not None]:
                if not pipe.drain():
                    pipe.flush()
                    ready.unregister(pipe.end)
                    if pipe not in unfinished:
                        pipe.close()
            if process in events and control.fileno() not in events:  # otherwise it may have sent a last pipe
                ready.unregister(process)
                if how := ending(process, pid):
                    for pipe in unfinished:
                        pipe.note(how)
                finish()
            if control.fileno() in events:
                message, ends, _, _ = socket.recv_fds(control, _READ_BYTES, 1)
                if not message:
                    ready.unregister(control)
                elif ends:
                    notes_end, path, *secrets = message.split(b"\0")
                    pipe = _Pipe(os.fsdecode(path), ends[0], secrets)
                    ready.register(pipe.end, selectors.EVENT_READ, pipe)
                    if notes_end == b"+":
                        unfinished.append(pipe)
                else:
                    for pipe in [key.data for key in ready.get_map().values() if key.data is not None]:
                        pipe.drain()
                        pipe.flush()
                    if message == b".":
                        finish()
                    control.send(b"!")


def _descriptor_of(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):  # not Linux, or an old version
        return None


if __name__ == "__main__":
    worker = int(sys.argv[2])
    descriptor = _descriptor_of(worker)  # opened now, because the worker waits until the fork
    # This must not be a child of the worker, whose children are ended after a trial and with the worker.
    if os.fork():
        os._exit(0)
    with contextlib.suppress(OSError):
        serve(socket.socket(fileno=int(sys.argv[1])), descriptor, worker)
