"""The server's scheduler: decides which experiments have a process, and implements the verbs of its users.

Pure: it passes effects to `emit`, and `dray.serve.manager` carries them out. The queue's `append` records every request
of a user before anything acts on it.
"""

from __future__ import annotations

import copy
import math
import signal
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from dray.leases.effects import Say
from dray.leases.shares import Demand
from dray.serve.accounts import Accounts
from dray.serve.control import ACTIVE, ExperimentState, Share, Submitted, Verb
from dray.serve.effects import (
    Ended,
    Evict,
    ReadSpent,
    RemoveRun,
    SchedulerEffect,
    SetShare,
    SignalProcess,
    StartProcess,
)
from dray.serve.queue import Item, Queue, extended
from dray.serve.quota import Quota, Use, check_priority
from dray.serve.refusals import is_running
from dray.text import counted

MAX_DEATHS = 3  # an experiment fails when its process dies this often in a row without training in between
STARTS = "its process starts"
MAX_PROCESSES = 64  # most experiments that run at the same time


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessEnd:
    """How an experiment's process ended."""

    # COMPLETED, ERROR: the outcome of the search, from its directory. failed: another process would fail too. stopped:
    # by a signal. died: anything else.
    kind: Literal["COMPLETED", "ERROR", "failed", "stopped", "died"]
    error: str = ""  # the reason, in one line


@dataclass(slots=True)
class _Process:
    """A running process of an experiment."""

    had_slots: bool = False  # it has trained
    met_full_disk: bool = False  # the disk was full at some time while it ran


