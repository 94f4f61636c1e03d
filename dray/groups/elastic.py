"""The size of an elastic trial's worker group: as large as the cluster has room for, within bounds.

Ray Train has elastic groups too, but treats a resize as a failure: the trial resumes from its latest checkpoint,
however old. Here the trial saves and leaves, as from a node that will be removed, and a larger group continues it. A
group that ends, as when a node dies, is replaced by one of the size that then fits; only then is training since the
latest checkpoint lost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dray.cluster.view import GPU_TYPE, ClusterView
from dray.groups.capacity import slots_of
from dray.groups.effects import Release, Reserve
from dray.groups.slots import Slots

SETTLE_S = 5.0
"""How long a start waits for resources that the nodes have: a group that has just ended frees its resources within a
second; those that others use don't become free."""
TAKEN_S = 30.0
"""How long a group may wait for slots that were free when it started: after that, others must have taken them."""


class Elastic:
    """The size of an elastic group, of the ascending `sizes`, and when it grows. Pure, as `dray.groups.pool` is."""

    def __init__(self, sizes: Sequence[int], emit: Callable[[Reserve | Release], None]) -> None:
        self._sizes, self._emit = tuple(sizes), emit
        self._slots: Slots
        self._size = 0  # of the group
        self._room, self._is_reserved = 0, False  # number of the last reservation; whether it is still held
        self._room_sizes: tuple[int, ...] = ()
        self._reserved = 0
        self.settled_by = 0.0  # when a group that starts gets a size in any case
        self._waits_for_slots = False
        self._started_at = 0.0
        self._ready_at: float | None = None  # None until it can train, and once it has been asked to grow

    def start(self, slots: Slots, now: float) -> None:
        """Reserve slots for a group that is to start: `size_when_stable` says for which size. `slots`: what a slot
        is made of, also when the group grows."""
        self.close()
        self._slots, self._size, self._ready_at = slots, 0, None
        self.settled_by = now + SETTLE_S
        self._reserve((0, *self._sizes))

    def size_when_stable(self, view: ClusterView | None, now: float) -> int:
        """The size of the group that starts: the largest with room, or the smallest, which then waits. 0 while Ray
        may still reserve more slots for it. `view`: the cluster since the start; None if it was not seen yet."""
        found = self._room_size
        lasting = None if view is None else largest(self._room_sizes, lasting_slots(view, self._slots))
        if now < self.settled_by and (lasting is None or found < lasting):
            return 0
        self.close()
        self._waits_for_slots, self._size, self._started_at = not found, found or self._sizes[0], now
        return self._size

    def reserved(self, room: int, slots: int) -> None:
        """A reservation has so many slots now."""
        if self._is_reserved and room == self._room:
            self._reserved = slots

    def arrived(self, now: float) -> None:
        """A process of the group runs."""
        if self._waits_for_slots:  # perhaps for a machine to boot, which does not count as the group's start
            self._started_at, self._waits_for_slots = now, False

    def ready(self, now: float) -> None:
        """All its processes can train."""
        self._ready_at = now

    def may_grow(self, now: float) -> int:
        """The larger size to grow to now, or 0. Its room is held until the next `start`.

        Growing takes as long as a start. Whether that pays off depends on how many seconds of the trial are left, which
        is unknown. So the group grows once it has trained for as long as its start took (ski rental: at most twice the
        cost of the better of now and never; Karlin et al. 1988). Machines that join before then count as one change.
        """
        if self._ready_at is None or self._size == self._sizes[-1]:
            return 0
        if not self._is_reserved:
            self._reserve(tuple(size for size in self._sizes if size >= self._size))
        size = self._room_size
        if size == self._size or now - self._ready_at < self._ready_at - self._started_at:
            return 0
        self._ready_at = None  # only once, unless its processes start again
        return size

    def may_shrink(self, now: float) -> bool:
        """Whether a group that still waits for its slots should make way for a smaller one: others took them."""
        return self._size > self._sizes[0] and now - self._started_at > TAKEN_S

    def close(self) -> None:
        """Release the slots that are held."""
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
    """How many slots the nodes that the slots' labels ask for have, used or not, without nodes that will be removed."""
    gpu_type = slots.labels.get(GPU_TYPE)
    lasting = [
        node.resources
        for node in view.nodes
        if node.id not in view.draining and gpu_type in (None, node.labels.get(GPU_TYPE))
    ]
    return sum(slots_of(resources, slots.kind, slots.cpus_per_slot) for resources in lasting)
