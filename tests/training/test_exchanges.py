"""What fails on one rank fails on all; ranks are threads here."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from dray.core import DistributedContext
from dray.training.agreement import all_or_none, on_chief
from dray.training.errors import InvalidHP, PeerFailed, ShouldExit
from tests.core.test_distributed import nodes, on_ranks


class TooWide(InvalidHP):
    """Which the other ranks may not be able to import."""


def ends(work: Callable[[int], None]) -> list[str]:
    """What each of three ranks leaves the block with."""

    def on_rank(context: DistributedContext) -> str:
        try:
            with all_or_none(context, "starting"):
                work(context.rank)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "done"

    return on_ranks(nodes(3), on_rank)


def failing(rank: int, error: Exception) -> Callable[[int], None]:
    def work(mine: int) -> None:
        if mine == rank:
            raise error

    return work


def test_ranks_that_all_come_through_go_on() -> None:
    assert ends(lambda rank: None) == ["done"] * 3


@pytest.mark.api("8.13")
def test_a_failure_is_that_of_its_rank_and_told_to_the_others() -> None:
    other = "PeerFailed: rank 1 failed while starting: KeyError('gone')"
    assert ends(failing(1, KeyError("gone"))) == [other, "KeyError: 'gone'", other]


@pytest.mark.api("8.11", "8.12")
def test_invalid_hyperparameters_and_the_wish_to_leave_are_everybodys() -> None:
    assert ends(failing(2, TooWide("width 99"))) == ["InvalidHP: width 99"] * 2 + ["TooWide: width 99"]
    assert ends(failing(0, ShouldExit(True))) == ["ShouldExit: True"] * 3


def test_two_failures_are_each_ranks_own() -> None:
    def work(rank: int) -> None:
        if rank < 2:
            raise ValueError(f"of rank {rank}")

    told = ends(work)
    assert told[:2] == ["ValueError: of rank 0", "ValueError: of rank 1"]
    assert told[2] == "PeerFailed: rank 0 failed while starting: ValueError('of rank 0')"


def test_one_process_raises_what_it_raised() -> None:
    with pytest.raises(PeerFailed, match="mine"), all_or_none(DistributedContext(), "starting"):
        raise PeerFailed("mine")


def test_what_the_chief_does_counts_for_all() -> None:
    def told(work: Callable[[], str]) -> list[object]:
        def on_rank(context: DistributedContext) -> object:
            try:
                return on_chief(context, "saving", work, mine=context.rank)
            except Exception as error:
                return f"{type(error).__name__}: {error}"

        return on_ranks(nodes(2), on_rank)

    def fails() -> str:
        raise KeyError("gone")

    assert told(lambda: "an id") == [("an id", [0, 1])] * 2
    assert told(fails) == ["KeyError: 'gone'", "PeerFailed: rank 0 failed while saving: KeyError('gone')"]
