"""When an elastic group grows, without a cluster: free slots and times are given."""

from __future__ import annotations

from itertools import pairwise

import pytest

from dray.groups.effects import Release, Reserve
from dray.groups.elastic import SETTLE_S, Elastic
from tests.groups.clusters import cluster, cpus

SIZES = (1, 2, 4)


class World:
    """Free slots, which reservations take as Ray's placement groups do: each step as a whole, or it is pending."""

    def __init__(self, slots: int = 0, sizes: tuple[int, ...] = SIZES) -> None:
        self.now = 100.0
        self.nodes = self.free = slots
        self.steps: dict[int, list[tuple[int, bool]]] = {}
        """By reservation that is held: the slots of each step, and whether it has them."""
        self.elastic = Elastic(sizes, self._perform)

    def _perform(self, effect: Reserve | Release) -> None:
        if isinstance(effect, Reserve):
            assert effect.slots == cpus()
            self.steps[effect.room] = [(more - less, False) for less, more in pairwise(effect.sizes)]
        else:
            self.free += sum(slots for slots, has in self.steps.pop(effect.room) if has)

    def schedule(self) -> None:
        for room, steps in self.steps.items():
            for number, (slots, has) in enumerate(steps):
                if not has and slots <= self.free:
                    self.free -= slots
                    steps[number] = slots, True
            self.elastic.reserved(room, sum(slots for slots, has in steps if has))

    def join(self, slots: int) -> None:
        """A node with so many slots."""
        self.nodes += slots
        self.free += slots
        self.schedule()

    def size(self) -> int:
        """The size of a group that starts and has no slots yet."""
        self.elastic.start(cpus(), self.now)
        assert not self.elastic.size_when_stable(None, self.now), "the cluster was not seen yet"
        self.schedule()
        while not (size := self.elastic.size_when_stable(cluster({"CPU": float(self.nodes)}), self.now)):
            self.now += 0.05
        assert not self.steps, "all of it is for the group"
        return size

    def start(self, *, takes_s: float = 10.0) -> int:
        """A group, up after so long; 0 if there are no resources for it."""
        if (size := self.size()) > self.free:
            return 0
        self.free -= size
        self.elastic.arrived(self.now)
        self.now += takes_s
        self.elastic.ready(self.now)
        return size

    def grows_to(self) -> int:
        return self.elastic.may_grow(self.now)


@pytest.mark.parametrize(("slots", "size"), [(1, 1), (2, 2), (3, 2), (4, 4), (9, 4)])
def test_a_group_starts_with_the_largest_size_that_fits(slots: int, size: int) -> None:
    world = World(slots)
    assert world.size() == size
    assert (world.free, world.now) == (slots, 100.0), "at once"


def test_slots_that_others_use_are_not_waited_for_long() -> None:
    world = World(4)
    world.free = 3
    assert world.size() == 2
    assert 100 + SETTLE_S <= world.now < 100 + 2 * SETTLE_S


def test_slots_of_nodes_that_will_be_removed_are_not_waited_for() -> None:
    elastic = Elastic(SIZES, lambda effect: None)
    elastic.start(cpus(), 0.0)
    elastic.reserved(1, 1)
    assert elastic.size_when_stable(cluster({"CPU": 4.0}), 0.0) == 0
    assert elastic.size_when_stable(cluster({"CPU": 4.0}, draining=frozenset({"id"})), 0.0) == 1


def test_without_room_the_smallest_size_waits() -> None:
    world = World(sizes=(2, 4))
    assert world.size() == 2
    assert not world.grows_to(), "nothing is asked for a group that is yet to come"
    assert not world.steps


def test_a_group_grows_after_it_has_trained_as_long_as_it_started() -> None:
    world = World(1)
    assert world.start(takes_s=10) == 1
    assert not world.grows_to()
    [asked] = world.steps.values()
    assert asked == [(1, False), (2, False)], "what an autoscaler sees: from 1 to 2, and from 2 to 4"
    world.join(1)
    assert world.free == 0, "held, so that nobody else takes it meanwhile"
    world.now += 9.9
    assert not world.grows_to()
    world.now += 0.2
    assert world.grows_to() == 2
    assert not world.grows_to(), "told once"
    world.free += 1  # the group has ended
    assert world.start() == 2
    assert not world.grows_to()
    world.join(1)
    world.now += 11
    assert not world.grows_to(), "three are of no use"
    world.join(1)
    assert world.grows_to() == 4
    world.free += 2
    assert world.start() == 4
    world.now += 11
    assert not world.grows_to()
    assert not world.steps, "there is no larger size"


def test_the_boot_of_a_machine_does_not_count_as_the_groups_start() -> None:
    world = World()
    assert world.size() == 1
    world.now += 600
    world.join(2)
    world.elastic.arrived(world.now)
    world.now += 5
    world.elastic.ready(world.now)
    world.free -= 1
    assert not world.grows_to()
    world.schedule()
    world.now += 5.1
    assert world.grows_to() == 2
