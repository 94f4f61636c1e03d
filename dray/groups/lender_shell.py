"""The shell around a `Lender`, in a driver or in a server: carries out its effects on Ray."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import ray

from dray.desk.effects import After, Say
from dray.desk.loop import EventLoop
from dray.desk.messages import GroupEnded
from dray.groups.effects import GiveUp, GroupsEffect, LookAtCluster, ShowWaiting, StartGroup
from dray.groups.group import WorkerGroup
from dray.groups.lender import GroupKind, Lender, OnPool, PoolClosed, PoolOpened
from dray.groups.on_ray import OnRay
from dray.groups.shell import GroupsShell, Report
from dray.worker.spec import ExperimentSpec, WorkerSpec

END_S = 30.0
"""How long all groups together may take to shut down on a cluster that stays up."""
PATIENCE_S = 5.0
"""How long the event loop may take to close all groups."""
POLL_S = 0.01


class Announcer(Protocol):
    """A display of messages about groups, such as a run's."""

    def say(self, line: str) -> None:
        """Print a line."""

    def waits(self, status: str) -> None:
        """Show the reason why groups wait; "" if none waits."""


class LenderShell:
    """Starts and ends groups on Ray, as a `Lender` decides.

    Args:
        loop: the event loop of the lender.
        experiment: the only experiment that they serve, whose code is loaded at their start; None: they are a server's.
        starts: called with the name and the slots of each group that starts.
        ends: called with the name of each group that has ended.
    """

    def __init__(
        self,
        loop: EventLoop,
        lender: Lender,
        on_ray: OnRay,
        display: Announcer,
        *,
        experiment: ExperimentSpec | None = None,
        starts: Callable[[str, float], None] = lambda group, slots: None,
        ends: Callable[[str], None] = lambda group: None,
    ) -> None:
        self._loop, self._lender, self._ray, self._display = loop, lender, on_ray, display
        self._experiment, self._starts, self._ends = experiment, starts, ends
        self._shells: dict[str, GroupsShell] = {}
        self._kinds: dict[str, GroupKind] = {}
        self._closing: list[threading.Thread] = []
        self._end_s = 0.0
        self._looks = ThreadPoolExecutor(1, thread_name_prefix="dray-look")

    def perform(self, effect: Any) -> None:
        """Carry out an effect."""
        match effect:
            case After(seconds, method, args):
                self._loop.later(seconds, self._lender.send, method, *args)
            case PoolOpened(owner, kind):
                self._kinds[owner] = kind
                self._shells[owner] = GroupsShell(
                    lambda start, report: self._new_group(owner, start, report),
                    lambda event: self._loop.post(self._heard, owner, event),
                    on_ray=self._ray,
                    limits=self._lender.view.limits,
                )
            case OnPool(owner, each):
                self._perform_on(owner, each)
            case PoolClosed(owner):
                self._close(owner)
            case LookAtCluster():
                self._looks.submit(self._look)
            case _:
                raise AssertionError(effect)

    def _look(self) -> None:
        with contextlib.suppress(ray.exceptions.RayError):  # the head does not answer
            self._loop.post(self._lender.look, self._ray.look(self._ray.limits()))

    def _perform_on(self, owner: str, effect: GroupsEffect) -> None:
        match effect:
            case Say(line):
                self._display.say(line)
            case ShowWaiting(status):
                self._display.waits(status)
            case GiveUp():
                raise AssertionError("the lender takes it")
            case _:
                if isinstance(effect, StartGroup):
                    self._starts(effect.group, effect.slots.taken)
                if (shell := self._shells.get(owner)) is not None:
                    shell.perform(effect)

    def _new_group(self, owner: str, start: StartGroup, report: Report) -> WorkerGroup:
        kind = self._kinds[owner]
        spec = WorkerSpec(
            desk=self._loop.endpoint,
            owner=owner,
            group=start.group,
            start=start.start,
            shape=kind.shape,
            environment=kind.environment,
            deterministic=kind.deterministic,
            experiment=None if start.bare else self._experiment,
            shared_by=start.slots.shared_by,
        )
        return self._ray.group(spec, slots=start.slots, report=report)

    def _heard(self, owner: str, event: Any) -> None:
        if isinstance(event, GroupEnded):
            self._ends(event.group)
        self._lender.on(owner, event)

    def end(self, *, at_once: bool) -> None:
        """End all groups and wait for their ends. Call it from another thread. `at_once`: don't wait for their
        shutdown, because their cluster ends too."""
        self._end_s = 0.0 if at_once else END_S
        self._loop.post(self._lender.end)
        deadline = time.monotonic() + PATIENCE_S
        while self._shells and time.monotonic() < deadline:
            time.sleep(POLL_S)
        for owner in list(self._shells):  # the loop has failed
            self._close(owner)
        for thread in self._closing:
            thread.join()
        self._looks.shutdown(cancel_futures=True)

    def _close(self, owner: str) -> None:
        if (shell := self._shells.get(owner)) is None:  # `end` has stopped waiting for the loop
            return
        name = f"dray-end-{owner}"
        thread = threading.Thread(target=shell.close, args=(self._end_s,), name=name, daemon=True)
        thread.start()
        self._closing.append(thread)
        self._shells.pop(owner, None)  # last, because `end` waits for this, then joins the threads
