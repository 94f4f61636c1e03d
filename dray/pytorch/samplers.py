"""Samplers for reproducible, resumable, sharded data: shuffle, then repeat, then shard, then skip.

`pytorch.DataLoader` does all of this itself. These samplers are for your own loaders.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch.utils.data

_Sampler = torch.utils.data.Sampler[Any]

__all__ = [
    "DistributedBatchSampler",
    "DistributedSampler",
    "RepeatBatchSampler",
    "RepeatSampler",
    "ReproducibleShuffleBatchSampler",
    "ReproducibleShuffleSampler",
    "SkipBatchSampler",
    "SkipSampler",
]


class _Sampled:
    """Takes its items (records or batches) and its length from another sampler."""

    def __init__(self, sampler: Any) -> None:
        self._items = sampler

    def __len__(self) -> int:
        return len(self._items)


class _Repeated(_Sampled):
    def __iter__(self) -> Iterator[Any]:
        while True:
            empty = True
            for item in self._items:
                empty = False
                yield item
            if empty:
                # Repeating an empty sampler would never end.
                return


class RepeatSampler(_Repeated, _Sampler):
    """The records of another sampler, repeated endlessly, and reshuffled each time if that sampler shuffles.

    Has the length of the other sampler, which must have one.

    Args:
        sampler: yields records.

    >>> list(itertools.islice(RepeatSampler(range(2)), 5))
    [0, 1, 0, 1, 0]
    """


class RepeatBatchSampler(_Repeated, torch.utils.data.BatchSampler):
    """The batches of another batch sampler, repeated endlessly, each time with a partial last batch if there is one.

    Has the length of the other batch sampler, which must have one.

    Args:
        batch_sampler: yields batches.
    """

    def __init__(self, batch_sampler: Any) -> None:
        super().__init__(batch_sampler)
        self.batch_sampler = batch_sampler


class _EveryNth(_Sampled):
    def __init__(self, sampler: Any, num_workers: int, rank: int) -> None:
        if num_workers < 1:
            raise ValueError(f"num_workers must be >= 1, got {num_workers}")
        if not 0 <= rank < num_workers:
            raise ValueError(f"rank must be >= 0 and < num_workers={num_workers}, got {rank}")
        super().__init__(sampler)
        self.num_replicas, self._rank = num_workers, rank

    def __len__(self) -> int:
        whole, rest = divmod(len(self._items), self.num_replicas)
        return whole + (self._rank < rest)

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(iter(self._items), self._rank, None, self.num_replicas)


class DistributedSampler(_EveryNth, _Sampler):
    """This rank's share of another sampler's records: every num_workers-th.

    The length is exact for each rank, so lengths may differ by one between ranks. Shard after repeating.

    Args:
        sampler: yields records, in the same order on all ranks.
        num_workers: the number of the trial's processes: `context.distributed.size`.
        rank: the rank of this process, from 0.

    Raises:
        ValueError: num_workers < 1, rank < 0, or rank >= num_workers.
    """


class DistributedBatchSampler(_EveryNth, torch.utils.data.BatchSampler):
    """This rank's share of another batch sampler's batches: every num_workers-th.

    The length is exact for each rank, so lengths may differ by one between ranks. Shard after repeating.

    Args:
        batch_sampler: yields batches, in the same order on all ranks.
        num_workers, rank: as in `DistributedSampler`.

    Raises:
        ValueError: num_workers < 1, rank < 0, or rank >= num_workers.
    """

    def __init__(self, batch_sampler: Any, num_workers: int, rank: int) -> None:
        super().__init__(batch_sampler, num_workers, rank)
        self.batch_sampler = batch_sampler


class _Skipping(_Sampled):
    def __init__(self, sampler: Any, skip: int) -> None:
        super().__init__(sampler)
        self.skip = skip

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(iter(self._items), self.skip, None)


class SkipSampler(_Skipping, _Sampler):
    """Another sampler without its first `skip` records. Skip after repeating, so that the skip happens only once.

    Has the length of the other sampler. Prefer `SkipBatchSampler`: training counts batches, not records.

    Args:
        sampler: yields records.
        skip: the number of records to skip.
    """


class SkipBatchSampler(_Skipping, torch.utils.data.BatchSampler):
    """Another batch sampler without its first `skip` batches. Skip after repeating, so that the skip happens only once.

    Has the length of the other batch sampler.

    Args:
        batch_sampler: yields batches.
        skip: the number of batches to skip: `context.get_initial_batch()`.
    """

    def __init__(self, batch_sampler: Any, skip: int) -> None:
        super().__init__(batch_sampler, skip)
        self.batch_sampler = batch_sampler


class _Reshuffled(_Sampled):
    def __init__(self, sampler: Any, seed: int) -> None:
        super().__init__(sampler)
        self._random = np.random.RandomState(seed)

    def __iter__(self) -> Iterator[Any]:
        # Positions are shuffled, because NumPy would turn batches of equal length into the rows of one array.
        items = list(self._items)
        order = list(range(len(items)))
        self._random.shuffle(order)
        return iter([items[i] for i in order])


class ReproducibleShuffleSampler(_Reshuffled, _Sampler):
    """Another sampler's records, reshuffled at each iteration in an order that depends only on `seed`.

    Shuffle before repeating (an endless sampler can't be shuffled) and before skipping.

    Args:
        sampler: yields records; finite.
        seed: the same on all ranks: `context.get_trial_seed()`.
    """


class ReproducibleShuffleBatchSampler(_Reshuffled, torch.utils.data.BatchSampler):
    """Another batch sampler's batches, reshuffled at each iteration in an order that depends only on `seed`.

    The same records always share a batch, so prefer `ReproducibleShuffleSampler`.

    Args:
        batch_sampler: yields batches; finite.
        seed: the same on all ranks: `context.get_trial_seed()`.
    """

    def __init__(self, batch_sampler: Any, seed: int) -> None:
        super().__init__(batch_sampler, seed)
        self.batch_sampler = batch_sampler


def samplers_in(*samplers: Any) -> list[Any]:
    """The samplers, and all samplers inside of them."""
    found = list(samplers)
    for sampler in found:  # grows during the loop
        for name, inner in getattr(sampler, "__dict__", {}).items():
            is_sampler = isinstance(inner, torch.utils.data.Sampler) or name.endswith("sampler")
            if is_sampler and not any(inner is known for known in found):
                found.append(inner)
    return found


def adapt_batch_sampler(
    batch_sampler: torch.utils.data.BatchSampler,
    repeat: bool = False,
    skip: int = 0,
    num_replicas: int = 1,
    rank: int = 0,
) -> torch.utils.data.BatchSampler:
    """Return one process's share of the batches, from the position where it resumes.

    Args:
        batch_sampler: yields all batches, in the same order in all processes.
        repeat: repeat them endlessly.
        skip: number of this process's batches to leave out at the beginning.
        num_replicas: number of processes.
        rank: the rank of this process, from 0.

    >>> every = torch.utils.data.BatchSampler(range(8), batch_size=2, drop_last=False)
    >>> list(adapt_batch_sampler(every, skip=1, num_replicas=2, rank=1))
    [[6, 7]]
    """
    if repeat:
        batch_sampler = RepeatBatchSampler(batch_sampler)
    if num_replicas > 1:
        batch_sampler = DistributedBatchSampler(batch_sampler, num_replicas, rank)
    return SkipBatchSampler(batch_sampler, skip) if skip > 0 else batch_sampler
