"""Carries out on Ray what `dray.groups.pool.Groups` decides, and reports what comes of it.

Calls of Ray may take long, and block while the head of the cluster does not answer, so threads make them.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from itertools import pairwise
from queue import SimpleQueue

import ray
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group

from dray.cluster import autoscaler
from dray.cluster.nodes import nodes
from dray.cluster.view import ClusterView, Limits
from dray.cluster.watch import draining_nodes
from dray.groups import effects
from dray.groups.elastic import SETTLE_S
from dray.groups.group import WorkerGroup
from dray.groups.slots import Slots
from dray.text import one_line

END_S = 30.0
"""How long threads may take to end, once their groups have ended: one that still waits for Ray when the connection is
closed may crash the whole process."""
POLL_S = 0.05
"""How often a new reservation is looked at; after `SETTLE_S`, every `RETRY_S`."""
RETRY_S = 1.0
"""How long after an error of Ray to look at the cluster again."""

Report = Callable[[effects.GroupsEvent | effects.ProcessesEnded], None]


class GroupsShell:
    """The worker groups of one owner, on Ray.

    Args:
        make: starts a group, which reports to the second argument.
        report: called with each event, in any thread.
        limits: what the cluster's autoscaler may start; None without an autoscaler.
    """

    def __init__(
        self, make: Callable[[effects.StartGroup, Report], WorkerGroup], report: Report, *, limits: Limits | None
    ) -> None:
        self._make, self._report, self._limits = make, report, limits
        self._groups: dict[int, WorkerGroup] = {}
        self._rooms: dict[int, _Room] = {}
        self._is_closing = threading.Event()
        # Those that look may wait for seconds: groups start and end meanwhile.
        self._acts, self._looks = (_Calls(f"dray-groups-{what}", report) for what in ("act", "look"))

    def perform(self, effect: effects.ShellEffect) -> None:
        """Carry out an effect, after those before it. Does not wait for that."""
        if isinstance(effect, effects.LookAtCluster):
            self._looks.add(functools.partial(self._look, effect))
        else:
            self._acts.add(functools.partial(self._act, effect))

    def close(self, within_s: float) -> None:
        """Give the groups ``within_s`` seconds, all together, to end by themselves; then end them.

        Call `Groups.close` first, and perform its effects.
        """
        self._is_closing.set()
        self._acts.close(END_S)
        deadline = time.monotonic() + within_s
        for group in self._groups.values():
            group.ended(deadline)
        deadline = time.monotonic() + END_S
        with contextlib.suppress(ray.exceptions.RayError):  # Ray may be gone
            for group in self._groups.values():
                group.end()
        for group in self._groups.values():
            group.join(deadline)
        self._looks.close(deadline - time.monotonic())

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
            case effects.Reserve(room=room):
                seen = lambda slots: self._report(effects.SlotsReserved(room=room, slots=slots))  # noqa: E731
                self._rooms[room] = _Room(effect.slots, effect.sizes, seen)
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


def look_at_cluster(limits: Limits | None, *, waiting: bool = False) -> ClusterView:
    """What the cluster looks like now.

    Args:
        limits: what its autoscaler may start; None without an autoscaler.
        waiting: also look at free resources, and at what the autoscaler is starting.
    """
    return ClusterView(
        nodes=tuple(nodes()),
        draining=frozenset(draining_nodes()),
        limits=limits,
        free=ray.available_resources() if waiting else None,
        activity=autoscaler.activity() if waiting and limits is not None else None,
        time=time.time(),
    )


class _Calls:
    """Makes calls, one after another, in a thread of its own."""

    def __init__(self, name: str, report: Report) -> None:
        self._report = report
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def add(self, call: Callable[[], None]) -> None:
        """Make a call after those before it."""
        self._calls.put(call)

    def close(self, within_s: float) -> None:
        """Make no further calls; wait for those before."""
        self._calls.put(None)
        self._thread.join(max(0.0, within_s))

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                call()
            except Exception as error:  # for the driver, which can't continue without this thread
                self._report(effects.ShellFailed(error))


class _Room:
    """Slots that are reserved for a group that is to start, or to grow.

    There is a placement group for each step from one size to the next. While it is pending, an autoscaler sees the
    demand; once it is created, nobody else gets its resources; and it ends with the driver.

    Args:
        slots: what a slot is made of.
        sizes: ascending.
        seen: called with the number of slots whenever it has changed.
    """

    def __init__(self, slots: Slots, sizes: Sequence[int], seen: Callable[[int], None]) -> None:
        self._steps = [
            placement_group(
                [slots.resources] * (more - less),
                name=f"dray-room/{uuid.uuid4().hex[:8]}",
                bundle_label_selector=[dict(slots.labels)] * (more - less) if slots.labels else None,
            )
            for less, more in pairwise(sizes)
        ]
        self._seen = seen
        self._is_released = threading.Event()
        threading.Thread(target=self._watch, name="dray-room", daemon=True).start()

    def release(self) -> None:
        """effects.Release the slots."""
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
                    self._seen(slots)
