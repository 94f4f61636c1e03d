"""The processes of experiments: each drives one, and is forked from a template that has imported the driver's modules.

A spare one waits for the next experiment, connected to Ray: imports take seconds, and the connection half a second. A
process dies with its server; the next server finds the experiment in its queue, and resumes it from its journal.

The server sends `Create` or `Open`, and later `Run`; the process sends `BEGUN`, `Opened`, `Raised`, and `ENDED` or
`Failed`.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import queue
import shutil
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import ray

import dray
import dray.core  # models import these two
import dray.figures.data  # pandas and pyarrow
import dray.pytorch
from dray.cluster.connection import join
from dray.code.ignore import code_of
from dray.config.notify import Watched
from dray.errors import ConfigError, ExperimentError, Fault, NoExperiment
from dray.experiment.experiment import Experiment
from dray.experiment.notify import SERVED_AT
from dray.experiment.run import Lent
from dray.experiment.tune_handle import results_of
from dray.groups.borrowed import GroupServer
from dray.groups.on_ray import OnRay
from dray.records.spending import totals_of
from dray.rpc.event_loop import EventLoop
from dray.serve import creations
from dray.serve.control import Share
from dray.serve.draft import Read
from dray.storage.errors import is_full
from searchers.ray_tune import TuneDriver

START_S = 120.0  # how long a process may take to open an experiment
MAX_SPARES = 3  # how many processes in a row may end before they begin with an experiment
BEGUN = "begun"  # the process has its experiment, which may be the cause of any later failure
ENDED = "ended"  # the experiment has ended, and this process is about to
OUTPUT = "driver.log"  # the output of the process, in the experiment's directory
STOPPED = 75  # the exit code of a process that was stopped by a signal, after its trials have saved
FULL = 74  # the exit code of a process that could not write to a full disk
TUNE = ".server/tune"  # Tune's files of experiments' processes, in the results directory; never read
BURST_S = 0.5
"""How long a process waits for its experiment before it starts Tune's handle. Of many experiments that are submitted at
once, most only join the queue, in processes that need no handle."""
LEAVE_S = 2.0  # how long Ray may take to flush its metrics; usually a third of a second


@dataclass(frozen=True, slots=True, kw_only=True)
class Create:
    """Create an experiment from its config and a directory with the model's code, and wait for `Run`."""

    read: Read
    code: Path
    link: Path  # which leads to its directory until it is accepted, see `dray.serve.creations`
    imported: frozenset[str] = frozenset()  # code that the server's processes have imported, as in `Opened.code`


@dataclass(frozen=True, slots=True, kw_only=True)
class Open:
    """Open the experiment in a directory, extend it to these values, and wait for `Run`."""

    path: Path
    extension: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Opened:
    """The experiment has been created or opened."""

    path: Path
    share: Share
    budget: Mapping[str, float]  # its totals, see `dray.records.spending.totals_of`
    by_quota: Mapping[str, Any]  # these two: see `dray.serve.control.Submitted`
    missing_secrets: tuple[str, ...]
    code: str = ""  # what a new experiment was imported from: its entrypoint, and a hash of its code


@dataclass(frozen=True, slots=True)
class Run:
    """Run the experiment to its end. `page`: the address of the server's page; "" if unknown."""

    page: str


@dataclass(frozen=True, slots=True)
class Raised:
    """The experiment has raised an alert, a record of its journal."""

    alert: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Failed:
    """The experiment can't be created or opened, or its search has failed, and another process would fail too.
    `message` is for the user."""

    message: str
    faults: tuple[Fault, ...] = ()


