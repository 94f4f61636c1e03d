"""The size of an elastic trial's worker group: as large as the cluster has room for, within bounds.

Ray Train has elastic groups too, but treats a resize as a failure: the trial resumes from its latest checkpoint,
however old. Here the trial saves and leaves, as from a node that will be removed, and a larger group continues it. A
group that ends, as when a node dies, is replaced by one of the size that then fits; only then is training since the
latest checkpoint lost.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group

from dray.cluster.nodes import GPU_TYPE, nodes
from dray.cluster.watch import draining_nodes
from dray.groups.capacity import slots_of
from dray.groups.group import Slots

SETTLE_S = 5.0
"""How long a start waits for resources that the nodes have: a group that has just ended frees its resources within a
second; those that others use don't become free."""
POLL_S = 0.05
TAKEN_S = 30.0
"""How long a group may wait for slots that were free when it started: after that, others must have taken them."""


class Room:
    """Slots that are reserved for a group that is to start, or to grow.

    There is a placement group for each step from one size to the next. While it is pending, an autoscaler sees the
    demand; once it is created, nobody else gets its resources; and it ends with the driver.

    Args:
        slots: what a slot is made of.
        sizes: the allowed sizes, ascending; the first is the current size, or 0.
        name: prefix of the placement groups' names.
    """

    def __init__(self, slots: Slots, sizes: Sequence[int], *, name: str) -> None:
        self._slots, self._sizes = slots, sizes
        self._steps = [
            placement_group(
                [slots.resources] * (more - less),
                name=f"{name}/{uuid.uuid4().hex[:8]}",
                bundle_label_selector=[dict(slots.labels)] * (more - less) if slots.labels else None,
            )
            for less, more in pairwise(sizes)
        ]

    def size(self) -> int:
        """The largest size with room now."""
        created = (step for step in self._steps if placement_group_table(step)["state"] == "CREATED")
        return _largest(self._sizes, self._sizes[0] + sum(step.bundle_count for step in created))

    def settled(self) -> int:
        """The same, after giving Ray time to create the placement groups."""
        deadline = time.monotonic() + SETTLE_S
        largest = _largest(self._sizes, lasting_slots(self._slots))
        while (size := self.size()) < largest and time.monotonic() < deadline:
            time.sleep(POLL_S)
        return size

    def release(self) -> None:
        """Release the slots."""
        for step in self._steps:
            remove_placement_group(step)
        self._steps = []


class Elastic:
    """The size of an elastic group, and when it grows.

    Args:
        slots: what a slot is made of.
        sizes: the allowed sizes, ascending.
        name: of the run.
    """

    def __init__(self, slots: Slots, sizes: Sequence[int], *, name: str) -> None:
        self._slots, self._sizes, self._name = slots, sizes, f"{name}-room"
        self._room: Room | None = None
        self._size = 0  # of the group
        self._waits_for_slots = False
        self._started_at = 0.0
        self._ready_at: float | None = None  # None until it can train, and once it has been asked to grow

    def start(self, labels: Mapping[str, str]) -> int:
        """The size of a group that starts now: the largest with room, or the smallest, which then waits.

        Args:
            labels: the label selector of its nodes, also when it grows.
        """
        self.close()
        self._slots = replace(self._slots, labels=labels)
        room = Room(self._slots, (0, *self._sizes), name=self._name)
        found = room.settled()
        room.release()
        self._waits_for_slots, self._size = not found, found or self._sizes[0]
        self._started_at, self._ready_at = time.monotonic(), None
        return self._size

    def arrived(self) -> None:
        """A process of the group runs."""
        if self._waits_for_slots:  # perhaps for a machine to boot, which does not count as the group's start
            self._started_at, self._waits_for_slots = time.monotonic(), False

    def ready(self) -> None:
        """All its processes can train."""
        self._ready_at = self._ready_at or time.monotonic()

    def may_grow(self) -> int:
        """The larger size to grow to now, or 0. Its room is held until the next `start`.

        Growing takes as long as a start. Whether that pays off depends on how many seconds of the trial are left, which
        is unknown. So the group grows once it has trained for as long as its start took (ski rental: at most twice the
        cost of the better of now and never; Karlin et al. 1988). Machines that join before then count as one change.
        """
        if self._ready_at is None or self._size == self._sizes[-1]:
            return 0
        if self._room is None:
            self._room = Room(self._slots, [size for size in self._sizes if size >= self._size], name=self._name)
        if time.monotonic() - self._ready_at < self._ready_at - self._started_at:
            return 0
        size = self._room.size()
        if size == self._size:
            return 0
        self._ready_at = None  # only once, unless its processes start again
        return size

    def may_shrink(self) -> bool:
        """Whether a group that still waits for its slots should make way for a smaller one: others took them."""
        return self._size > self._sizes[0] and time.monotonic() - self._started_at > TAKEN_S

    def close(self) -> None:
        """Release the slots that are held."""
        if self._room is not None:
            self._room.release()
            self._room = None


def _largest(sizes: Sequence[int], slots: int) -> int:
    """The largest size that fits into this number of slots; at least the first."""
    return max((size for size in sizes if size <= slots), default=sizes[0])


def lasting_slots(slots: Slots) -> int:
    """How many slots the nodes that the slots' labels ask for have, used or not, without nodes that will be removed."""
    draining, gpu_type = draining_nodes(), slots.labels.get(GPU_TYPE)
    lasting = [
        node.resources for node in nodes() if node.id not in draining and gpu_type in (None, node.labels.get(GPU_TYPE))
    ]
    return sum(slots_of(resources, slots.kind, slots.cpus_per_slot) for resources in lasting)
