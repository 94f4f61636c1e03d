"""Samplers for reproducible, resumable, sharded data: shuffle, then repeat, then shard, then skip.

`pytorch.DataLoader` does all of this itself; these are for loaders of your own.
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


class RepeatSampler(_Sampler):
    """The records of another sampler, repeated endlessly; reshuffled each time if that sampler shuffles.

    Its length is that of the other sampler.

    Args:
        sampler: of records; has a length.

    >>> list(itertools.islice(RepeatSampler(range(2)), 5))
    [0, 1, 0, 1, 0]
    """

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[Any]:
        while True:
            empty = True
            for item in self._sampler:
                empty = False
                yield item
            if empty:
                # There is nothing to repeat: the loop would never end.
                return


class RepeatBatchSampler(torch.utils.data.BatchSampler):
    """The batches of another batch sampler, repeated endlessly; a partial last batch comes each time.

    Its length is that of the other batch sampler.

    Args:
        batch_sampler: of batches; has a length.
    """

    def __init__(self, batch_sampler: Any) -> None:
        self.batch_sampler = batch_sampler

    def __len__(self) -> int:
        return len(self.batch_sampler)

    def __iter__(self) -> Iterator[list[int]]:
        return iter(RepeatSampler(self.batch_sampler))


class _EveryNth:
    """Every num_workers-th item, from the rank-th on."""

    def __init__(self, items: Any, num_workers: int, rank: int) -> None:
        if num_workers < 1:
            raise ValueError(f"num_workers must be >= 1, got {num_workers}")
        if not 0 <= rank < num_workers:
            raise ValueError(f"rank must be >= 0 and < num_workers={num_workers}, got {rank}")
        self.items, self.num_workers, self.rank = items, num_workers, rank

    def __len__(self) -> int:
        whole, rest = divmod(len(self.items), self.num_workers)
        return whole + (self.rank < rest)

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(iter(self.items), self.rank, None, self.num_workers)


class DistributedSampler(_Sampler):
    """This rank's records of another sampler: every num_workers-th.

    Its length is exact for each rank, so it may differ by one between ranks; shard after repeating.

    Args:
        sampler: of records, in the same order on all ranks.
        num_workers: number of processes of the trial: `context.distributed.size`.
        rank: of this process, from 0.

    Raises:
        ValueError: num_workers < 1, rank < 0, or rank >= num_workers.
    """

    def __init__(self, sampler: Any, num_workers: int, rank: int) -> None:
        self.num_replicas = num_workers
        self._shard = _EveryNth(sampler, num_workers, rank)

    def __len__(self) -> int:
        return len(self._shard)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._shard)


class DistributedBatchSampler(torch.utils.data.BatchSampler):
    """This rank's batches of another batch sampler: every num_workers-th.

    Its length is exact for each rank, so it may differ by one between ranks; shard after repeating.

    Args:
        batch_sampler: of batches, in the same order on all ranks.
        num_workers: number of processes of the trial: `context.distributed.size`.
        rank: of this process, from 0.

    Raises:
        ValueError: num_workers < 1, rank < 0, or rank >= num_workers.
    """

    def __init__(self, batch_sampler: Any, num_workers: int, rank: int) -> None:
        self.batch_sampler = batch_sampler
        self.num_replicas = num_workers
        self._shard = _EveryNth(batch_sampler, num_workers, rank)

    def __len__(self) -> int:
        return len(self._shard)

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self._shard)


class SkipSampler(_Sampler):
    """Another sampler without its first `skip` records. Skip after repeating, so that the skip happens only once.

    Its length is that of the other sampler. Prefer `SkipBatchSampler`: training counts batches, not records.

    Args:
        sampler: of records.
        skip: number of records.
    """

    def __init__(self, sampler: Any, skip: int) -> None:
        self._sampler = sampler
        self._skip = skip

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(iter(self._sampler), self._skip, None)


class SkipBatchSampler(torch.utils.data.BatchSampler):
    """Another batch sampler without its first `skip` batches. Skip after repeating, so that the skip happens only once.

    Its length is that of the other batch sampler.

    Args:
        batch_sampler: of batches.
        skip: number of batches: `context.get_initial_batch()`.
    """

    def __init__(self, batch_sampler: Any, skip: int) -> None:
        self.batch_sampler = batch_sampler
        self.skip = skip

    def __len__(self) -> int:
        return len(self.batch_sampler)

    def __iter__(self) -> Iterator[list[int]]:
        return itertools.islice(iter(self.batch_sampler), self.skip, None)


class ReproducibleShuffleSampler(_Sampler):
    """Another sampler's records, reshuffled at each iteration, in an order that depends only on `seed`.

    Shuffle first, before repeating (an endless sampler can't be shuffled) and before skipping.

    Args:
        sampler: of records; finite.
        seed: the same on all ranks: `context.get_trial_seed()`.
    """

    def __init__(self, sampler: Any, seed: int) -> None:
        self._sampler = sampler
        self._random = np.random.RandomState(seed)

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[Any]:
        records = list(self._sampler)
        self._random.shuffle(records)
        return iter(records)


class ReproducibleShuffleBatchSampler(torch.utils.data.BatchSampler):
    """Another batch sampler's batches, reshuffled at each iteration, in an order that depends only on `seed`.

    The same records always share a batch: prefer `ReproducibleShuffleSampler`.

    Args:
        batch_sampler: of batches; finite.
        seed: the same on all ranks: `context.get_trial_seed()`.
    """

    def __init__(self, batch_sampler: Any, seed: int) -> None:
        self.batch_sampler = batch_sampler
        self._random = np.random.RandomState(seed)

    def __len__(self) -> int:
        return len(self.batch_sampler)

    def __iter__(self) -> Iterator[list[int]]:
        # Shuffled by position: NumPy would turn batches of equal length into the rows of one array.
        batches = list(self.batch_sampler)
        order = list(range(len(batches)))
        self._random.shuffle(order)
        return iter([batches[i] for i in order])


def samplers_in(*samplers: Any) -> list[Any]:
    """Samplers, and those that they take their records from."""
    found = list(samplers)
    for sampler in found:  # which grows
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
    """One process's share of the batches, from where it resumes.

    Args:
        batch_sampler: gives all batches, in the same order in all processes.
        repeat: repeat them endlessly.
        skip: batches of this process to leave out at the beginning.
        num_replicas: number of processes.
        rank: which of them this is, from 0.

    >>> every = torch.utils.data.BatchSampler(range(8), batch_size=2, drop_last=False)
    >>> list(adapt_batch_sampler(every, skip=1, num_replicas=2, rank=1))
    [[6, 7]]
    """
    if repeat:
        batch_sampler = RepeatBatchSampler(batch_sampler)
    if num_replicas > 1:
        batch_sampler = DistributedBatchSampler(batch_sampler, num_replicas, rank)
    return SkipBatchSampler(batch_sampler, skip) if skip > 0 else batch_sampler
