"""Runs the experiments that were submitted to a server: their queue, their processes, and the groups they borrow.

`dray.serve.core.ServerCore` makes all decisions, in one thread; this shell carries them out.
"""

from __future__ import annotations

import errno
import functools
import logging
import math
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from dray import private
from dray._version import __version__
from dray.cluster.node_check import MIN_FREE_BYTES
from dray.config.load import with_limits
from dray.config.notify import ServerNotify
from dray.config.search import CHANGEABLE, as_extended, check_growth
from dray.display.counts import Counts
from dray.errors import ConfigError
from dray.experiment.notify import SERVED_AT
from dray.groups.borrowed import GroupServer
from dray.groups.lender import Lender, PoolClosed
from dray.groups.lender_shell import LenderShell
from dray.groups.on_ray import OnRay
from dray.groups.pool import GroupsPlan
from dray.leases.effects import Say
from dray.records.directory import ExperimentDirectory, results_root
from dray.records.journal import read_journal
from dray.records.listing import StoredExperiment
from dray.records.numbering import take_number
from dray.records.overview import COMPLETED
from dray.records.spending import totals_of
from dray.rpc.calls import Call, Session
from dray.rpc.event_loop import EventLoop
from dray.serve import effects
from dray.serve import processes as commands
from dray.serve.accounts import Meters
from dray.serve.alerts import ServerAlerts
from dray.serve.control import QueueState, Share, Status, Submitted, Verb
from dray.serve.core import ServerCore
from dray.serve.creations import Creations
from dray.serve.draft import Allowance, Draft
from dray.serve.lanes import LaneFile, Lanes
from dray.serve.outside import outside
from dray.serve.processes import ExperimentProcess, Spares
from dray.serve.queue import open_queue
from dray.serve.queue_order import guessed
from dray.serve.quota import UNITS, Use, check_room
from dray.serve.refusals import OverQuota
from dray.serve.scheduler import ProcessEnd
from dray.serve.tokens import STATE, Tokens
from dray.storage import StorageFull
from dray.storage.disk import sync
from dray.text import one_line
from searchers.journal import Journal

log = logging.getLogger(__name__)

STEP_S = 0.25
"""How often the server decides what is due while nothing happens."""
LOOK_S = 5.0
"""How often the server looks for deleted experiments and checks its spare process."""

T = TypeVar("T")


