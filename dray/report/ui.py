"""Serves TensorBoard and optuna-dashboard for experiments, to browsers on this machine."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import socket
import sqlite3
import threading
import time
from collections.abc import Callable
from pathlib import Path

from dray.errors import ExperimentError
from dray.records.directory import ExperimentDirectory
from dray.records.local_runs import is_local_run
from dray.storage.scratch import scratch_until_exit
from searchers.journal import Journal

HOST = "localhost"
PORT = 6006
"""Of TensorBoard; optuna-dashboard gets the next one."""
PORTS = 100
"""How many ports are tried to find a free one."""
POLL_S = 1.0
"""How often to check for a study that a run has yet to create."""


def serve(path: Path, *, port: int, say: Callable[[str], None]) -> None:
    """Serve both until Ctrl-C; a running experiment is shown with a delay of seconds.

    Only browsers on this machine reach them; from another: ``ssh -L 6006:localhost:6006 -L 6007:localhost:6007``.

    Args:
        path: the directory of an experiment, or of a local run, which has no study.
        port: of TensorBoard; optuna-dashboard gets the next one. Ports in use are skipped.
        say: prints the addresses.

    Raises:
        NoExperiment: there is none.
        ExperimentError: no port is free.
    """
    with contextlib.suppress(KeyboardInterrupt):
        tensorboard = free_port(port)
        say(f"TensorBoard       {start_tensorboard(path, tensorboard)}")
        if not is_local_run(path):
            if importlib.util.find_spec("optuna_dashboard") is None:
                say("optuna-dashboard is not installed here: pip install 'dray[ui]'")
            else:
                _dashboard(ExperimentDirectory.open(path), free_port(tensorboard + 1), say)
        say("press Ctrl-C to stop them")
        threading.Event().wait()


def free_port(first: int) -> int:
    """The first free port of this machine, from this one on.

    Raises:
        ExperimentError: the next hundred are all in use.
    """
    for port in range(first, min(first + PORTS, 2**16)):
        with socket.socket() as probe, contextlib.suppress(OSError):
            # As servers do: connections of a server that has just ended do not block the port.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((HOST, port))
            return port
    raise ExperimentError(f"no port is free from {first} to {first + PORTS - 1}; give another with --port")


def start_tensorboard(logs: Path, port: int) -> str:
    """Serve TensorBoard on a directory, in threads that end with this process; returns its address."""
    from tensorboard import default, program

    # "auto" prints on standard error which of the two it takes.
    fast = "true" if importlib.util.find_spec("tensorboard_data_server") is not None else "false"
    board = program.TensorBoard(plugins=default.get_plugins())
    board.configure(argv=["dray", "--logdir", str(logs), "--host", HOST, "--port", str(port), "--load_fast", fast])
    return str(board.launch())


def start_dashboard(directory: ExperimentDirectory, port: int) -> str | None:
    """Serve an experiment's study, in threads that end with this process.

    Returns:
        Its address; None if a run has yet to create the study.
    """
    study = _study(directory)
    if not has_study(study):
        return None
    serve_study(study, port)
    return f"http://{HOST}:{port}/dashboard/studies/1"


def _dashboard(directory: ExperimentDirectory, port: int, say: Callable[[str], None]) -> None:
    """Serve the study; if a run has yet to create it, as soon as it exists."""

    def start() -> bool:
        address = start_dashboard(directory, port)
        if address is not None:
            say(f"optuna-dashboard  {address}")
        return address is not None

    def wait() -> None:
        while not start():
            time.sleep(POLL_S)

    if not start():
        say("optuna-dashboard  starts when the first trial has reported")
        threading.Thread(target=wait, name="dray-dashboard", daemon=True).start()


def _study(directory: ExperimentDirectory) -> Path:
    """The file of the study; if no run writes it now, it is brought up to date."""
    study = directory.study
    if Journal.writer(directory.journal) is None:
        if not os.access(directory.path, os.W_OK):  # another user's
            study = scratch_until_exit("ui") / study.name
        _write(directory, study)
    return study


def _write(directory: ExperimentDirectory, study: Path) -> None:
    """Write the study if the last run did not, because it was killed, say."""
    from dray.observers.observer import replay_to
    from dray.observers.optuna_study import OptunaStudy

    replay_to(directory, lambda: OptunaStudy(study, directory.config()))


def has_study(study: Path) -> bool:
    """Whether a run has created its study in this file. Optuna's own check would create one."""
    try:
        with contextlib.closing(sqlite3.connect(f"{study.as_uri()}?mode=ro", uri=True)) as database:
            return database.execute("SELECT 1 FROM studies").fetchone() is not None
    except sqlite3.Error:  # it does not exist yet, or has no tables
        return False


def serve_study(study: Path, port: int) -> None:
    """Serve optuna-dashboard on a study's file, in threads that end with this process."""
    import optuna_dashboard
    from werkzeug.serving import WSGIRequestHandler, make_server

    class Quiet(WSGIRequestHandler):
        def log(self, type: str, message: str, *args: object) -> None:
            """Do not log successful requests."""

    app = optuna_dashboard.wsgi(f"sqlite:///{study}")
    server = make_server(HOST, port, app, threaded=True, request_handler=Quiet)
    threading.Thread(target=server.serve_forever, name="dray-dashboard", daemon=True).start()


class Boards:
    """Each is started once, and runs until the server ends; only browsers on its machine reach them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: dict[Path, dict[str, str | None]] = {}

    def start(self, directory: ExperimentDirectory) -> dict[str, str | None]:
        """The addresses of both; None for one that is not installed, or that has nothing to show yet.

        Raises:
            ExperimentError: no port is free.
        """
        with self._lock:
            found = self._found.setdefault(directory.path, {"tensorboard": None, "optuna_dashboard": None})
            if found["tensorboard"] is None:
                found["tensorboard"] = start_tensorboard(directory.path, free_port(PORT))
            if found["optuna_dashboard"] is None and importlib.util.find_spec("optuna_dashboard") is not None:
                found["optuna_dashboard"] = start_dashboard(directory, free_port(PORT + 1))
            return dict(found)
