"""What a server's lender says about experiments that wait for slots."""

from __future__ import annotations

from dray.desk.messages import Demand
from dray.desk.shares import Claim
from dray.serve.lender import has_no_room


def demand(name: str, *, has: int = 0, priority: int = 42, size: float = 1, kind: str = "cpu") -> Demand:
    """Of an experiment that could use one group more than it has."""
    claim = Claim(name=name, groups=has + 1, size=size, priority=priority)
    return Demand(claim=claim, shape="shape", kind=kind, unit=1, has=has)


def test_others_have_the_slots_of_an_experiment_only_if_its_group_does_not_fit_beside_theirs() -> None:
    mine, large = demand("mine"), demand("large", size=2)
    assert has_no_room(mine, [mine, demand("other", has=2)], 2)
    assert not has_no_room(mine, [mine, demand("other", has=1)], 2)  # its worker has died
    assert not has_no_room(mine, [mine, demand("other"), demand("third")], 2)  # the desk has died
    assert has_no_room(large, [large, demand("other", has=1)], 2)
    assert not has_no_room(mine, [mine, demand("other", has=2, kind="gpu")], 2)


def test_slots_that_a_higher_priority_waits_for_are_taken() -> None:
    mine = demand("mine")
    assert has_no_room(mine, [mine, demand("urgent", has=1, priority=1)], 2)
    assert not has_no_room(mine, [mine, demand("later", has=1, priority=99)], 2)
