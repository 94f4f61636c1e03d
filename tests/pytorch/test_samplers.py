"""The samplers for loaders of one's own."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from dray.pytorch import samplers

BATCHES = [[0, 1], [2, 3], [4, 5], [6]]


def first(sampler: Any, count: int) -> list[Any]:
    return list(itertools.islice(sampler, count))


@pytest.mark.api("4.8")
def test_repeating_goes_on_for_ever_and_is_as_long_as_the_underlying() -> None:
    assert first(samplers.RepeatSampler([1, 2]), 5) == [1, 2, 1, 2, 1]
    assert first(samplers.RepeatBatchSampler(BATCHES), 6) == [*BATCHES, [0, 1], [2, 3]]
    assert len(samplers.RepeatSampler([1, 2])) == 2
    assert len(samplers.RepeatBatchSampler(BATCHES)) == 4


def test_repeating_nothing_ends() -> None:
    assert list(samplers.RepeatSampler([])) == []


@pytest.mark.api("4.8", "4.12")
def test_repeating_iterates_anew_so_that_a_shuffle_reshuffles() -> None:
    repeated = samplers.RepeatSampler(samplers.ReproducibleShuffleSampler(range(20), seed=1))
    both = first(repeated, 40)
    assert both[:20] != both[20:]


@pytest.mark.api("4.9", "4.10")
def test_shards_take_turns_and_are_exactly_long() -> None:
    for sampler in (samplers.DistributedSampler, samplers.DistributedBatchSampler):
        shards = [sampler(BATCHES, 3, rank) for rank in range(3)]
        assert [list(shard) for shard in shards] == [[[0, 1], [6]], [[2, 3]], [[4, 5]]]
        assert [len(shard) for shard in shards] == [2, 1, 1]


@pytest.mark.api("4.11")
def test_a_skip_is_done_once_and_does_not_shorten() -> None:
    for sampler, repeat in (
        (samplers.SkipSampler, samplers.RepeatSampler),
        (samplers.SkipBatchSampler, samplers.RepeatBatchSampler),
    ):
        skipped = sampler(repeat(BATCHES), 3)
        assert first(skipped, 3) == [[6], [0, 1], [2, 3]]
        assert len(skipped) == 4
        assert list(sampler(BATCHES, 9)) == []


@pytest.mark.api("4.12")
def test_a_reproducible_shuffle_depends_on_its_seed_alone() -> None:
    one, two = (samplers.ReproducibleShuffleSampler(range(10), seed=3) for _ in range(2))
    first_epoch, second_epoch = list(one), list(one)
    np.random.seed(0)
    assert [list(two), list(two)] == [first_epoch, second_epoch]
    assert sorted(first_epoch) == list(range(10))
    assert first_epoch != second_epoch
    expected = list(range(10))
    np.random.RandomState(3).shuffle(expected)
    assert first_epoch == expected


@pytest.mark.api("4.12")
def test_a_batch_shuffle_keeps_batches_together() -> None:
    shuffled = samplers.ReproducibleShuffleBatchSampler([[0, 1], [2, 3], [4, 5]], seed=3)
    assert sorted(shuffled) == [[0, 1], [2, 3], [4, 5]]
    assert len(shuffled) == 3
    assert all(isinstance(batch, list) for batch in shuffled)
