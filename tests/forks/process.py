"""Python processes that `server` forks, and the arguments that have it fork Ray's workers."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path

from tests.forks import launcher, rank, ray_worker

ROOT = Path(__file__).parents[2]


@functools.cache
def server() -> str:
    """The socket of this process's server, which ends with it."""
    place = str(Path(tempfile.mkdtemp(prefix="dray-forks-"), "socket"))
    command = [sys.executable, "-m", "tests.forks.server", place]
    started = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
    assert started.stdout is not None
    assert started.stdout.readline(), "the fork server did not start"
    _servers.append(started)
    return place


_servers: list[subprocess.Popen[bytes]] = []


def forked_workers() -> dict[str, str]:
    """Arguments of a node of ``ray.cluster_utils.Cluster`` that this process starts: its workers are forked."""
    os.environ[ray_worker.ADDRESS] = server()
    return {"setup_worker_path": ray_worker.__file__}


class Forked:
    """A script of Python's in a process of its own; as much of ``subprocess.Popen`` as our tests use.

    Args:
        command: the script, and its arguments.
        directory: where it runs.
        output: the file that it prints to; ours by default.

    Attributes:
        returncode: its exit code; None before `communicate`.
    """

    def __init__(
        self,
        *command: str,
        environment: Mapping[str, str],
        directory: Path | None = None,
        output: int = 1,
    ) -> None:
        self.returncode: int | None = None
        request = {
            "argv": command,
            "environment": dict(environment),
            "directory": str(directory or Path.cwd()),
            "blocked": [],
        }
        reads, writes = os.pipe()
        self._server = socket.socket(socket.AF_UNIX)
        self._server.connect(server())
        with open(os.devnull) as nothing:
            socket.send_fds(self._server, [b"."], [nothing.fileno(), output, writes])
        os.close(writes)
        self._server.sendall(json.dumps(request).encode() + b"\n")
        self._replies = self._server.makefile()
        self.pid = int(self._replies.readline())
        self._errors = ""
        self._thread = threading.Thread(target=self._read, args=(reads,), daemon=True)
        self._thread.start()

    def _read(self, reads: int) -> None:
        with open(reads, errors="replace") as errors:
            self._errors = errors.read()
        self.returncode = int(self._replies.readline())
        self._replies.close()
        self._server.close()

    def communicate(self, timeout: float) -> tuple[None, str]:
        """Wait for its end: what it wrote to stderr.

        Raises:
            TimeoutExpired: it runs still.
        """
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise subprocess.TimeoutExpired(str(self.pid), timeout)
        return None, self._errors

    def kill(self) -> None:
        """By SIGKILL, if it runs still."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


def run_script(script: Path, *arguments: str, directory: Path, timeout: float = 250, **environment: str) -> str:
    """What a script prints, first to stdout and then to stderr; it has to end well."""
    with tempfile.TemporaryFile() as output:
        variables = {**os.environ, **environment}
        forked = Forked(str(script), *arguments, environment=variables, directory=directory, output=output.fileno())
        try:
            _, errors = forked.communicate(timeout)
        finally:
            forked.kill()
        assert forked.returncode == 0, errors
        output.seek(0)
        return output.read().decode() + errors


def torchrun(script: Path, *arguments: str, directory: Path, processes: int = 2, **environment: str) -> str:
    """The same of a script on so many ranks under torchrun, whose processes are forked, too."""
    launched = ["--standalone", "--nproc-per-node", str(processes), rank.__file__, str(script), *arguments]
    variables = {**environment, rank.ADDRESS: server()}
    return run_script(Path(launcher.__file__), *launched, directory=directory, **variables)
