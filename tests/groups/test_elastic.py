"""When an elastic group grows, without a cluster: free slots and times are given."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from dray.groups import elastic as elastic_module
from dray.groups.elastic import Elastic
from dray.groups.group import Slots

SIZES = (1, 2, 4)
SLOTS = Slots(per_trial=1, gpu=False, cpus_per_slot=1, runtime_env={})


class World:
    """Free slots, which placement groups take as Ray's do: each as a whole, or it is pending."""

    def __init__(self) -> None:
        self.now = 100.0
        self.nodes = self.free = 0
        self.pending: list[tuple[str, int]] = []
        self.created: dict[str, int] = {}

    def placement_group(self, bundles: Sequence[dict[str, float]], *, name: str, bundle_label_selector: Any) -> Any:
        assert bundle_label_selector is None
        assert all(bundle == SLOTS.resources for bundle in bundles)
        self.pending.append((name, len(bundles)))
        self.schedule()
        return SimpleNamespace(id=name, bundle_count=len(bundles))

    def remove(self, group: Any) -> None:
        self.pending = [each for each in self.pending if each[0] != group.id]
        self.free += self.created.pop(group.id, 0)
        self.schedule()

    def table(self, group: Any) -> dict[str, str]:
        return {"state": "CREATED" if group.id in self.created else "PENDING"}

    def schedule(self) -> None:
        for name, slots in list(self.pending):
            if slots <= self.free:
                self.pending.remove((name, slots))
                self.free -= slots
                self.created[name] = slots

    def join(self, slots: int) -> None:
        """A node with so many slots."""
        self.nodes += slots
        self.free += slots
        self.schedule()

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def start(self, elastic: Elastic, *, takes_s: float = 10.0) -> int:
        """A group, up after so long; 0 if there are no resources for it."""
        size = elastic.start({})
        assert not self.pending, "a start leaves nothing behind"
        if size > self.free:
            return 0
        self.free -= size
        elastic.arrived()
        self.now += takes_s
        elastic.ready()
        return size


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    world = World()
    monkeypatch.setattr(elastic_module, "placement_group", world.placement_group)
    monkeypatch.setattr(elastic_module, "placement_group_table", world.table)
    monkeypatch.setattr(elastic_module, "remove_placement_group", world.remove)
    monkeypatch.setattr(elastic_module, "lasting_slots", lambda slots: world.nodes)
    monkeypatch.setattr(elastic_module, "time", SimpleNamespace(monotonic=lambda: world.now, sleep=world.sleep))
    return world


@pytest.mark.parametrize(("slots", "size"), [(1, 1), (2, 2), (3, 2), (4, 4), (9, 4)])
def test_a_group_starts_with_the_largest_size_that_fits(world: World, slots: int, size: int) -> None:
    world.join(slots)
    assert Elastic(SLOTS, SIZES, name="run").start({}) == size
    assert (world.free, world.pending, world.created) == (slots, [], {}), "all of it is for the group"


def test_slots_that_others_use_are_not_waited_for_long(world: World) -> None:
    world.join(4)
    world.free = 3
    assert Elastic(SLOTS, SIZES, name="run").start({}) == 2
    assert world.now < 100 + 2 * elastic_module.SETTLE_S


def test_without_room_the_smallest_size_waits(world: World) -> None:
    elastic = Elastic(SLOTS, (2, 4), name="run")
    assert elastic.start({}) == 2
    assert not elastic.may_grow(), "nothing is asked for a group that is yet to come"
    assert not world.pending


def test_a_group_grows_once_room_is_held_and_it_has_trained_as_long_as_its_start_took(world: World) -> None:
    world.join(1)
    elastic = Elastic(SLOTS, SIZES, name="run")
    assert world.start(elastic, takes_s=10) == 1
    assert not elastic.may_grow()
    assert [slots for _, slots in world.pending] == [1, 2], "what an autoscaler sees: from 1 to 2, and from 2 to 4"
    world.join(1)
    assert world.free == 0, "held, so that nobody else takes it meanwhile"
    world.now += 9.9
    assert not elastic.may_grow()
    world.now += 0.2
    assert elastic.may_grow() == 2
    assert not elastic.may_grow(), "told once"
    world.free += 1  # the group has ended
    assert world.start(elastic) == 2
    world.join(1)
    world.now += 11
    assert not elastic.may_grow(), "three are of no use"
    world.join(1)
    assert elastic.may_grow() == 4
    world.free += 2
    assert world.start(elastic) == 4
    world.now += 11
    assert not elastic.may_grow()
    assert not world.pending, "there is no larger size"


def test_the_boot_of_a_machine_does_not_count_as_the_groups_start(world: World) -> None:
    elastic = Elastic(SLOTS, SIZES, name="run")
    assert elastic.start({}) == 1
    world.now += 600
    world.join(2)
    elastic.arrived()
    world.now += 5
    elastic.ready()
    world.free -= 1
    assert not elastic.may_grow()
    world.now += 5.1
    assert elastic.may_grow() == 2


def test_a_group_that_waits_for_slots_that_others_took_makes_way_for_a_smaller_one(world: World) -> None:
    world.join(2)
    elastic = Elastic(SLOTS, SIZES, name="run")
    assert elastic.start({}) == 2
    world.free = 1
    world.now += elastic_module.TAKEN_S - 1
    assert not elastic.may_shrink()
    world.now += 2
    assert elastic.may_shrink()
    assert elastic.start({}) == 1
    world.now += elastic_module.TAKEN_S + 1
    assert not elastic.may_shrink(), "there is no smaller size"


def test_no_slots_are_held_after_the_end(world: World) -> None:
    world.join(1)
    elastic = Elastic(SLOTS, SIZES, name="run")
    world.start(elastic)
    world.join(1)
    elastic.may_grow()
    assert world.created
    elastic.close()
    assert (world.pending, world.created) == ([], {})
