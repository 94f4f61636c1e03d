"""Shares of slots: priorities, weights, limits, and turns of groups that don't fit side by side."""

from __future__ import annotations

import pytest

from dray.desk.shares import QUANTUM, Demand, Shares


def demand(name: str, groups: int = 100, **fields: float) -> Demand:
    return Demand(name=name, groups=groups, **fields)  # type: ignore[arg-type]


def test_equal_weights_have_equal_shares_and_the_first_the_rest() -> None:
    assert Shares().divide([demand("a"), demand("b"), demand("c")], slots=8) == {"a": 3, "b": 3, "c": 2}


def test_shares_are_by_weight() -> None:
    demands = [demand("a"), demand("b"), demand("c", weight=2)]
    assert Shares().divide(demands, slots=8) == {"a": 2, "b": 2, "c": 4}


def test_shares_count_slots_not_groups() -> None:
    assert Shares().divide([demand("large", size=4), demand("small")], slots=8) == {"large": 1, "small": 4}


def test_what_one_does_not_need_goes_to_the_others() -> None:
    assert Shares().divide([demand("a", 1), demand("b"), demand("c", 0)], slots=6) == {"a": 1, "b": 5, "c": 0}


def test_a_higher_priority_has_all_that_it_needs_first() -> None:
    demands = [demand("default"), demand("urgent", 3, priority=1), demand("later", priority=99)]
    assert Shares().divide(demands, slots=5) == {"default": 2, "urgent": 3, "later": 0}


@pytest.mark.parametrize(("size", "expected"), [(1, 5), (2, 2), (0.25, 20)])
def test_nobody_has_more_slots_than_its_limit(size: float, expected: int) -> None:
    assert Shares().divide([demand("a", size=size, max_slots=5)], slots=64) == {"a": expected}


def test_the_experiments_of_an_account_share_its_limit_in_slots() -> None:
    mine = [Demand(name=name, groups=9, size=2, unit=2, account="agent", account_slots=3) for name in "ab"]
    assert Shares().divide([*mine, demand("other", 3)], slots=20) == {"a": 2, "b": 1, "other": 3}


def test_a_group_that_fits_nowhere_gets_nothing_and_holds_nothing_up() -> None:
    assert Shares().divide([demand("huge", size=16), demand("a")], slots=8) == {"huge": 0, "a": 8}


def test_trials_that_share_a_slot_are_a_fraction_of_it() -> None:
    assert Shares().divide([demand("quarters", size=0.25), demand("whole")], slots=2) == {"quarters": 4, "whole": 1}


def turns(demands: list[Demand], slots: int, seconds: int) -> dict[str, float]:
    """The slot-seconds that each has in so many seconds."""
    shares, had = Shares(), dict.fromkeys((each.name for each in demands), 0.0)
    for _ in range(seconds):
        given = shares.divide(demands, slots)
        held = {each.name: given[each.name] * each.size for each in demands}
        shares.passed(1.0, held, {each.name: each.weight for each in demands})
        for name, now in held.items():
            had[name] += now
    return had


def test_a_large_group_is_not_starved_by_small_ones_nor_they_by_it() -> None:
    had = turns([demand("small"), demand("large", size=4)], slots=4, seconds=4000)
    assert had["small"] == pytest.approx(8000, abs=4 * QUANTUM)
    assert had["large"] == pytest.approx(8000, abs=4 * QUANTUM)


def test_turns_are_by_weight() -> None:
    had = turns([demand("small", weight=3), demand("large", size=4)], slots=4, seconds=4000)
    assert had["small"] / had["large"] == pytest.approx(3, rel=0.1)


def test_the_slot_that_is_left_over_goes_round() -> None:
    had = turns([demand("a"), demand("b"), demand("c")], slots=4, seconds=3000)
    assert all(each == pytest.approx(4000, abs=2 * QUANTUM) for each in had.values())


def test_whoever_comes_later_has_not_saved_up_for_what_it_did_not_ask() -> None:
    shares, a, large = Shares(), demand("a"), demand("large", size=4)
    for _ in range(100):
        shares.divide([a], slots=4)
        shares.passed(60.0, {"a": 4}, {"a": 1.0})
    had = {"a": 0.0, "large": 0.0}
    for _ in range(1000):
        given = shares.divide([a, large], slots=4)
        held = {"a": given["a"] * 1.0, "large": given["large"] * 4.0}
        shares.passed(1.0, held, {"a": 1.0, "large": 1.0})
        had = {name: had[name] + held[name] for name in had}
    assert had["large"] == pytest.approx(2000, abs=4 * QUANTUM)
