"""Carries out the effects of `dray.groups.pool.Groups` on Ray, and reports the resulting events.

Threads call Ray, because its calls can take long, and block while the head of the cluster does not answer.
"""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise

import ray
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group

from dray.cluster import autoscaler
from dray.cluster.internals import draining_nodes
from dray.cluster.nodes import nodes
from dray.cluster.view import AutoscalerLimits, ClusterView
from dray.groups import effects
from dray.groups.elastic import SETTLE_S
from dray.groups.group import WorkerGroup
from dray.text import one_line

END_S = 30.0
"""How long the threads of ended groups may take to end: a thread that is waiting for Ray when the connection is closed
may crash the process."""
POLL_S = 0.05
"""How often a new reservation is checked; after `SETTLE_S`, every `RETRY_S`."""
RETRY_S = 1.0
"""Seconds from an error of Ray to the next look at the cluster."""

Report = Callable[[effects.GroupsEvent | effects.ProcessesEnded], None]


class GroupsShell:
    """The worker groups of one owner, on Ray. `make` starts a group, which reports to its second argument. `report`
    is called with each event, in any thread."""

    def __init__(
        self,
        make: Callable[[effects.StartGroup, Report], WorkerGroup],
        report: Report,
        *,
        limits: AutoscalerLimits | None,
    ) -> None:
        self._make, self._report, self._limits = make, report, limits
        self._groups: dict[int, WorkerGroup] = {}
        self._rooms: dict[int, _Room] = {}
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
                    self._report(effects.ProcessesEnded(group=effect.group, start=effect.start, error=one_line(error)))
            case effects.EndGroup():
                if (group := self._groups.pop(effect.start, None)) is not None:
                    with contextlib.suppress(ray.exceptions.RayError):  # Ray may be gone
                        group.end()
            case effects.Reserve():
                self._rooms[effect.room] = _Room(effect, self._report)
            case effects.Release():
                self._rooms.pop(effect.room).release()

    def _look(self, effect: effects.LookAtCluster) -> None:
        while not self._is_closing.is_set():
            try:
                view = look_at_cluster(self._limits, waiting=effect.waiting)
            except ray.exceptions.RayError:  # the head does not answer
                self._is_closing.wait(RETRY_S)
            else:
                self._report(effects.ClusterSeen(view))
                return


def look_at_cluster(limits: AutoscalerLimits | None, *, waiting: bool = False) -> ClusterView:
    """What the cluster looks like now; if groups are waiting, also free resources, and what the autoscaler is
    starting. `limits`: what that may start; None without one."""
    return ClusterView(
        nodes=tuple(nodes()),
        draining=frozenset(draining_nodes()),
        limits=limits,
        free=ray.available_resources() if waiting else None,
        activity=autoscaler.activity() if waiting and limits is not None else None,
        time=time.time(),
    )


class _Room:
    """Slots that are reserved for a group that is to start, or to grow.

    There is a placement group for each step from one size to the next. While it is pending, an autoscaler sees the
    demand; once it is created, nobody else gets its resources; and it ends with the driver. `report` is called whenever
    the number of slots has changed.
    """

    def __init__(self, asked: effects.Reserve, report: Report) -> None:
        self._room, self._report = asked.room, report
        labels, sizes = dict(asked.slots.labels), [more - less for less, more in pairwise(asked.sizes)]
        self._steps = [
            placement_group(
                [asked.slots.resources] * slots,
                name=f"dray-room/{uuid.uuid4().hex[:8]}",
                bundle_label_selector=[labels] * slots if labels else None,
            )
            for slots in sizes
        ]
        self._is_released = threading.Event()
        threading.Thread(target=self._watch, name="dray-room", daemon=True).start()

    def release(self) -> None:
        """Release the slots."""
        self._is_released.set()
        with contextlib.suppress(ray.exceptions.RayError):  # Ray may be gone
            for step in self._steps:
                remove_placement_group(step)

    def _watch(self) -> None:
        began, before = time.monotonic(), 0
        while not self._is_released.wait(POLL_S if time.monotonic() < began + SETTLE_S else RETRY_S):
            with contextlib.suppress(ray.exceptions.RayError):
                created = (step for step in self._steps if placement_group_table(step)["state"] == "CREATED")
                if (slots := sum(step.bundle_count for step in created)) != before:
                    before = slots
                    self._report(effects.SlotsReserved(room=self._room, slots=slots))
