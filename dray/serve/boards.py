"""TensorBoard and optuna-dashboard for experiments, served to browsers on this machine."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from typing_extensions import TypedDict

from dray.errors import ExperimentError
from dray.records.directory import ExperimentDirectory
from dray.records.local_runs import is_local_run
from dray.records.reader import ExperimentReader

HOST = "localhost"
PORT = 6006
"""TensorBoard's port; optuna-dashboard gets the next one."""
FRESH_S = 0.5
"""Least seconds between two reads of an experiment."""
PORTS = 100
"""Number of ports to try."""
_STARTING = threading.Lock()


def serve(path: Path, *, port: int, say: Callable[[str], None]) -> None:
    """Serve both until Ctrl-C; a running experiment is shown with a delay of seconds.

    Only browsers on this machine can open them; elsewhere use ``ssh -L 6006:localhost:6006 -L 6007:localhost:6007``.

    Args:
        path: the directory of an experiment, or of a local run, which has no study.
        port: TensorBoard's port; optuna-dashboard gets the next one. Ports in use are skipped.
        say: prints the URLs.
    """
    with contextlib.suppress(KeyboardInterrupt):
        found = _started(path, port)
        say(f"TensorBoard       {found['tensorboard']}")
        if found["optuna_dashboard"] is not None:
            say(f"optuna-dashboard  {found['optuna_dashboard']}")
        elif not is_local_run(path):
            say("optuna-dashboard is not installed here: pip install 'dray-train[ui]'")
        say("press Ctrl-C to stop them")
        threading.Event().wait()


class Boards(TypedDict):
    tensorboard: str | None
    optuna_dashboard: str | None  # null: not installed


def boards(path: Path) -> Boards:
    """The URLs of both, which run until this process ends."""
    with _STARTING:
        return _started(path, PORT)


@functools.cache
def _started(path: Path, port: int) -> Boards:
    tensorboard, dashboard = free_port(port), None
    address = start_tensorboard(path, tensorboard)
    if not is_local_run(path) and importlib.util.find_spec("optuna_dashboard") is not None:
        dashboard = start_dashboard(path, free_port(tensorboard + 1))
    return {"tensorboard": address, "optuna_dashboard": dashboard}


def free_port(first: int) -> int:
    """The first free port of this machine from `first` on; an `ExperimentError` if a hundred are in use."""
    for port in range(first, min(first + PORTS, 2**16)):
        with socket.socket() as probe, contextlib.suppress(OSError):
            # As servers do, so that connections of a server that has just ended do not block the port.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((HOST, port))
            return port
    raise ExperimentError(f"no port is free from {first} to {first + PORTS - 1}; give another with --port")


def start_tensorboard(logs: Path, port: int) -> str:
    """Serve TensorBoard for a directory, in threads that end with this process, and return its URL."""
    from tensorboard import default, program

    # "auto" would print its choice on standard error.
    fast = "true" if importlib.util.find_spec("tensorboard_data_server") is not None else "false"
    board = program.TensorBoard(plugins=default.get_plugins())
    board.configure(argv=["dray", "--logdir", str(logs), "--host", HOST, "--port", str(port), "--load_fast", fast])
    return str(board.launch())


def start_dashboard(path: Path, port: int) -> str:
    """Serve optuna-dashboard for an experiment, in threads that end with this process, and return its URL."""
    from werkzeug.serving import WSGIRequestHandler, make_server

    class Quiet(WSGIRequestHandler):
        def log(self, type: str, message: str, *args: object) -> None:
            """Do not log successful requests."""

    server = make_server(HOST, port, _Dashboard(path), threaded=True, request_handler=Quiet)
    threading.Thread(target=server.serve_forever, name="dray-dashboard", daemon=True).start()
    return f"http://{HOST}:{port}/dashboard/studies/0"


class _Dashboard:
    """optuna-dashboard as a WSGI application, remade with a new study when the experiment has changed."""

    def __init__(self, path: Path) -> None:
        self._reader = ExperimentReader(ExperimentDirectory.open(path))
        self._lock = threading.Lock()
        self._made: Any = None
        self._version = -1

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Any:
        with self._lock:
            self._reader.refresh(max_age_s=FRESH_S)
            if self._version != self._reader.version:
                self._made, self._version = self._make(), self._reader.version
        return self._made(environ, start_response)

    def _make(self) -> Any:
        import optuna_dashboard
        from optuna.storages import InMemoryStorage

        from dray.records.study import create_study

        storage = InMemoryStorage()
        create_study(self._reader, storage)
        return optuna_dashboard.wsgi(storage)
