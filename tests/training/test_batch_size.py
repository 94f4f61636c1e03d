"""The search for a batch size, on a machine with memory for a known number of records."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from dray.experiment.probe import BatchSize, search_batch_size

Rate = Callable[[int], float]


class Machine:
    """Memory for `limit` records per slot, and so much training data; `rate`: the throughput of a size."""

    def __init__(self, limit: int, *, data: float = math.inf, rate: Rate = float) -> None:
        self.limit, self.data, self.rate = limit, data, rate
        self.tried: list[int] = []

    def measure(self, size: int) -> BatchSize:
        assert size not in self.tried
        self.tried.append(size)
        return BatchSize(
            per_slot=size,
            global_batch_size=2 * size,
            aggregation_frequency=1,
            records_per_second=self.rate(size) if size <= self.limit else None,
            has_all_data=size >= self.data,
        )


@pytest.mark.parametrize("first", [1, 7, 24, 64, 1000])
def test_the_largest_size_that_fits_is_found_to_within_an_eighth_in_a_few_steps(first: int) -> None:
    for limit in range(1, 1500):
        machine = Machine(limit)
        found = search_batch_size(first, first, machine.measure)
        # The config's size, doubled or halved until it is the largest such that fits, and its eighths.
        doublings = math.floor(math.log2(limit / first))
        base = first << doublings if doublings >= 0 else next(first >> n for n in range(11) if first >> n <= limit)
        unit = max(1, 2 ** math.floor(math.log2(base)) // 8)
        assert found.largest.per_slot == max(base, limit // unit * unit)
        assert found.largest.per_slot > limit * 7 / 8 - 1
        assert [each.per_slot for each in found.sizes] == sorted(machine.tried)
        assert len(machine.tried) <= abs(doublings) + 7
        assert max(machine.tried) <= max(first, 2 * limit)


def test_nothing_larger_is_tried_than_all_data() -> None:
    machine = Machine(10**9, data=1437)
    found = search_batch_size(64, 64, machine.measure)
    assert machine.tried == [64, 128, 256, 512, 1024, 2048]
    assert found.largest.per_slot == 2048


@pytest.mark.parametrize(
    ("first", "step", "limit", "rate", "suggested"),
    [
        (8, 64, 1000, float, 64),  # all in one batch, and no more than the config's
        (64, 64, 20, float, 16),  # aggregation in place of memory
        (24, 24, 20, float, 12),  # 24, 12, 16, 20: only 12 divides 24
        (10, 100, 60, float, 50),  # 10, 20, 40, 80, 60 do not include 50, the largest divisor that fits
        (8, 64, 1000, lambda size: -abs(size - 16) + 100.0, 16),  # the fastest, not the largest
        (7, 7, 6, float, 1),
    ],
)
def test_the_suggestion_is_the_fastest_size_that_divides_a_step(
    first: int, step: int, limit: int, rate: Rate, suggested: int
) -> None:
    found = search_batch_size(first, step, Machine(limit, rate=rate).measure)
    assert found.suggestion.per_slot == suggested
    assert found.suggestion in found.sizes
