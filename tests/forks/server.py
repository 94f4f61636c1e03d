"""Forks Python processes from one that has imported torch: ``python -m tests.forks.server <socket>``.

A process that starts as Ray starts its workers takes 5 s of CPU until it trains, and one of torchrun's 4 s: nearly all
of it for imports. It is given a script with arguments, environment, directory, output and blocked signals.

The server ends when its input does. To each request it replies with the process's number and, in the end, its exit
code, a line each.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import shutil
import signal
import socket
import sys
from typing import Any

IMPORTED = (
    "torch._dynamo",  # the first optimizer imports it
    "torch.distributed.optim",
    "torch.distributed.run",
    "torch.distributed.tensor.experimental",
    "torch.utils.tensorboard",
    "aiohttp",
    "fsspec",
    "grpc",
    "jsonschema",
    "pandas",
    "pyarrow.fs",
    "pydantic",
    "pytest",
    "requests",
    "rich.console",
    "sklearn.datasets",
    "tqdm",
    "yaml",
)
"""What Ray, torch, dray, the digits and the ranks' scripts import. Not Ray itself, which reads variables of a worker's
when it is imported."""

Request = dict[str, Any]


class Server:
    def __init__(self, place: str) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(place)
        self._listener.listen()
        self._asked: dict[int, socket.socket] = {}
        signal.signal(signal.SIGCHLD, self._reap)

    def serve(self) -> Request | None:
        """Fork at each request until the input ends: returns in each child, with what it is to run."""
        while True:
            ready, _, _ = select.select([self._listener, 0], [], [])
            if 0 in ready:
                return None
            asked, _ = self._listener.accept()
            _, output, _, _ = socket.recv_fds(asked, 1, 3)
            with asked.makefile() as lines:
                request: Request = json.loads(lines.readline())
            # It may end before it is known.
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
            number = os.fork()
            if not number:
                for place, file in enumerate(output):
                    os.dup2(file, place)
            for file in output:
                os.close(file)
            if not number:
                for each in (self._listener, asked, *self._asked.values()):
                    each.close()
                return request
            self._asked[number] = asked
            _tell(asked, number)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])

    def _reap(self, *_: object) -> None:
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                with self._asked.pop(ended[0]) as asked:
                    _tell(asked, os.waitstatus_to_exitcode(ended[1]))


def _tell(asked: socket.socket, number: int) -> None:
    with contextlib.suppress(OSError):  # who asked for a worker does not wait for its end
        asked.sendall(f"{number}\n".encode())


def become(request: Request, path: list[str]) -> None:
    """Be the process that was asked for, as far as one can. `path`: what Python itself has on its path."""
    import numpy

    os.setpgid(0, 0)  # Ray ends a worker's whole process group
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, request["blocked"])
    os.chdir(request["directory"])
    os.environ.clear()
    os.environ.update(request["environment"])
    numpy.random.seed()
    sys.argv = request["argv"]
    sys.path[:] = [os.path.dirname(sys.argv[0]), *_python_path(), *path]
    with contextlib.suppress(ImportError):
        importlib.import_module("sitecustomize")  # as Python does when it starts
    runpy.run_path(sys.argv[0], run_name="__main__")


def _python_path() -> list[str]:
    return [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each]


def main(place: str) -> None:
    path = sys.path[1 + len(_python_path()) :]
    for name in IMPORTED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    server = Server(place)
    print("listens", flush=True)
    request = server.serve()
    if request is None:
        shutil.rmtree(os.path.dirname(place))
    else:
        become(request, path)


if __name__ == "__main__":
    main(sys.argv[1])
