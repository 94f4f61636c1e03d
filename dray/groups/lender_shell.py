"""The shell around a `Lender`, in a driver or in a server: carries out its effects on Ray.

Threads call Ray, because its calls can take long, and block while the head of the cluster does not answer.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import ray

from dray.cluster.view import AutoscalerLimits
from dray.groups import effects
from dray.groups.effects import GiveUp, GroupsEffect, LookAtCluster, ShowWaiting, StartGroup
from dray.groups.group import WorkerGroup
from dray.groups.lender import GroupKind, Lender, OnPool, PoolClosed, PoolOpened
from dray.groups.on_ray import OnRay
from dray.groups.reservation import Reservation
from dray.leases.effects import After, Say
from dray.leases.messages import GroupEnded
from dray.rpc.event_loop import EventLoop
from dray.text import one_line
from dray.worker.spec import ExperimentSpec, WorkerSpec

END_S = 30.0
"""How long the threads of ended groups may take to end: a thread that is waiting for Ray when the connection is closed
may crash the process."""
RETRY_S = 1.0
"""Seconds from an error of Ray to the next look at the cluster."""

Report = Callable[[effects.GroupsEvent], None]


class GroupsShell:
    """The worker groups of one owner, on Ray. `make` starts a group, which reports to its second argument. `report`
    is called with each event, in any thread."""

    def __init__(
        self,
        make: Callable[[effects.StartGroup, Report], WorkerGroup],
        report: Report,
        *,
        on_ray: OnRay,
        limits: AutoscalerLimits | None,
    ) -> None:
        self._make, self._report, self._ray, self._limits = make, report, on_ray, limits
        self._groups: dict[int, WorkerGroup] = {}
        self._rooms: dict[int, Reservation] = {}
        self._is_closing = threading.Event()
        self._acts = ThreadPoolExecutor(1, "dray-groups")
        self._looks = ThreadPoolExecutor(1, "dray-looks")  # a separate thread, because a look may take seconds

    def perform(self, effect: effects.ShellEffect) -> None:
        """Queue an effect."""
        if isinstance(effect, effects.LookAtCluster):
            done = self._looks.submit(self._look, effect)
        else:
            done = self._acts.submit(self._act, effect)
        done.add_done_callback(self._check)

    def close(self, within_s: float) -> None:
        """Give all groups together `within_s` seconds to end on their own; then end them.

        Call `Groups.close` first, and perform its effects.
        """
        self._is_closing.set()
        self._acts.shutdown()
        deadline = time.monotonic() + within_s
        for group in self._groups.values():
            group.ended(deadline)
        deadline = time.monotonic() + END_S
        with contextlib.suppress(ray.exceptions.RayError):  # Ray may be gone
            for group in self._groups.values():
                group.end()
        for group in self._groups.values():
            group.join(deadline)
        self._looks.shutdown()

    def _check(self, done: Future[None]) -> None:
        if (error := done.exception()) is not None:
            self._report(effects.ShellFailed(error))

    def _act(self, effect: effects.StartGroup | effects.EndGroup | effects.Reserve | effects.Release) -> None:
        match effect:
            case effects.StartGroup():
                try:
                    self._groups[effect.start] = self._make(effect, self._report)
                except ray.exceptions.RayError as error:
                    self._report(GroupEnded(group=effect.group, start=effect.start, error=one_line(error)))
            case effects.EndGroup():
                if (group := self._groups.pop(effect.start, None)) is not None:
                    with contextlib.suppress(ray.exceptions.RayError):  # Ray may be gone
                        group.end()
            case effects.Reserve():
                self._rooms[effect.room] = self._ray.reserve(effect, self._report)
            case effects.Release():
                self._rooms.pop(effect.room).release()

    def _look(self, effect: effects.LookAtCluster) -> None:
        while not self._is_closing.is_set():
            try:
                view = self._ray.look(self._limits, waiting=effect.waiting)
            except ray.exceptions.RayError:  # the head does not answer
                self._is_closing.wait(RETRY_S)
            else:
                self._report(effects.ClusterSeen(view))
                return


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