class Manager:
    """A server's verbs, see `Control`, and the shell that carries them out. Another server in the results directory
    is a `JournalError`. `idle_s`: how long a group may be idle before it ends. `tokens`: those with quotas. `notify`:
    who is told what."""

    def __init__(
        self,
        on_ray: OnRay,
        tokens: Tokens,
        *,
        idle_s: float,
        say: Callable[[str], None],
        notify: ServerNotify | None = None,
    ) -> None:
        cluster = self._cluster = on_ray.cluster
        self._tokens, self._say = tokens, say
        self._results = results_root().resolve()
        self._directory = self._results / STATE
        self._results.mkdir(parents=True, exist_ok=True)
        private.make_directory(self._directory)  # write access to the queue means running code
        self._journal = Journal(self._directory / "queue.jsonl")
        shutil.rmtree(self._results / commands.TUNE, ignore_errors=True)  # left by a killed server
        self._since = time.time()
        self._fault = ""
        self._looked_at = time.monotonic()
        self._processes: dict[str, ExperimentProcess] = {}
        self._loop = EventLoop("dray-server")
        self._loop.listen(on_ray.host())
        plan, view = GroupsPlan(is_servers=True, idle_s=idle_s), on_ray.look(on_ray.limits())
        self._queue = open_queue(self._journal)
        self._creations = Creations(self._directory / "creations")
        self._imported = set[str]()
        self._creations.discard_all(lambda name: self._queue.find(name) is not None)
        file = LaneFile(self._directory / "lanes.jsonl")
        self._core = ServerCore(
            self._queue,
            lambda emit: Lender(view, time.monotonic, plan=plan, emit=emit, counts=Counts()),
            self._perform,
            quota_of=tokens.quota,
            lanes=Lanes(file.kept, file.keep),
        )
        self._lender_shell = LenderShell(self._loop, self._core.lender, on_ray, _Lines(say))
        self._scheduler = self._core.scheduler
        self._meters = Meters(tokens)
        for item in self._queue.items():  # the last server may have been killed
            if item.owner:
                self._scheduler.settle(item.name, self._meters.close(item))
        self._loop.attach(self)
        server = GroupServer(address=on_ray.address(), endpoint=self._loop.endpoint, local=cluster.local)
        silent = "the head of the Ray cluster does not answer; if it is gone, start the server again"
        self.ray_died = threading.Event()  # a process of the Ray that was started for this server
        self._watch = on_ray.watch(
            draining=functools.partial(self._loop.post, self._core.lender.nodes_drain),
            silent=self.ray_died.set if cluster.own else lambda: say(silent),
        )
        alerts = self._alerts = ServerAlerts(notify or ServerNotify(), say)
        home, ended, raised = str(self._results), self._ended, alerts.raised
        self._spares = Spares(lambda: ExperimentProcess(server, home, ended, alerts=alerts.watched, raised=raised))

    # ------------------------------------------------------------------ the thread of the caller
    def run(self, over: Callable[[], bool]) -> None:
        """Serve until ``over`` returns True, or Ray has died: experiments that start after that would fail."""
        while not (over() or self.ray_died.is_set()):
            self._loop.post(self._look)
            time.sleep(STEP_S)

    def stop(self) -> None:
        """Let running trials save, unless Ray has died, and end the experiments' processes. The queue is kept for the
        next server."""
        self._spares.close()
        self._loop.post(self._scheduler.close)
        while self._processes:
            for each in list(self._processes.values()) if self.ray_died.is_set() else ():
                each.signal(signal.SIGKILL)
            self._loop.post(self._look)
            time.sleep(STEP_S)

    def close(self) -> None:
        """End the worker groups and the event loop. No verb may be called any more."""
        self._watch.close()
        if self._watch.answers(only_head=True):
            self._lender_shell.end(at_once=True)
        self._loop.close()
        self._journal.close()
        self._alerts.close()

    # ------------------------------------------------------------------ in the event loop
    def take(self, call: Call) -> None:
        """Handle a call from an experiment's process or from a worker."""
        self._core.take(call)

    def lost(self, session: Session) -> None:
        """Handle the end of a process."""
        self._core.lost(session)

    def failed(self, error: BaseException) -> None:
        """Handle an error, such as a full disk. Everything that was accepted is on the disk already."""
        fault = one_line(error)
        if isinstance(error, OSError):
            fault = f"can't write to {self._directory}: {fault}; trying again"
            if fault != self._fault:
                self._say(fault)
        else:
            log.error("the server failed to handle an event", exc_info=error)
        self._fault = fault

    def settle(self) -> None:
        """Decide what is due, and carry it out."""
        self._core.settle()

    def _perform(self, effect: Any) -> None:
        match effect:
            case effects.StartProcess(name, path, extension):
                self._start(name, commands.Open(path=path, extension=extension))
            case effects.ReadSpent(name):
                self._scheduler.settle(name, self._meters.close(self._queue.item(name), time.time()))
            case effects.SignalProcess(name, number):
                if (process := self._processes.get(name)) is not None:  # else it has just ended
                    process.signal(number)
            case effects.Ended(name):
                self._alerts.ended(self._queue.item(name).path, effect)
            case Say(line):
                self._say(line)
            case _:
                if isinstance(effect, PoolClosed) and effect.error:
                    self._say(f"no trials of this kind can run: {effect.error}")
                self._lender_shell.perform(effect)

    def _start(self, name: str, command: commands.Open) -> None:
        try:
            process = self._processes[name] = self._spares.take()
        except OSError:  # out of memory, for example; the scheduler tries again
            self._scheduler.ended(name, ProcessEnd(kind="stopped"))
            raise
        process.path = command.path
        process.send(command)
        process.send(commands.Run(os.environ.get(SERVED_AT, "")))
        if process.exit_code is not None:  # it ended before it was assigned to the experiment
            self._ended(process)

    def _look(self) -> None:
        """Check the disk and, less often, the deleted experiments and the spare process."""
        self._scheduler.disk(why_full(self._results))
        self._scheduler.spends(self._meters.read(self._scheduler.spending(), time.time() + STEP_S))
        if time.monotonic() >= self._looked_at + LOOK_S:
            self._looked_at, self._fault = time.monotonic(), ""
            self._scheduler.deleted([item.name for item in self._queue.items() if not item.path.exists()])
            self._spares.replace_ended()
            if self._alerts.watches_slots:
                there = self._scheduler.experiments()
                waiting = [each.name for each in there if each.waiting or each.state == "QUEUED"]
                self._alerts.look(*self._core.lender.free_slots(), waiting)

    def _ended(self, process: ExperimentProcess) -> None:
        """Handle the end of an experiment's process. Called in a thread."""
        if process.path is not None:
            end = end_of(process, process.path)
            self._loop.post(self._note_end, process, end)

    def _note_end(self, process: ExperimentProcess, end: ProcessEnd) -> None:
        name = next((name for name, each in self._processes.items() if each is process), None)
        if name is None:
            return
        del self._processes[name]
        self._scheduler.disk(why_full(self._results))
        self._scheduler.ended(name, end)

    def _ask(self, verb: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Perform a verb in the event loop."""
        answer: Future[T] = Future()

        def ask() -> None:
            try:
                answer.set_result(verb(*args, **kwargs))
            except Exception as error:
                answer.set_exception(error)

        self._loop.post(ask)
        return answer.result()

    # ------------------------------------------------------------------ the verbs, see `Control`
    def submit(self, draft: Draft, code: Path, owner: str = "", request: str = "") -> Submitted:
        if request and (found := self._ask(self._scheduler.of_request, request)) is not None:
            return found
        if self._scheduler.full:
            raise StorageFull(errno.ENOSPC, self._scheduler.full)
        allowance = None
        if owner:
            allowance = Allowance(quota=self._tokens.quota(owner), use=self.use(owner))
            check_room(owner, allowance.quota, allowance.use, dict.fromkeys(UNITS, 0.0), {})
        with self._creations.new() as link:
            read, imported = outside(draft.read, allowance), frozenset(self._imported)
            process = self._spares.create(commands.Create(read=read, code=code, link=link, imported=imported))
            assert process.opened is not None
            opened = process.opened
            self._imported.add(opened.code)
            take_number(opened.path)
            try:
                submitted = self._ask(self._accept, process, opened, owner, request)
            except (OSError, OverQuota, ConfigError):
                process.signal(signal.SIGKILL)
                raise
        return replace(submitted, by_quota=opened.by_quota, missing_secrets=opened.missing_secrets)

    def _accept(self, process: ExperimentProcess, opened: commands.Opened, owner: str, request: str) -> Submitted:
        # If this process has ended, another one will open the experiment.
        has_process = process.exit_code is None
        budget = {unit: opened.budget[unit] for unit in UNITS if unit in opened.budget}
        submitted, runs = self._scheduler.submit(
            opened.path, opened.share, has_process=has_process, owner=owner, budget=budget, request=request
        )
        if runs:
            self._processes[submitted.name] = process
            process.send(commands.Run(os.environ.get(SERVED_AT, "")))
        else:
            process.signal(signal.SIGKILL)
        return submitted

    def experiments(self) -> list[Submitted]:
        return self._ask(self._scheduler.experiments)

    def experiment(self, name: str) -> Submitted:
        return self._ask(self._scheduler.experiment, name)

    def act(self, name: str, verb: Verb) -> Submitted:
        return self._ask(self._scheduler.act, name, verb)

    def extend(self, name: str, extension: Mapping[str, Any]) -> Submitted:
        limits = {field: extension[field] for field in CHANGEABLE if field in extension}
        budget: dict[str, float] | None = None
        self.experiment(name)  # raises if there is none
        directory = ExperimentDirectory(self._results / name)
        config = directory.config()
        check_growth(as_extended(config, read_journal(directory.journal)), extension)
        if limits:
            config = with_limits(config, limits)
            if "budget" in limits:
                now = totals_of(None if config.budget is None else config.budget.model_dump())
                changed = UNITS if limits["budget"] is None else [unit for unit in UNITS if unit in limits["budget"]]
                budget = {unit: now.get(unit, math.inf) for unit in changed}
        return self._ask(self._scheduler.extend, name, extension, budget)

    def change(self, name: str, change: Mapping[str, Any]) -> Submitted:
        return self._ask(self._scheduler.change, name, change)

    def queue(self, seconds: float) -> QueueState:
        return self._ask(self._core.queue, seconds)

    def foresee(self, shares: Mapping[str, Share]) -> list[str]:
        return self._ask(self._core.foresee, shares, lambda item: guessed(item.path, self._core.lender.view))

    def use(self, owner: str) -> Use:
        return self._ask(self._scheduler.use, owner)

    def status(self) -> Status:
        return self._ask(self._status)

    def _status(self) -> Status:
        lender = self._core.lender
        return Status(
            version=__version__,
            cluster=self._cluster.description,
            results=str(self._results),
            since=self._since,
            slots=lender.slots(),
            busy=sum(demand.has * demand.size for demand in lender.demands.values()),
            groups=lender.count,
            experiments=self._scheduler.counts(),
        )


def end_of(process: ExperimentProcess, path: Path) -> ProcessEnd:
    """The end of an experiment's process, as its files and its exit code tell it."""
    failure = process.failure
    message = "" if failure is None else failure.message
    directory = ExperimentDirectory(path)
    try:
        if directory.journal.exists():  # written by a killed process, perhaps, and lost if the power fails
            sync(directory.journal)
        state = StoredExperiment.here(directory).overview().state
    except (OSError, ValueError) as error:
        return ProcessEnd(kind="ERROR", error=one_line(error))
    if state in (*COMPLETED, "ERROR"):
        return ProcessEnd(kind="ERROR" if state == "ERROR" else "COMPLETED", error=message)
    if failure is not None and process.exit_code != commands.FULL:
        return ProcessEnd(kind="failed", error=message)
    if process.exit_code == commands.STOPPED:
        return ProcessEnd(kind="stopped")
    died = f"its process ended ({process.how_ended}); see {path / commands.OUTPUT}"
    return ProcessEnd(kind="died", error=message or died)


def why_full(results: Path) -> str:
    """The error if the disk of the results directory is full, with its remedy; "" if it is not."""
    free, least = shutil.disk_usage(results).free, MIN_FREE_BYTES
    return "" if free >= least else f"the disk is full: {free >> 20} MiB are free in {results}; free {least >> 20} MiB"


class _Lines:
    """The display that `LenderShell` needs, without a screen."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.say = say

    def waits(self, status: str) -> None:
        """No-op: a server has no line for this."""
