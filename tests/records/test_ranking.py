"""Which trials can be the best: those that were trained far enough."""

from __future__ import annotations

import pytest

from dray.records.ranking import deciding_rung


@pytest.mark.parametrize(
    ("reached", "rung"),
    [
        ([], 0),
        ([1, 3], 0),  # too few to decide
        ([1, 1, 3], 1),
        ([0, 1, 2, 3], 1),
        ([3, 2, 2, 1, 1, 1], 2),
        ([1, 2, 3, 3, 3], 3),
        ([0, 0, 0, 0, 3, 3], 0),  # two have gone further
    ],
)
def test_the_highest_rung_of_three_trials_decides(reached: list[int], rung: int) -> None:
    assert deciding_rung(reached) == rung
