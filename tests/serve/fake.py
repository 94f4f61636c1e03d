"""A server's verbs in memory, for tests of what is in front of them."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from dray.code.load import check_entrypoint_file
from dray.leases.shares import Demand
from dray.records.directory import ExperimentDirectory
from dray.serve.control import ExperimentState, QueueState, Share, Status, Submitted, Verb
from dray.serve.draft import Draft
from dray.serve.lanes import Lanes
from dray.serve.queue import Queue
from dray.serve.quota import Use
from dray.serve.refusals import NotSubmitted
from dray.serve.scheduler import ProcessEnd, Scheduler, _Process

SINCE = 1_700_000_000.0
WANTED: Mapping[str, Any] = {"PAUSED": "pause", "STOPPED": "stop", "STOPPING": "stop"}


class FakeControl:
    """As `dray.serve.control.Control`, with the rules of the server's scheduler. Nothing trains: an experiment stays
    QUEUED until a test says otherwise, and its process ends as soon as it gets a signal.

    Args:
        results: the results directory, in which `submit` makes experiments' directories.

    Attributes:
        calls: the verbs that were called, with their names.
        extensions: those of the experiments that were extended.
    """

    def __init__(self, results: Path) -> None:
        self.results = results
        self.calls: list[tuple[str, str]] = []
        self.extensions: list[Mapping[str, Any]] = []
        self.lock = threading.RLock()
        self._queue = Queue((), lambda record: None, clock=lambda: SINCE)
        self.scheduler = Scheduler(self._queue, lambda effect: None, is_preempted=lambda demand: True)
        self._shown: dict[str, dict[str, Any]] = {}  # what only the desk of a real server knows

    def put(self, name: str, state: ExperimentState = "QUEUED", **fields: Any) -> Submitted:
        """Have an experiment of this name, or change it."""
        with self.lock:
            item = self._queue.find(name) or self._queue.add(self.results / name, Share())
            item.state = state if state in ("COMPLETED", "ERROR") else WANTED.get(state, "run")  # type: ignore[assignment]
            item.restarts = int(state == "RESTARTING")
            up = state in ("RUNNING", "PREEMPTED", "STOPPING")
            self._up.pop(name, None)
            self._up.update({name: _Process(had_slots=True)} if up else {})
            waits = {f"{name}-1": Demand(name=f"{name}-1", groups=1)} if state == "PREEMPTED" else {}
            self.scheduler.demands = {
                run: it for run, it in self.scheduler.demands.items() if run != f"{name}-1"
            } | waits
            shown = ("slots", "waiting", "why", "missing_secrets")
            self._shown.setdefault(name, {}).update({field: fields.pop(field) for field in shown if field in fields})
            for field, value in fields.items():
                setattr(item, field, value)
            return self._submitted(name)

    @property
    def _up(self) -> dict[str, _Process]:
        return self.scheduler._processes  # noqa: SLF001

    def submit(self, draft: Draft, code: Path, owner: str = "", request: str = "") -> Submitted:
        if request and (found := self.scheduler.of_request(request)) is not None:
            return found
        read = draft.read()
        checked = read.config
        check_entrypoint_file(checked.entrypoint, code)
        with self.lock:
            name = f"{checked.name}-{len(self._queue.items()) + 1}"
            ExperimentDirectory.create(self.results / name, checked, code)
            asked = checked.resources
            share = Share(priority=asked.priority, weight=asked.weight, max_slots=asked.max_slots)
            self.scheduler.submit(self.results / name, share, has_process=False, owner=owner, request=request)
            return self.put(name, missing_secrets=read.missing_secrets)

    def experiments(self) -> list[Submitted]:
        return [self.experiment(item.name) for item in self._queue.items() if self._is_there(item.name)]

    def experiment(self, name: str) -> Submitted:
        if not self._is_there(name):
            raise NotSubmitted(name)
        return self._submitted(name)

    def _submitted(self, name: str) -> Submitted:
        return replace(self.scheduler.experiment(name), **self._shown.get(name, {}))

    def act(self, name: str, verb: Verb) -> Submitted:
        with self.lock:
            self.experiment(name)
            self.calls.append((verb, name))
            answer = self.scheduler.act(name, verb)
            if verb != "activate" and name in self._up:
                self.scheduler.ended(name, ProcessEnd(kind="stopped"))
                self.scheduler.settle(name, {})
            return answer

    def extend(self, name: str, extension: Mapping[str, Any]) -> Submitted:
        with self.lock:
            answer = self.scheduler.extend(name, extension)
            self.calls.append(("extend", name))
            self.extensions.append(extension)
            return answer

    def change(self, name: str, change: Mapping[str, Any]) -> Submitted:
        self.scheduler.change(name, change)
        return self.experiment(name)

    def queue(self, seconds: float) -> QueueState:
        entries = [each for each in self.experiments() if each.state in ("QUEUED", "RUNNING", "STOPPING", "PAUSED")]
        return QueueState(entries=entries, next=None, slots=2.0, lanes=Lanes().view(seconds, {"cpu": 2.0}))

    def foresee(self, shares: Mapping[str, Share]) -> list[str]:
        return ["No slots move now."]

    def use(self, owner: str) -> Use:
        mine = sum(each.owner == owner for each in self.experiments())
        return Use(used={"slot_hours": 1.5, "usd": 0.0}, reserved={"slot_hours": 2.0, "usd": 0.0}, experiments=mine)

    def status(self) -> Status:
        return Status(
            version="0.1.0",
            cluster="this machine",
            results=str(self.results),
            since=SINCE,
            slots=2.0,
            busy=1.0,
            groups=1,
            experiments=self.scheduler.counts(),
        )

    def _is_there(self, name: str) -> bool:
        return (self.results / name / "experiment.yaml").exists()
