"""Runs the experiments that were submitted to a server: their queue, their processes, and the groups they borrow."""

from __future__ import annotations

import errno
import shutil
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import ray

from dray import private
from dray._version import __version__
from dray.cluster.checks.node import MIN_FREE_BYTES
from dray.cluster.connection import Cluster
from dray.cluster.watch import Watch
from dray.code.packages import runtime_env
from dray.desk.actor import start_desk
from dray.desk.desk import SERVER
from dray.desk.messages import Demand
from dray.errors import ExperimentError
from dray.groups.lent import DESK, GroupServer
from dray.records.directory import ExperimentDirectory, results_root
from dray.records.listing import StoredExperiment
from dray.records.numbering import take_number
from dray.records.overview import COMPLETED
from dray.serve import driver as commands
from dray.serve.control import ACTIVE, Share, State, Status, Submitted, WrongState
from dray.serve.lender import Lender
from dray.serve.processes import Driver, Spares
from dray.serve.queue import Item, Queue
from dray.storage import StorageFull
from dray.text import one_line
from searchers.errors import JournalError

NAMESPACE = "dray-serve"
"""Ray's namespace of the server's desk."""
STATE = ".server"
"""In the results directory: the server's own files."""
MAX_DEATHS = 3
"""An experiment fails when its process dies this often in a row without training in between."""
DESK_STARTS = 5
"""How often the server tries to start its desk."""
LOOK_S = 5.0
"""How often the server looks for experiments that were deleted, and whether its spare process is up."""
RETRY_S = 1.0
"""How long it waits after it could not write."""
MAX_PROCESSES = 64
"""The most experiments that run at the same time."""


