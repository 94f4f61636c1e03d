"""A server's verbs in memory, for tests of what is in front of them."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from dray.code.load import check_entrypoint_file
from dray.records.directory import ExperimentDirectory
from dray.serve.control import ExperimentState, QueueState, Share, Status, Submitted, Verb
from dray.serve.draft import Draft
from dray.serve.lanes import Lanes
from dray.serve.quota import Use
from dray.serve.refusals import NotSubmitted, has_ended, is_running

ACTIVE = ("QUEUED", "RUNNING", "STOPPING")
ENDED = ("COMPLETED", "STOPPED", "PAUSED", "ERROR")


class FakeControl:
    """As `dray.serve.control.Control`; nothing trains, and an experiment stays QUEUED until a test says otherwise.

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
        self.requests: dict[str, str] = {}
        self._all: dict[str, Submitted] = {}
        self._lock = threading.Lock()

    def put(self, name: str, state: ExperimentState = "QUEUED", **fields: object) -> Submitted:
        """Have an experiment of this name, or change it."""
        before = self._all.get(name, Submitted(name=name, state=state, submitted=1_700_000_000.0, share=Share()))
        self._all[name] = replace(before, state=state, **fields)  # type: ignore[arg-type]
        return self._all[name]

    def submit(self, draft: Draft, code: Path, owner: str = "", request: str = "") -> Submitted:
        if request and request in self.requests:
            return self._all[self.requests[request]]
        read = draft.read()
        checked = read.config
        check_entrypoint_file(checked.entrypoint, code)
        with self._lock:
            name = f"{checked.name}-{len(self._all) + 1}"
            ExperimentDirectory.create(self.results / name, checked, code)
            asked = checked.resources
            share = Share(priority=asked.priority, weight=asked.weight, max_slots=asked.max_slots)
            self.requests[request] = name
            return self.put(name, share=share, owner=owner, missing_secrets=read.missing_secrets)

    def experiments(self) -> list[Submitted]:
        return [each for each in list(self._all.values()) if self._is_there(each.name)]

    def experiment(self, name: str) -> Submitted:
        if name not in self._all or not self._is_there(name):
            raise NotSubmitted(f"{name} was not submitted to this server")
        return self._all[name]

    def act(self, name: str, verb: Verb) -> Submitted:
        before = self.experiment(name).state
        self.calls.append((verb, name))
        if verb == "activate":
            return self.put(name, "QUEUED" if before in ENDED else before)
        if before in ("COMPLETED", "ERROR"):
            raise has_ended(name, before)
        now = self.put(name, "PAUSED" if verb == "pause" else "STOPPED")
        return replace(now, state="STOPPING") if before == "RUNNING" and verb != "kill" else now

    def extend(self, name: str, extension: Mapping[str, Any]) -> Submitted:
        if self.experiment(name).state not in ENDED:
            raise is_running(name)
        self.calls.append(("extend", name))
        self.extensions.append(extension)
        return self.put(name, "QUEUED")

    def change(self, name: str, change: Mapping[str, Any]) -> Submitted:
        now = self.experiment(name)
        share = {field: value for field, value in change.items() if field not in ("tags", "notes")}
        words = {field: value for field, value in change.items() if field in ("tags", "notes")}
        return self.put(name, now.state, share=replace(now.share, **share), **words)

    def queue(self, seconds: float) -> QueueState:
        entries = [each for each in self.experiments() if each.state in (*ACTIVE, "PAUSED")]
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
            since=1_700_000_000.0,
            slots=2.0,
            busy=1.0,
            groups=1,
            experiments=dict(Counter(each.state for each in self.experiments())),
        )

    def _is_there(self, name: str) -> bool:
        return (self.results / name / "experiment.yaml").exists()