# ---------------------------------------------------------------------------------------------------- the server's side
class ExperimentProcess:
    """An experiment's process. `ended` is called in a thread when the experiment ends, and again when the process
    does; `raised` is called in a thread with each alert. `alerts`: what the server's receivers want to know."""

    def __init__(
        self,
        server: GroupServer,
        home: str,
        ended: Callable[[ExperimentProcess], None],
        *,
        alerts: Watched,
        raised: Callable[[Path, Mapping[str, Any]], None],
    ) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["__main__", drive.__module__, "dray.serve.requests", "dray.serve.draft"])
        self._connection, theirs = context.Pipe()
        self._process = context.Process(
            target=drive, args=(theirs, server, home, alerts), name="dray-experiment", daemon=True
        )
        self._ended, self._raised = ended, raised
        self._answered = threading.Event()
        self.path: Path | None = None  # the experiment's directory
        self.has_begun = False  # the process has received the experiment
        self.opened: Opened | None = None
        self.failure: Failed | None = None
        self.exit_code: int | None = None  # negative for a signal; None while it runs
        self._process.start()
        theirs.close()
        threading.Thread(target=self._receive, name="dray-experiment", daemon=True).start()

    def send(self, command: object) -> None:
        """Send a command. A process that has ended ignores it."""
        with suppress(OSError):
            self._connection.send(command)

    def wait_until_opened(self) -> Failed | None:
        """Wait until the experiment is created or opened. Returns the failure, or None."""
        if not self._answered.wait(START_S):
            return _import_failed(f"importing the model takes longer than {START_S:.0f} s")
        if self.failure is None and self.opened is None:
            return _import_failed(
                f"the experiment's process ended ({self.how_ended}) while it imported the model; the server's output "
                "may say why"
            )
        return self.failure

    @property
    def how_ended(self) -> str:
        """The exit code, or the signal that killed the process, in words."""
        code = self.exit_code or 0
        return f"killed by signal {-code}" if code < 0 else f"exit code {code}"

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process, unless it has ended."""
        if self.exit_code is None and self._process.pid is not None:
            with suppress(ProcessLookupError):
                os.kill(self._process.pid, number)

    def _receive(self) -> None:
        with suppress(EOFError, OSError):
            while True:
                match self._connection.recv():
                    case str() as said if said == BEGUN:
                        self.has_begun = True
                    case Opened() as opened:
                        self.opened, self.path = opened, opened.path
                        self._answered.set()
                    case Failed() as failed:
                        self.failure = failed
                        self._answered.set()
                    case Raised(alert) if self.path is not None:
                        self._raised(self.path, alert)
                    case str():
                        self._ended(self)
        self._process.join()
        self.exit_code = self._process.exitcode
        self._connection.close()
        self._answered.set()
        self._ended(self)


def _import_failed(what: str) -> Failed:
    return Failed(what, (Fault("entrypoint", what),))


class Spares:
    """Keeps one process waiting for the next experiment. Thread-safe."""

    def __init__(self, start: Callable[[], ExperimentProcess]) -> None:
        self._start, self._lock = start, threading.Lock()
        self._closed = False
        self._opening: set[ExperimentProcess] = set()
        self._waiting = start()

    def take(self) -> ExperimentProcess:
        """The spare process; the next one starts."""
        with self._lock:
            taken = self._waiting if self._waiting.exit_code is None else self._start()
            self._waiting = self._start()
            return taken

    def replace_ended(self) -> None:
        """Replace the spare process if it has ended."""
        with self._lock:
            if self._waiting.exit_code is not None and not self._closed:
                self._waiting = self._start()

    def create(self, command: Create) -> ExperimentProcess:
        """Create an experiment in a process, which then waits for `Run`.

        Raises:
            ConfigError: with every fault of the config, or because the model can't be imported.
            ExperimentError: for reasons that have nothing to do with the experiment.
        """
        for _ in range(MAX_SPARES):
            process = self.take()
            with self._lock:
                self._opening.add(process)
                if self._closed:
                    process.signal(signal.SIGKILL)
            try:
                process.send(command)
                failed = process.wait_until_opened()
            finally:
                with self._lock:
                    self._opening.remove(process)
            if self._closed:
                raise ExperimentError("the server is ending; submit it again once it is back")
            if failed is None:
                return process
            process.signal(signal.SIGKILL)
            if process.has_begun:
                raise ConfigError(failed.faults) if failed.faults else ExperimentError(failed.message)
        raise ExperimentError(
            f"{MAX_SPARES} processes in a row ended ({process.how_ended}) before they could take the experiment; the "
            "server's output may say why"
        )

    def close(self) -> None:
        """End the spare process, and those that are creating experiments."""
        with self._lock:
            self._closed = True
            for process in (self._waiting, *self._opening):
                process.signal(signal.SIGKILL)


# --------------------------------------------------------------------------------------------------- the process itself
def drive(connection: Connection, server: GroupServer, home: str, alerts: Watched) -> None:
    """Serve one experiment. A closed connection means that the server has ended, and this process ends at once."""
    os.setsid()  # Ctrl-C in the server's terminal is for the server, which lets trials save
    os.environ["DRAY_HOME"] = home
    os.environ.pop("DRAY_SERVER", None)  # this is the server
    signal.signal(signal.SIGINT, signal.default_int_handler)
    commands: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(connection, commands), name="dray-server", daemon=True).start()
    code = 1
    try:
        skip_ids(os.getpid())
        join(server.address)
        loop = EventLoop("dray-driver")
        on_ray = OnRay(server.cluster())
        loop.listen(on_ray.host())
        files = Path(home, TUNE, on_ray.job())
        tune = on_ray.tune(partial(results_of, loop.endpoint), files)

        def raised(alert: Mapping[str, Any]) -> None:
            with suppress(OSError):  # the server has ended, and this process is about to
                connection.send(Raised(alert))

        code = _serve(connection, commands, Lent(server=server, loop=loop, tune=tune, notify=alerts, alert=raised))
        shutil.rmtree(files, ignore_errors=True)
        if code == 0:  # otherwise a thread may be waiting for Ray, which would crash at Ray's shutdown
            connection.send(ENDED)
            _leave_ray()
    except KeyboardInterrupt as interrupt:
        print(f"stopped by {interrupt}")
        code = STOPPED
    except Exception:
        with suppress(OSError):
            traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError):  # a full disk
                stream.flush()
        os._exit(code)  # everything is on the disk, and Ray's exit handlers can take seconds, or hang


def skip_ids(number: int) -> None:
    """Skip as many of Ray's random ids, up to 2047, so that this process draws others than its siblings.

    Ray seeds its generator at the first id, which an import of the template draws, and forks copy it. When a process
    connects, it puts an object with a random id into the node's store (`WarmupStore`), and Ray aborts the process if
    another one has just put one with this id: see "Equal ids after a fork" in bench/results/ray_versions.md.
    """
    for _ in range(number % 2048):
        ray.ObjectRef.from_random()


def _receive(connection: Connection, commands: queue.SimpleQueue[Any]) -> None:
    try:
        while True:
            commands.put(connection.recv())
    except (EOFError, OSError):
        os.kill(os.getpid(), signal.SIGKILL)


def _serve(connection: Connection, commands: queue.SimpleQueue[Any], lent: Lent) -> int:
    try:
        command = _first(commands, lent.tune)
        connection.send(BEGUN)
        read, experiment, code = create(command) if isinstance(command, Create) else _reopen(command)
        experiment.lent = lent
        path = experiment.prepare().path
        asked = experiment.config.resources
        share = Share(priority=asked.priority, weight=asked.weight, max_slots=asked.max_slots)
        budget = experiment.config.budget
        totals = totals_of(None if budget is None else budget.model_dump())
        connection.send(Opened(path, share, totals, read.by_quota, read.missing_secrets, code))
        run = commands.get()
        assert isinstance(run, Run)
        os.environ[SERVED_AT] = run.page
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
    """Disconnect from Ray, which then flushes its metrics."""
    leaving = threading.Thread(target=ray.shutdown, daemon=True)
    leaving.start()
    leaving.join(LEAVE_S)


def _first(commands: queue.SimpleQueue[Any], tune: TuneDriver) -> Any:
    """The first command. Tune's handle takes seconds to start, so it starts while there is no command."""
    try:
        return commands.get(timeout=BURST_S)
    except queue.Empty:
        tune.start()
        return commands.get()


def create(command: Create) -> tuple[Read, Experiment, str]:
    """An experiment that has yet to be prepared, and its code as in `Opened.code`."""
    config = command.read.config
    code = f"{config.entrypoint} {code_of(command.code).digest()}"
    # An import takes seconds, and the workers of the experiment before may have the class in memory.
    make = Experiment.of_imported if code in command.imported else Experiment
    experiment = make(config, model_dir=command.code)
    creations.begin(command.link, experiment.path)
    return command.read, experiment, code


def _reopen(command: Open) -> tuple[Read, Experiment, str]:
    experiment = Experiment.resume(command.path, **command.extension)
    return Read(experiment.config), experiment, ""


def _print_to(file: Path) -> None:
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    logging.basicConfig(level=logging.INFO, format=dray.LOG_FORMAT, force=True)
