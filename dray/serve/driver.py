"""What an experiment's process runs: it creates or opens the experiment, and drives its search to the end.

The template imports this module, and so all that drivers need; a process begins in `drive`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import shutil
import signal
import sys
import threading
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import ray

import dray
import dray.core  # what models import
import dray.pytorch
import dray.report.data  # pandas and pyarrow
from dray.cluster.connection import join
from dray.desk.loop import EventLoop
from dray.errors import ConfigError, ExperimentError, Fault, NoExperiment
from dray.experiment.experiment import Experiment
from dray.experiment.run import Lent, tune_driver
from dray.groups.lent import GroupServer
from dray.serve.control import Share
from dray.storage.errors import is_full
from searchers.ray_tune import TuneDriver

OUTPUT = "driver.log"
"""In an experiment's directory: what its process prints."""
STOPPED = 75
"""The exit code of a process that was stopped by a signal, and whose trials have saved."""
FULL = 74
"""The exit code of a process that could not write to a full disk."""
TUNE = ".server/tune"
"""In the results directory: what Tune writes for experiments' processes, which is never read."""
BURST_S = 0.5
"""When many experiments are submitted at once, most only join the queue, in processes that need no handle."""
LEAVE_S = 2.0
"""How long Ray may take to pass on the last metrics; usually a third of a second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Create:
    """Create an experiment from a YAML file and a directory with the model's code, and wait for `Run`."""

    config: Path
    code: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Open:
    """Open the experiment in this directory, extended to these, and wait for `Run`."""

    path: Path
    max_trials: int | None = None
    max_length: int | None = None


@dataclass(frozen=True, slots=True)
class Run:
    """Run the experiment to its end."""


@dataclass(frozen=True, slots=True)
class Ended:
    """The experiment has ended, and this process is about to."""


@dataclass(frozen=True, slots=True)
class Begun:
    """The process has its experiment: what happens to it from now on may be the experiment's fault."""


@dataclass(frozen=True, slots=True)
class Opened:
    """The experiment is created, or opened, in this directory; what slots its config asks for."""

    path: Path
    share: Share


@dataclass(frozen=True, slots=True)
class Failed:
    """It can't be created or opened, or its search has failed: another process would fail too. `message` is for the
    user."""

    message: str
    faults: tuple[Fault, ...] = ()


def drive(connection: Connection, server: GroupServer, home: str) -> None:
    """Serve one experiment. When the connection to the server closes, that has ended, and this process ends at once."""
    os.setsid()  # Ctrl-C in the server's terminal is for the server, which lets trials save
    os.environ["DRAY_HOME"] = home
    os.environ.pop("DRAY_SERVER", None)  # this is the server
    signal.signal(signal.SIGINT, signal.default_int_handler)
    commands: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(connection, commands), name="dray-server", daemon=True).start()
    code = 1
    try:
        join(server.address)
        loop = EventLoop("dray-driver")
        loop.listen(ray.util.get_node_ip_address())
        files = Path(home, TUNE, str(ray.get_runtime_context().get_job_id()))
        tune = tune_driver(loop, files, local=server.local)
        code = _serve(connection, commands, Lent(server=server, loop=loop, tune=tune))
        shutil.rmtree(files, ignore_errors=True)
        if code == 0:  # otherwise a thread may still wait for Ray, and crash at its shutdown
            connection.send(Ended())
            _leave_ray()
    except KeyboardInterrupt as interrupt:
        print(f"stopped by {interrupt}")
        code = STOPPED
    except Exception:
        with contextlib.suppress(OSError):
            traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):  # a full disk
                stream.flush()
        os._exit(code)  # all is on the disk; Ray's own exit can take seconds, or hang


def _receive(connection: Connection, commands: queue.SimpleQueue[Any]) -> None:
    try:
        while True:
            commands.put(connection.recv())
    except (EOFError, OSError):
        os.kill(os.getpid(), signal.SIGKILL)


def _serve(connection: Connection, commands: queue.SimpleQueue[Any], lent: Lent) -> int:
    try:
        command = _first(commands, lent.tune)
        connection.send(Begun())
        experiment = _opened(command)
        experiment.lent = lent
        path = experiment.prepare().path
        asked = experiment.config.resources
        share = Share(priority=asked.priority, weight=asked.weight, max_slots=asked.max_slots)
        connection.send(Opened(path, share))
        assert isinstance(commands.get(), Run)
        _print_to(path / OUTPUT)
        experiment.run()
    except Exception as error:
        if (full := is_full(error)) is not None:
            where = f" to {full.filename}" if full.filename else ""
            connection.send(Failed(f"can't write{where}: {full.strerror}; free some space"))
            return FULL
        if not isinstance(error, ConfigError | NoExperiment | ExperimentError):
            raise
        connection.send(Failed(str(error), error.faults if isinstance(error, ConfigError) else ()))
        print(error)
        return 1
    return 0


def _leave_ray() -> None:
    """Disconnect from Ray, which passes on the metrics since its last report then."""
    leaving = threading.Thread(target=ray.shutdown, daemon=True)
    leaving.start()
    leaving.join(LEAVE_S)


def _first(commands: queue.SimpleQueue[Any], tune: TuneDriver) -> Any:
    """The first command. If there is none yet, the handle starts before it, as that takes seconds."""
    try:
        return commands.get(timeout=BURST_S)
    except queue.Empty:
        tune.start()
        return commands.get()


def _opened(command: Create | Open) -> Experiment:
    match command:
        case Create():
            return Experiment(command.config, model_dir=command.code)
        case Open():
            return Experiment.resume(command.path, max_trials=command.max_trials, max_length=command.max_length)


def _print_to(file: Path) -> None:
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    logging.basicConfig(level=logging.INFO, format=dray.LOG_FORMAT, force=True)