class Manager:
    """A server's verbs, see `Control`, and the loop that carries them out.

    Args:
        cluster: that this process is connected to, in the namespace `NAMESPACE`.
        idle_s: after this time, groups end that no experiment needs.
        say: prints a line.

    Raises:
        JournalError: another server uses the results directory.
    """

    def __init__(self, cluster: Cluster, *, idle_s: float, say: Callable[[str], None]) -> None:
        self._cluster, self._idle_s, self._say = cluster, idle_s, say
        self._results = results_root().resolve()
        self._directory = self._results / STATE
        self._results.mkdir(parents=True, exist_ok=True)
        private.make_directory(self._directory)  # who can write the queue can have code run
        self._queue = Queue(self._directory / "queue.jsonl")
        for left in (self._results / commands.TUNE, *self._directory.glob("config-*")):  # by what was killed
            shutil.rmtree(left, ignore_errors=True)
        self._server = GroupServer(
            address=ray.get_runtime_context().gcs_address, namespace=NAMESPACE, local=cluster.local
        )
        self._since = time.time()
        self._lock = threading.RLock()
        self._drivers: dict[str, Driver] = {}
        self._leaving: dict[str, Any] = {}
        """Runs whose process has ended: the calls that return once their trials have left."""
        self._had_slots: set[str] = set()
        """Experiments whose process, which is up, has trained."""
        self._closing = False
        self._fault = self._full = ""
        self._looked_at = time.monotonic()
        self._desk, self._lender = self._new_lender()
        self._watch = Watch(
            self._server.address,
            draining=None if cluster.own else lambda nodes: self._lender.nodes_drain(nodes),
            silent=lambda: say("the head of the Ray cluster does not answer; if it is gone, start the server again"),
        )
        self._spares = Spares(lambda: Driver(self._server, str(self._results), self._ended))

    # ------------------------------------------------------------------ the loop
    def run(self, over: Callable[[], bool]) -> None:
        """Serve until ``over``."""
        while not over():
            self._step()

    def _step(self) -> None:
        try:
            self._take_step()
            self._fault = ""
        except OSError as error:  # a full disk: what was accepted is on it
            fault = f"can't write to {self._directory}: {one_line(error)}; trying again"
            if fault != self._fault:
                self._say(fault)
            self._fault = fault
            time.sleep(RETRY_S)

    def _take_step(self) -> None:
        try:
            self._lender.step()
        except ray.exceptions.RayActorError:
            self._say("the desk has died; starting another")
            self._lender.end()
            self._leaving.clear()
            self._desk, self._lender = self._new_lender()
        with self._lock:
            running = {_experiment_of(run) for run, demand in self._lender.demands.items() if demand.has}
            self._had_slots |= running & set(self._drivers)
            self._look_at_disk()
            self._remove_ended()
            if time.monotonic() >= self._looked_at + LOOK_S:
                self._looked_at = time.monotonic()
                self._forget_deleted()
                self._spares.replace_ended()
            self._set_shares()
            self._start_due()

    def _look_at_disk(self) -> None:
        """Note whether the disk of the results is full: then no process is started, as it would end at once."""
        was_full, why = self._full, why_full(self._results)
        self._full = f"{why}: experiments that wait, or could not write, then continue by themselves" if why else ""
        if self._full and not was_full:
            self._say(self._full)
        elif was_full and not self._full:
            self._say("the disk has room again")
        for process in self._drivers.values() if self._full else ():
            process.met_full_disk = True

    def _remove_ended(self) -> None:
        """Have the desk forget runs whose process has ended, once their trials have left."""
        for run in self._lender.demands:
            if run not in self._leaving and _experiment_of(run) not in self._drivers:
                self._leaving[run] = self._desk.remove.remote(run)
        for run, call in list(self._leaving.items()):
            if run not in self._lender.demands and ray.wait([call], timeout=0)[0]:
                del self._leaving[run]

    def _forget_deleted(self) -> None:
        """Forget experiments whose directory was deleted, by the command or by hand."""
        for item in self._queue.items():
            if not self._is_up(item.name) and not item.path.exists():
                self._queue.remove(item.name)

    def _set_shares(self) -> None:
        """Have the desk use the shares that were set here, where they are not those of the config."""
        for run, demand in self._lender.demands.items():
            if run in self._leaving:
                continue
            share, claim = self._queue.item(_experiment_of(run)).share, demand.claim
            most = None if share.max_slots is None else share.max_slots * demand.unit
            if (share.priority, share.weight, most) != (claim.priority, claim.weight, claim.max_slots):
                self._desk.set_share.remote(run, share.priority, share.weight, most)

    def _new_lender(self) -> tuple[Any, Lender]:
        desk = self._new_desk()
        lender = Lender(
            desk, own_cluster=self._cluster.own, directory=self._directory, idle_s=self._idle_s, say=self._say
        )
        return desk, lender

    def _new_desk(self) -> Any:
        """Start the desk.

        Raises:
            ExperimentError: it dies as it starts.
        """
        env = {} if self._cluster.local else runtime_env()  # a cluster's nodes need not have dray
        error: Exception | None = None
        for _ in range(DESK_STARTS):
            try:
                desk = start_desk(DESK, SERVER, runtime_env=env)
                ray.get(desk.demands.remote({}))
                return desk
            except ray.exceptions.RayActorError as died:
                error = died
            except ValueError as taken:
                error = error or taken
            _free_name()  # at once, or the next try would find the one that has just died
            time.sleep(RETRY_S)
        if isinstance(error, ValueError):
            raise ExperimentError("another dray server uses this Ray cluster; stop that one, or give another --address")
        raise ExperimentError(f"the server's desk can't start on the head of the Ray cluster: {error}")

    def _start_due(self) -> None:
        """Start the processes of experiments that are due, as many as may run."""
        due = [item for item in self._queue.items() if item.is_due and not self._is_up(item.name)]
        for item in sorted(due, key=lambda each: each.share.priority):
            if not self._may_start(item.share.priority):
                return
            self._start(item)

    def _is_up(self, name: str) -> bool:
        return name in self._drivers or any(_experiment_of(run) == name for run in self._leaving)

    def _may_start(self, priority: int) -> bool:
        """Whether another experiment may have a process: one more than slots, or if one that runs has to yield."""
        if self._closing or self._full:
            return False
        most = min(MAX_PROCESSES, int(self._lender.slots()) + 1)
        running = [self._queue.item(name).share.priority for name in self._drivers]
        return len(running) < most or (len(running) < MAX_PROCESSES and priority < max(running))

    def _start(self, item: Item) -> None:
        process = self._spares.take()
        self._drivers[item.name] = process
        process.send(commands.Open(path=item.path, **item.extension))
        process.send(commands.Run())
        self._queue.started(item.name)

    def _ended(self, process: Driver) -> None:
        """An experiment's process has ended. Called in a thread."""
        with self._lock:
            name = next((name for name, each in self._drivers.items() if each is process), None)
            if name is None:
                return
            self._had_slots.discard(name)
            self._look_at_disk()
            del self._drivers[name]
            try:
                self._note_end(self._queue.item(name), process)
            except OSError as error:  # it is opened again once the disk has room, and ends again
                self._say(f"can't note that the process of {name} has ended: {one_line(error)}")

    def _note_end(self, item: Item, process: Driver) -> None:
        name = item.name
        try:
            overview = StoredExperiment.here(ExperimentDirectory(item.path)).overview()
        except (OSError, JournalError, ValueError) as error:
            self._queue.end(name, "ERROR", one_line(error))
            return
        if overview.state in (*COMPLETED, "ERROR"):
            failure = process.failure
            ended: Literal["COMPLETED", "ERROR"] = "ERROR" if overview.state == "ERROR" else "COMPLETED"
            self._queue.end(name, ended, "" if failure is None else failure.message)
        elif process.met_full_disk:
            pass  # whatever it died of, perhaps after there was room again: it starts again once there is
        elif process.failure is not None and process.exit_code != commands.FULL:
            self._queue.end(name, "ERROR", process.failure.message)
        elif item.wanted == "run" and not self._closing and process.exit_code != commands.STOPPED:
            self._died(item, process)

    def _died(self, item: Item, process: Driver) -> None:
        error = f"its process ended ({process.how_ended}); see {item.path / commands.OUTPUT}"
        if process.exit_code == commands.FULL and process.failure is not None:
            error = process.failure.message
        self._say(f"experiment {item.name}: {error}")
        has_trained = any(demand.has for demand in self._demands_of(item.name))
        self._queue.died(item.name, error, has_trained=has_trained)
        if self._queue.item(item.name).restarts >= MAX_DEATHS:
            self._queue.end(item.name, "ERROR", f"{error}; it has died {MAX_DEATHS} times in a row")

    def close(self) -> None:
        """Have running trials save, and end all processes. The queue is kept for the next server."""
        self._spares.close()
        with self._lock:
            self._closing = True
            for process in self._drivers.values():
                process.signal(signal.SIGTERM)
        while self._drivers:
            self._step()
        self._watch.close()
        self._lender.end()
        self._queue.close()

    # ------------------------------------------------------------------ the verbs, see `Control`
    def submit(self, config: str, code: Path) -> Submitted:
        if self._full:
            raise StorageFull(errno.ENOSPC, self._full)
        with tempfile.TemporaryDirectory(dir=self._directory, prefix="config-") as scratch:
            file = Path(scratch, "experiment.yaml")
            file.write_text(config)
            process = self._spares.create(file, code)
        assert process.opened is not None
        path, share = process.opened.path, process.opened.share
        take_number(path)
        with self._lock:
            try:
                item = self._queue.add(path, share)
            except OSError:
                process.signal(signal.SIGKILL)
                shutil.rmtree(path, ignore_errors=True)  # it was not accepted
                raise
            if process.exit_code is not None:
                pass  # it has ended since, and `_ended` knew no experiment of it: another one opens the experiment
            elif self._may_start(share.priority):
                self._drivers[item.name] = process
                process.send(commands.Run())
            else:
                process.signal(signal.SIGKILL)
            return self._submitted(item)

    def experiments(self) -> list[Submitted]:
        with self._lock:
            return [self._submitted(item) for item in self._queue.items()]

    def experiment(self, name: str) -> Submitted:
        with self._lock:
            return self._submitted(self._queue.item(name))

    def stop(self, name: str) -> Submitted:
        return self._end(name, "stop", signal.SIGTERM)

    def pause(self, name: str) -> Submitted:
        return self._end(name, "pause", signal.SIGTERM)

    def kill(self, name: str) -> Submitted:
        return self._end(name, "stop", signal.SIGKILL)

    def _end(self, name: str, wanted: Any, number: signal.Signals) -> Submitted:
        with self._lock:
            item = self._queue.item(name)
            if item.ended:
                raise WrongState(f"experiment {name} has ended; to train it for longer, extend it")
            self._queue.want(name, wanted)
            if (process := self._drivers.get(name)) is not None:
                process.signal(number)
            return self._submitted(item)

    def activate(self, name: str) -> Submitted:
        with self._lock:
            item = self._queue.item(name)
            if item.ended == "COMPLETED":
                raise WrongState(f"experiment {name} has completed; to train it for longer, extend it")
            if item.wanted != "run" or item.ended:
                self._queue.want(name, "run")
            return self._submitted(item)

    def extend(self, name: str, *, max_trials: int | None, max_length: int | None) -> Submitted:
        wanted = {"max_trials": max_trials, "max_length": max_length}
        with self._lock:
            item = self._queue.item(name)
            if name in self._drivers:
                raise WrongState(f"experiment {name} is running; pause it first")
            self._queue.extend(name, {field: value for field, value in wanted.items() if value is not None})
            return self._submitted(item)

    def set_share(self, name: str, share: Share) -> Submitted:
        with self._lock:
            self._queue.item(name)
            self._queue.set_share(name, share)
            return self._submitted(self._queue.item(name))

    def annotate(self, name: str, *, tags: tuple[str, ...], notes: str) -> Submitted:
        with self._lock:
            self._queue.item(name)
            self._queue.annotate(name, tags, notes)
            return self._submitted(self._queue.item(name))

    def status(self) -> Status:
        with self._lock:
            demands = list(self._lender.demands.values())
            return Status(
                version=__version__,
                cluster=self._cluster.description,
                results=str(self._results),
                since=self._since,
                slots=self._lender.slots(),
                busy=sum(demand.has * demand.claim.size for demand in demands),
                groups=self._lender.group_count,
                experiments=dict(
                    Counter(self._state(item, self._demands_of(item.name)) for item in self._queue.items())
                ),
            )

    # ------------------------------------------------------------------ what is known
    def _demands_of(self, name: str) -> list[Demand]:
        return [demand for run, demand in self._lender.demands.items() if _experiment_of(run) == name]

    def _submitted(self, item: Item) -> Submitted:
        demands = self._demands_of(item.name)
        state = self._state(item, demands)
        return Submitted(
            name=item.name,
            state=state,
            submitted=item.submitted,
            share=item.share,
            slots=sum(demand.has * demand.claim.size for demand in demands),
            waiting=sum(demand.claim.groups - demand.has for demand in demands),
            restarts=item.restarts,
            error=item.error or (self._full if state in ACTIVE else ""),
            tags=item.tags,
            notes=item.notes,
        )

    def _state(self, item: Item, demands: list[Demand]) -> State:
        return item.state(
            is_up=item.name in self._drivers,
            has_slots=any(demand.has for demand in demands),
            had_slots=item.name in self._had_slots,
            waits=any(demand.claim.groups for demand in demands),
            is_preempted=any(self._lender.is_preempted(demand) for demand in demands),
        )


def _free_name() -> None:
    """Have Ray forget the name of a desk that has died, which it keeps as long as any process has the desk's handle."""
    with suppress(ValueError):  # it is free already
        desk = ray.get_actor(DESK, namespace=NAMESPACE)
        try:
            ray.get(desk.demands.remote({}))
        except ray.exceptions.RayActorError:
            ray.kill(desk)


def why_full(results: Path) -> str:
    """What to do before experiments can run, if the disk of the results directory is full; "" if it is not."""
    free, least = shutil.disk_usage(results).free, MIN_FREE_BYTES
    return "" if free >= least else f"the disk is full: {free >> 20} MiB are free in {results}; free {least >> 20} MiB"


def _experiment_of(run: str) -> str:
    """The name of a run's experiment; a run's name is unique at the desk."""
    return run.rpartition("-")[0]
