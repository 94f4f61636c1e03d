"""Which trials can be the best: those that were trained far enough."""

from __future__ import annotations

import math

import pytest

from dray.records.ranking import trained_far_enough


@pytest.mark.parametrize(
    ("lengths", "enough"),
    [
        ([], []),
        ([1, 9], [0, 1]),  # too few for a rung
        ([1, 1, 9], [0, 1, 2]),  # the rung of all
        ([0.5, 1, 3, 9], [1, 2, 3]),  # three have reached 1
        ([1, 3, 3, 9], [1, 2, 3]),  # three have reached 3
        ([9, 9.5, 9, 3, 8.9], [0, 1, 2]),  # past the last rung is no further
        ([math.inf, 9, 2, math.inf], [0, 1, 3]),  # completed before the last rung
        ([0.1, 0.2, 0.3], [0, 1, 2]),  # none has reached a rung
    ],
)
def test_trials_at_the_highest_rung_of_three_are_enough(lengths: list[float], enough: list[int]) -> None:
    found = trained_far_enough(dict(enumerate(lengths)), rungs=(1, 3, 9))
    assert sorted(found) == enough


def test_without_rungs_every_trial_counts() -> None:
    assert trained_far_enough({0: 1, 1: 2, 2: 3, 3: 4}, rungs=()) == {0, 1, 2, 3}
