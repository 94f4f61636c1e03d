"""Carries out the effects of `dray.groups.pool.Groups` on Ray, and reports the resulting events.

Threads call Ray, because its calls can take long, and block while the head of the cluster does not answer.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import ray

from dray.cluster.view import AutoscalerLimits
from dray.desk.messages import GroupEnded
from dray.groups import effects
from dray.groups.group import WorkerGroup
from dray.groups.on_ray import OnRay
from dray.groups.reservation import Reservation
from dray.text import one_line

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
