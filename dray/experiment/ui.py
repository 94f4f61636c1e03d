"""``dray ui``: TensorBoard and optuna-dashboard on one experiment, in this process, for this machine's browsers."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import socket
import sqlite3
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from dray.experiment.directory import ExperimentDirectory
from dray.experiment.errors import ExperimentError
from searchers.journal import Journal

HOST = "localhost"
PORT = 6006
PORTS = 100
"""How many ports are looked at for one that is free."""
LOOK_S = 1.0
"""How often a study is looked for that a run is about to make."""


def serve(path: Path, *, port: int = PORT, say: Callable[[str], None] = print) -> None:
    """Serve both until Ctrl-C; of a running experiment they show what it does, seconds later.

    Only this machine's browsers reach them. From another one: ``ssh -L 6006:localhost:6006 -L 6007:localhost:6007``.

    Args:
        path: the experiment's directory.
        port: of TensorBoard; optuna-dashboard has the next one. Those that are taken are passed over.
        say: tells the addresses.

    Raises:
        ConfigError: there is no experiment.
        ExperimentError: no port is free.
    """
    directory = ExperimentDirectory.open(path)
    with contextlib.suppress(KeyboardInterrupt):
        tensorboard = free_port(port)
        say(f"TensorBoard       {_tensorboard(directory.path, tensorboard)}")
        if importlib.util.find_spec("optuna_dashboard") is None:
            say("optuna-dashboard is not installed here: pip install 'dray[ui]'")
        else:
            _dashboard(directory, free_port(tensorboard + 1), say)
        say("Ctrl-C ends them")
        threading.Event().wait()


def free_port(first: int) -> int:
    """The first port of this machine, from here on, that nobody listens at.

    Raises:
        ExperimentError: a hundred of them are taken.
    """
    for port in range(first, min(first + PORTS, 2**16)):
        with socket.socket() as probe, contextlib.suppress(OSError):
            # As servers bind: what the last one left behind a minute ago is in nobody's way.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((HOST, port))
            return port
    raise ExperimentError(f"no port is free from {first} to {first + PORTS - 1}; give another with --port")


def _tensorboard(logs: Path, port: int) -> str:
    from tensorboard import default, program

    # "auto" announces on standard error which of the two it takes.
    fast = "true" if importlib.util.find_spec("tensorboard_data_server") is not None else "false"
    board = program.TensorBoard(plugins=default.get_plugins())
    board.configure(argv=["dray", "--logdir", str(logs), "--host", HOST, "--port", str(port), "--load_fast", fast])
    return str(board.launch())


def _dashboard(directory: ExperimentDirectory, port: int, say: Callable[[str], None]) -> None:
    """Serve the study; as soon as there is one, where a run is yet to make it."""
    study = directory.study
    if Journal.writer(directory.journal) is None:
        if not os.access(directory.path, os.W_OK):  # another's
            study = Path(tempfile.mkdtemp(prefix="dray-ui-")) / study.name
        _write(directory, study)

    def start() -> None:
        while not has_study(study):
            time.sleep(LOOK_S)
        serve_study(study, port)
        say(f"optuna-dashboard  http://{HOST}:{port}/dashboard/studies/1")

    if has_study(study):
        start()
    else:
        say("optuna-dashboard  starts when the first trial has reported")
        threading.Thread(target=start, name="dray-dashboard", daemon=True).start()


def _write(directory: ExperimentDirectory, study: Path) -> None:
    """What the last run may not have come to, as one that was killed."""
    from dray.experiment.observers import tell_all
    from dray.experiment.optuna_study import OptunaStudy

    tell_all(directory, lambda: OptunaStudy(study, directory.config()))


def has_study(study: Path) -> bool:
    """Whether a run has made its study in this file. Optuna's own look would make one."""
    try:
        with contextlib.closing(sqlite3.connect(f"{study.as_uri()}?mode=ro", uri=True)) as database:
            return database.execute("SELECT 1 FROM studies").fetchone() is not None
    except sqlite3.Error:  # not there yet, or without its tables
        return False


def serve_study(study: Path, port: int) -> None:
    """Serve optuna-dashboard on a study's file, in threads that end with this process."""
    import optuna_dashboard
    from werkzeug.serving import WSGIRequestHandler, make_server

    class Quiet(WSGIRequestHandler):
        def log(self, type: str, message: str, *args: object) -> None:
            """Nothing, of requests that went well."""

    app = optuna_dashboard.wsgi(f"sqlite:///{study}")
    server = make_server(HOST, port, app, threaded=True, request_handler=Quiet)
    threading.Thread(target=server.serve_forever, name="dray-dashboard", daemon=True).start()
