"""All ranks leave training together, for the strongest of their reasons; ranks are threads here."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch.distributed as dist

from dray.core import DistributedContext
from dray.training.errors import DataExhausted, InvalidHP, ShouldExit
from dray.training.leaving import Leaving
from tests.core.test_distributed import nodes, on_ranks


def raises(error: Exception) -> Callable[[], int]:
    def work() -> int:
        raise error

    return work


def ends(*works: Callable[[], int]) -> list[str]:
    """What each rank does after all have done their work."""

    def on_rank(context: DistributedContext) -> str:
        leaving = Leaving(context)
        try:
            values, leave = leaving.attempt_together(works[context.rank])
            if leave is None:
                return f"goes on with {values}"
            leaving.raise_error()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "saves" if leave.save else "does not save"

    return on_ranks(nodes(len(works)), on_rank)


def test_without_a_reason_all_go_on_with_the_results_of_all() -> None:
    assert ends(lambda: 3, lambda: 4, lambda: 5) == ["goes on with [3, 4, 5]"] * 3


@pytest.mark.parametrize(("skip", "then"), [(False, "saves"), (True, "does not save")])
def test_the_wish_of_one_rank_is_everybodys(skip: bool, then: str) -> None:
    assert ends(lambda: 3, raises(ShouldExit(skip)), lambda: 5) == [then] * 3


def test_what_ends_training_is_raised_on_all_ranks() -> None:
    assert ends(lambda: 3, raises(InvalidHP("width 99"))) == ["InvalidHP: width 99"] * 2
    assert ends(raises(DataExhausted("after 4")), lambda: 4) == ["DataExhausted: after 4"] * 2


def test_the_strongest_reason_counts() -> None:
    assert ends(raises(ShouldExit()), raises(InvalidHP("width 99"))) == ["InvalidHP: width 99"] * 2
    assert ends(raises(DataExhausted("after 4")), raises(ShouldExit())) == ["DataExhausted: after 4"] * 2
    assert ends(raises(InvalidHP("width 99")), raises(KeyError("gone")), lambda: 5) == [
        "InvalidHP: width 99",
        "KeyError: 'gone'",
        "PeerFailed: training failed on rank 1: KeyError('gone')",
    ]


def test_a_connection_that_another_rank_has_cut_is_no_reason_of_its_own() -> None:
    cut = dist.DistError("connection closed")
    assert ends(raises(cut), raises(ShouldExit())) == ["saves"] * 2
    assert ends(raises(cut), raises(InvalidHP("width 99"))) == ["InvalidHP: width 99"] * 2
    assert ends(raises(cut), lambda: 4)[1] == "PeerFailed: training failed on rank 0: DistError('connection closed')"
