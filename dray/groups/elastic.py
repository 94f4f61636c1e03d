"""The size of an elastic trial's worker group: as large as the cluster has room for, within bounds.

Ray Train has elastic groups too, but treats a resize as a failure: the trial resumes from its latest checkpoint,
however old. Here the trial saves and leaves, as from a node that will be removed, and a larger group continues it. A
group that ends, for example because a node dies, is replaced with one of the size that fits then; only in this case is
training since the latest checkpoint lost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dray.cluster.view import GPU_TYPE, ClusterView
from dray.groups.capacity import slots_of
from dray.groups.effects import Release, Reserve
from dray.groups.slots import Slots

SETTLE_S = 5.0
"""How long a start waits for resources that are in use: a group that has just ended frees its resources within a
second, while other users' resources don't become free."""
TAKEN_S = 30.0
"""How long a group waits for slots that were free when it started, before it concludes that others have taken them."""


class Elastic:
    """Chooses the size of an elastic group from the ascending `sizes`, and the time to grow. Pure, like
    `dray.groups.pool`."""

    def __init__(self, sizes: Sequence[int], emit: Callable[[Reserve | Release], None]) -> None:
        self._sizes, self._emit = tuple(sizes), emit
        self._slots: Slots
        self._size = 0  # the group's size
        self._room, self._is_reserved = 0, False  # number of the last reservation; whether it is still held
        self._room_sizes: tuple[int, ...] = ()
        self._reserved = 0
        self.settled_by = 0.0  # the latest time at which a starting group gets a size
        self._waits_for_slots = False
        self._started_at = 0.0
        self._ready_at: float | None = None  # None until it can train, and after it has been asked to grow

    def start(self, slots: Slots, now: float) -> None:
        """Reserve slots for a group that is about to start; `size_when_stable` gives its size. `slots`: the resources
        of its slots."""
        self.close()
        self._slots, self._size, self._ready_at = slots, 0, None
        self.settled_by = now + SETTLE_S
        self._reserve((0, *self._sizes))

    def size_when_stable(self, view: ClusterView | None, now: float) -> int:
        """The size of a starting group: the largest with room, or the smallest, which then waits. 0 while Ray may still
        reserve more slots. `view`: the cluster since the start; None if there is no view yet."""
        found = self._room_size
        lasting = None if view is None else largest(self._room_sizes, lasting_slots(view, self._slots))
        if now < self.settled_by and (lasting is None or found < lasting):
            return 0
        self.close()
        self._waits_for_slots, self._size, self._started_at = not found, found or self._sizes[0], now
        return self._size

    def reserved(self, room: int, slots: int) -> None:
        """Note the number of slots that a reservation has got."""
        if self._is_reserved and room == self._room:
            self._reserved = slots

    def arrived(self, now: float) -> None:
        """Note that a process of the group is running."""
        if self._waits_for_slots:  # a machine may have booted, which does not count as the group's start
            self._started_at, self._waits_for_slots = now, False

    def ready(self, now: float) -> None:
        """Note that all processes of the group can train."""
        self._ready_at = now

    def may_grow(self, now: float) -> int:
        """The larger size to grow to now, or 0. Its room is held until the next `start`.

        Growing takes as long as a start. Whether it pays off depends on the remaining time of the trial, which is
        unknown. So the group grows once it has trained for as long as its start took (ski rental: at most twice the
        cost of the better of now and never; Karlin et al. 1988). Machines that join before then count as one change.
        """
        if self._ready_at is None or self._size == self._sizes[-1]:
            return 0
        if not self._is_reserved:
            self._reserve(tuple(size for size in self._sizes if size >= self._size))
        size = self._room_size
        if size == self._size or now - self._ready_at < self._ready_at - self._started_at:
            return 0
        self._ready_at = None  # only once per start of its processes
        return size

    def may_shrink(self, now: float) -> bool:
        """Whether a waiting group should make way for a smaller one, because others have taken its slots."""
        return self._size > self._sizes[0] and now - self._started_at > TAKEN_S

    def close(self) -> None:
        """Release the reserved slots."""
        if self._is_reserved:
            self._is_reserved = False
            self._emit(Release(room=self._room))

    def _reserve(self, sizes: tuple[int, ...]) -> None:
        self._room, self._is_reserved, self._room_sizes, self._reserved = self._room + 1, True, sizes, 0
        self._emit(Reserve(room=self._room, slots=self._slots, sizes=sizes))

    @property
    def _room_size(self) -> int:
        """The largest size with room now."""
        return largest(self._room_sizes, self._room_sizes[0] + self._reserved)


def largest(sizes: Sequence[int], slots: int) -> int:
    """The largest size that fits into this number of slots; at least the first."""
    return max((size for size in sizes if size <= slots), default=sizes[0])


def lasting_slots(view: ClusterView, slots: Slots) -> int:
    """The number of slots, used or not, on the nodes that match the slots' labels, without nodes that will be
    removed."""
    gpu_type = slots.labels.get(GPU_TYPE)
    lasting = [
        node.resources
        for node in view.nodes
        if node.id not in view.draining and gpu_type in (None, node.labels.get(GPU_TYPE))
    ]
    return sum(slots_of(resources, slots.kind, slots.cpus_per_slot) for resources in lasting)