class Scheduler:
    """The experiments of a server.

    Args:
        queue: the experiments, with the states that users want.
        emit: called with each effect.
        is_preempted: tells whether other runs have the slots that a demand waits for.
        why_waits: the reason why trials of a demand wait, in one line.
        quota_of: the quota of the token of this name.
    """

    def __init__(
        self,
        queue: Queue,
        emit: Callable[[SchedulerEffect], None],
        *,
        is_preempted: Callable[[Demand], bool],
        why_waits: Callable[[Demand], str] = lambda demand: "",
        quota_of: Callable[[str], Quota] = lambda owner: Quota(),
    ) -> None:
        self._queue, self._emit, self._is_preempted, self._why_waits = queue, emit, is_preempted, why_waits
        self._processes: dict[str, _Process] = {}
        self._leaving: set[str] = set()  # runs whose process has ended, but not all of their trials
        self._unsettled: set[str] = set()  # experiments whose process has ended, but what they spent is not yet read
        self.accounts = Accounts(queue, quota_of, lambda item: item.state == "run" or self._is_up(item.name))
        self.closing = False  # the server is ending
        self.full = ""  # the reason why no process may start, if the disk is full
        self.slots = 0.0  # slots of the cluster
        self.demands: Mapping[str, Demand] = {}  # by run, as of the last step

    # ------------------------------------------------------------------ events
    def step(self, demands: Mapping[str, Demand], slots: float) -> None:
        """Update the desk's shares from its demands, and start the processes that are due."""
        self.demands, self.slots = demands, slots
        for run, demand in demands.items():
            name = experiment_of(run)
            if (process := self._processes.get(name)) is None:
                self._remove(run)
                continue
            process.had_slots |= bool(demand.has)
            self._queue.opened(name)
            share = self._queue.item(name).share
            most = None if share.max_slots is None else share.max_slots * demand.unit
            if (share.priority, share.weight, most) != (demand.priority, demand.weight, demand.max_slots):
                self._emit(SetShare(run, share.priority, share.weight, most))
        for name in self._unsettled - set(map(experiment_of, self._leaving)):
            self._emit(ReadSpent(name))
        self._start_due()

    def _start_due(self) -> None:
        due = [item for item in self._queue.items() if item.state == "run" and not self._is_up(item.name)]
        for item in sorted(due, key=lambda each: each.share.priority):
            if not self._why_no_process(item):
                self._start(item)

    def supposed(self, shares: Mapping[str, Share]) -> list[Item]:
        """The experiments that have a process or get one next if experiments have these shares: decided on a copy."""
        other = copy.copy(self)
        other._queue, other._processes, other._emit = (
            self._queue.supposed(shares),
            dict(self._processes),
            lambda _: None,
        )
        other._start_due()
        return [other._queue.item(name) for name in other._processes]

    def disk(self, full: str) -> None:
        """Note whether the disk of the results is full: the reason, or "". While it is, no process starts, as it would
        end at once."""
        was_full = self.full
        self.full = f"{full}: experiments that wait, or could not write, then continue by themselves" if full else ""
        if self.full and not was_full:
            self._emit(Say(self.full))
        elif was_full and not self.full:
            self._emit(Say("the disk has room again"))
        for process in self._processes.values() if self.full else ():
            process.met_full_disk = True

    def deleted(self, names: Collection[str]) -> None:
        """Forget experiments whose directories were deleted, by the command or by hand."""
        for name in names:
            if not self._is_up(name):
                self._queue.remove(name)

    def left(self, run: str) -> None:
        """Note that the desk has forgotten a run."""
        self._leaving.discard(run)

    def spends(self, spent: Mapping[str, Mapping[str, float]]) -> None:
        """Note what experiments with a process have spent so far. Those that exceed the quota of their token end at
        once."""
        for name, each in spent.items():
            self.accounts.spends(name, each)
        for item, why in self.accounts.overrun():
            if item.name in self._processes:
                self._emit(SignalProcess(item.name, signal.SIGKILL))
            for run in [run for run in self.demands if experiment_of(run) == item.name]:
                self._emit(Evict(run))
            if item.state in ("run", "pause"):
                self._emit(Say(f"experiment {item.name}: {why}"))
                self._queue.move(item.name, "stop", why)

    def spending(self) -> list[Item]:
        """The experiments of tokens that have a process, or trials that have yet to leave."""
        names = {*self._processes, *map(experiment_of, self._leaving), *self._unsettled}
        return [item for name in names if (item := self._queue.find(name)) is not None and item.owner]

    def settle(self, name: str, spent: Mapping[str, float]) -> None:
        """Record what an experiment has spent, as its process and its trials have ended."""
        self.accounts.spends(name, spent)
        self.accounts.settle(name)
        self._unsettled.discard(name)

    def ended(self, name: str, end: ProcessEnd) -> None:
        """Handle the end of a process. If it can't be recorded, the experiment starts, and ends, again."""
        process = self._processes.pop(name)
        for run in [run for run in self.demands if experiment_of(run) == name]:
            self._remove(run)
        item = self._queue.item(name)
        if item.owner:
            self._unsettled.add(name)
        if end.kind not in ("died", "stopped"):  # either can happen before the extension is applied
            self._queue.opened(name)
        if end.kind in ("COMPLETED", "ERROR"):
            self._end(name, "ERROR" if end.kind == "ERROR" else "COMPLETED", end.error)
        elif process.met_full_disk:
            pass  # the disk is taken to be the cause: it starts again once there is room
        elif end.kind == "failed":
            self._end(name, "ERROR", end.error)
        elif end.kind == "died" and item.state == "run" and not self.closing:
            self._emit(Say(f"experiment {name}: {end.error}"))
            self._queue.died(name, end.error, has_trained=process.had_slots)
            if item.restarts >= MAX_DEATHS:
                self._end(name, "ERROR", f"{end.error}; it has died {MAX_DEATHS} times in a row", by_server=True)
        elif item.state == "stop" and not self.closing:
            self._emit(Ended(name, "stopped", item.error, by_server=end.kind == "died"))

    def _end(self, name: str, state: Literal["COMPLETED", "ERROR"], error: str, *, by_server: bool = False) -> None:
        self._queue.move(name, state, error)
        self._emit(Ended(name, "failed" if state == "ERROR" else "completed", error, by_server))

    def _remove(self, run: str) -> None:
        if run not in self._leaving:
            self._leaving.add(run)
            self._emit(RemoveRun(run))

    def _is_up(self, name: str) -> bool:
        is_leaving = any(experiment_of(run) == name for run in self._leaving)
        return name in self._processes or name in self._unsettled or is_leaving

    def _why_no_process(self, item: Item) -> str:
        """The reason why an experiment may not start now; "" if it may: at most one more than the slots, unless it
        preempts a running one; the same for the experiments and the slots of its token, which would take the places of
        others otherwise."""
        if self.closing:
            return "the server is ending; the next one continues it"
        if self.full:
            return self.full
        if len(self._processes) >= MAX_PROCESSES:
            return f"{MAX_PROCESSES} experiments run, the most at a time"
        running = [self._queue.item(name) for name in self._processes]
        limits = [(running, int(self.slots), "")]
        if item.owner and (most := self.accounts.quota_of(item.owner).slots) is not None:
            limits.append(([each for each in running if each.owner == item.owner], most, f" of token {item.owner}"))
        for those, slots, whose in limits:
            if len(those) > slots and item.share.priority >= max(each.share.priority for each in those):
                return f"{counted(len(those), 'experiment')}{whose} run or wait before it, for {counted(slots, 'slot')}"
        return ""

    def _start(self, item: Item) -> None:
        self._processes[item.name] = _Process()
        self._emit(StartProcess(item.name, item.path, dict(item.extension)))

    def close(self) -> None:
        """End all processes; running trials save first. The queue is kept for the next server."""
        self.closing = True
        for name in self._processes:
            self._emit(SignalProcess(name, signal.SIGTERM))

    # ------------------------------------------------------------------ the verbs, see `dray.serve.control.Control`
    def submit(
        self,
        path: Path,
        share: Share,
        *,
        has_process: bool,
        owner: str = "",
        budget: Mapping[str, float] | None = None,
        request: str = "",
    ) -> tuple[Submitted, bool]:
        """Accept a new experiment. Returns it, and whether the process that created it, if it is still up, runs it.
        `owner`: the name of a token, whose quota must have room for the experiment's `budget`."""
        if owner:
            check_priority(owner, self.accounts.quota_of(owner), share.priority, "resources.priority")
        totals = dict(budget or {})
        self.accounts.admit(Item(name=path.name, path=path, submitted=0.0, share=share, owner=owner, budget=totals))
        item = self._queue.add(path, share, owner=owner, budget=totals, request=request)
        runs = has_process and not self._why_no_process(item)
        if runs:
            self._processes[item.name] = _Process()
        return self._submitted(item), runs

    def experiments(self) -> list[Submitted]:
        return [self._submitted(item) for item in self._queue.items()]

    def experiment(self, name: str) -> Submitted:
        return self._submitted(self._queue.item(name))

    def of_request(self, request: str) -> Submitted | None:
        """The experiment that a request has created."""
        found = next((item for item in self._queue.items() if item.request == request), None)
        return None if found is None else self._submitted(found)

    def act(self, name: str, verb: Verb) -> Submitted:
        """Stop, pause, kill or activate an experiment."""
        item = self._queue.item(name)
        if verb == "activate":
            if item.state != "run":
                self.accounts.admit(item)
                self._queue.move(name, "run")
            return self._submitted(item)
        at_once = verb == "kill" or (verb == "stop" and item.state in ("stop", "pause"))
        self._queue.move(name, "pause" if verb == "pause" else "stop")
        if name in self._processes:
            self._emit(SignalProcess(name, signal.SIGKILL if at_once else signal.SIGTERM))
        return self._submitted(item)

    def extend(self, name: str, extension: Mapping[str, Any], budget: Mapping[str, float] | None = None) -> Submitted:
        """Queue an experiment again. `budget`: the new totals of its budget; infinite without a limit."""
        item = self._queue.item(name)
        if name in self._processes:
            raise is_running(name)
        # What was reserved stays so: its next process may fail before it applies an extension that lowers the budget.
        total = item.budget | {unit: max(item.budget.get(unit, 0.0), each) for unit, each in (budget or {}).items()}
        self.accounts.admit(item, total, prices=extension.get("prices"))
        total = {unit: each for unit, each in total.items() if math.isfinite(each)}
        self._queue.extend(name, extended(item.extension, extension), total if item.owner else None)
        return self._submitted(item)

    def change(self, name: str, change: Mapping[str, Any]) -> Submitted:
        self._queue.change(name, change)
        return self.experiment(name)

    def use(self, owner: str) -> Use:
        """What the experiments of a token use."""
        mine = (item for item in self._queue.items() if item.owner == owner)
        demands = [demand for item in mine for demand in self._demands_of(item.name)]
        return self.accounts.use(owner, slots=sum(demand.has * demand.size / demand.unit for demand in demands))

    def counts(self) -> dict[ExperimentState, int]:
        """The number of experiments in each state."""
        return dict(Counter(self._state(item, self._demands_of(item.name)) for item in self._queue.items()))

    def claim(self, run: str) -> dict[str, Any]:
        """The claim of a run to slots at the desk: fields of `dray.leases.shares.Claim`."""
        item = self._queue.find(experiment_of(run))
        if item is None or not item.owner:
            return {}
        return {"account": item.owner, "account_slots": self.accounts.quota_of(item.owner).slots}

    # ------------------------------------------------------------------ what is known
    def _demands_of(self, name: str) -> list[Demand]:
        return [demand for run, demand in self.demands.items() if experiment_of(run) == name]

    def _submitted(self, item: Item) -> Submitted:
        demands = self._demands_of(item.name)
        state = self._state(item, demands)
        return Submitted(
            name=item.name,
            state=state,
            submitted=item.submitted,
            share=item.share,
            slots=sum(demand.has * demand.size for demand in demands),
            waiting=sum(demand.groups - demand.has for demand in demands),
            restarts=item.restarts,
            # A running experiment has recovered from its last death.
            why=self._why(item, state, demands),
            error=(item.error if state != "RUNNING" else "") or (self.full if state in ACTIVE else ""),
            tags=item.tags,
            notes=item.notes,
            owner=item.owner,
        )

    def _why(self, item: Item, state: ExperimentState, demands: Collection[Demand]) -> str:
        """The reason why an experiment, or some of its trials, wait."""
        if state == "PAUSED":
            return "paused, until somebody activates it"
        if state not in ACTIVE:
            return ""
        if state == "STOPPING":
            return "its trials save"
        if item.name not in self._processes:
            return "its last process ends" if self._is_up(item.name) else self._why_no_process(item) or STARTS
        if not demands:
            return STARTS
        if not any(each.groups for each in demands):
            return "its search decides what to train next, or ends"
        return next((self._why_waits(each) for each in demands if each.groups > each.has), "")

    def _state(self, item: Item, demands: Collection[Demand]) -> ExperimentState:
        process = self._processes.get(item.name)
        match item.state:
            case "COMPLETED" | "ERROR":
                return item.state
            case "pause" | "stop":
                return "STOPPING" if process is not None else "PAUSED" if item.state == "pause" else "STOPPED"
        had_slots = process is not None and process.had_slots
        waits = any(demand.groups for demand in demands)
        if any(demand.has for demand in demands) or (had_slots and not waits):
            return "RUNNING"  # without trials it is deciding on the next ones, or ending
        if had_slots:  # either other runs have its slots, or its workers have died
            return "PREEMPTED" if any(map(self._is_preempted, demands)) else "RESTARTING"
        return "RESTARTING" if item.restarts else "QUEUED"


def experiment_of(run: str) -> str:
    """The name of a run's experiment. The name of a run has a suffix, which makes it unique at the desk."""
    return run.rpartition("-")[0]
