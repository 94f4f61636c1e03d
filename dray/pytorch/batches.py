"""Batch samplers that can start anywhere: the order, sharding and skipping of a dataset's records."""

from __future__ import annotations

import collections
import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
import torch
import torch.utils.data
from torch.utils.data import BatchSampler, Dataset

from dray.training import rng


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """A replica's share of the batches: repeated, then sharded, then skipped. See `DataLoader.get_data_loader`."""

    repeat: bool = False
    skip: int = 0
    num_replicas: int = 1
    rank: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.num_replicas:
            raise ValueError(f"rank must be >= 0 and < num_replicas={self.num_replicas}, got {self.rank}")

    @property
    def skipped(self) -> int:
        """The number of batches that all replicas together leave out."""
        return self.skip * self.num_replicas

    def count(self, batches: int) -> int:
        """The number of this replica's batches among the first `batches`, if none are skipped."""
        whole, rest = divmod(batches, self.num_replicas)
        return whole + (self.rank < rest)


WHOLE = Shard()  # all batches, once


class NumberedBatches(BatchSampler):
    """Batches of a sequence of records. Each can be computed without those before it.

    Batch g of the endless, unsharded sequence is batch `g % n` of epoch `g // n`. An epoch's order is a permutation
    that depends only on the seed (None: the natural order) and the epoch, so skipping a million batches costs no more
    than skipping ten.
    """

    AT_ONCE = 64  # batches of a shuffled epoch that are made together

    def __init__(
        self,
        *,
        records: Sequence[Any],
        batch_size: int,
        drop_last: bool = False,
        seed: int | None = None,
        shard: Shard = WHOLE,
    ) -> None:
        self.batch_size, self.drop_last = batch_size, drop_last
        self._records, self._seed, self._shard = records, seed, shard

    def __len__(self) -> int:
        return self._shard.count(self._per_epoch())

    def __iter__(self) -> Iterator[list[Any]]:
        per_epoch, shard = self._per_epoch(), self._shard
        if per_epoch == 0:
            return
        first_epoch, position = divmod(shard.skipped + shard.rank, per_epoch)
        for epoch in itertools.count(first_epoch) if shard.repeat else range(first_epoch, 1):
            numbers = range(position, per_epoch, shard.num_replicas)
            yield from self._in_order(numbers) if self._seed is None else self._shuffled(epoch, numbers)
            position += len(numbers) * shard.num_replicas - per_epoch

    def _per_epoch(self) -> int:
        return _batches_in(len(self._records), self.batch_size, self.drop_last)

    def _in_order(self, numbers: range) -> Iterator[list[Any]]:
        records, size = self._records, self.batch_size
        for number in numbers:
            yield list(records[number * size : (number + 1) * size])

    def _shuffled(self, epoch: int, numbers: range) -> Iterator[list[Any]]:
        records, size = self._records, self.batch_size
        generator = torch.Generator()
        generator.manual_seed(random.Random(f"{self._seed}:shuffle:{epoch}").getrandbits(63))
        order = torch.randperm(len(records), generator=generator).numpy()
        whole = order[: len(order) // size * size].reshape(-1, size)
        # A few at a time: one by one costs more, and all together would delay the first batch.
        stretch = self.AT_ONCE * numbers.step
        parts = [whole[start : start + stretch : numbers.step] for start in range(numbers.start, len(whole), stretch)]
        if len(whole) in numbers:
            parts.append(order[len(whole) * size :].reshape(1, -1))
        for part in parts:
            if isinstance(records, range):  # the whole dataset: a record's index is its position
                yield from part.tolist()
            else:
                yield from ([records[place] for place in row] for row in part.tolist())


class SampledBatches(BatchSampler):
    """Batches of the user's own sampler, which can be skipped only by iterating over them.

    The global RNGs are seeded with the seed and the epoch at the start of each epoch, where torch's samplers draw. So
    the order is the same in a resumed run and on every rank. Whole epochs are skipped without iterating if the sampler
    is torch's, or has `set_epoch(epoch)`, which is called with each epoch's number.

    Args:
        sampler: yields records; or batches, if batch_size is None.
        first: number of batches to leave out at the beginning.
        seed: determines the order of each epoch; unused for a single pass by one replica.
        shared: replicas divide these batches, so all of them must see the same ones.
    """

    def __init__(
        self,
        sampler: Any,
        *,
        batch_size: int | None,
        drop_last: bool = False,
        repeat: bool = False,
        first: int = 0,
        seed: int = 0,
        shared: bool = False,
    ) -> None:
        self._sampler, self._batch_size, self._drop_last = sampler, batch_size, drop_last
        self._repeat, self._first = repeat, first
        self._seed, self._seeded = seed, repeat or shared

    def __len__(self) -> int:
        return self._batches_in(len(self._sampler))

    def __iter__(self) -> Iterator[Any]:
        set_epoch = getattr(self._sampler, "set_epoch", None) if self._repeat else None
        # Torch's samplers without a generator of their own carry no state from one epoch to the next.
        is_stateless = type(self._sampler) in _TORCH_SAMPLERS and self._sampler.generator is None
        known = self._repeat and (set_epoch is not None or is_stateless)
        first_epoch, position = divmod(self._first, max(len(self), 1)) if known else (0, self._first)
        for epoch in itertools.count(first_epoch) if self._repeat else (0,):
            if set_epoch is not None:
                set_epoch(epoch)
            items = self._items(epoch)
            to_skip = position * (self._batch_size or 1)
            skipped = _skip_items(items, to_skip)
            if skipped < to_skip:  # the position is in a later epoch
                if self._batches_in(skipped) == 0:
                    return
                position -= self._batches_in(skipped)
                continue
            empty = skipped == 0
            for batch in self._batches(items):
                empty = False
                yield batch
            if empty:
                # Repeating an empty sampler would never end.
                return
            position = 0

    def _items(self, epoch: int) -> Iterator[Any]:
        if not self._seeded:
            return iter(self._sampler)
        with rng.seeded(random.Random(f"{self._seed}:sampler:{epoch}").getrandbits(63)):
            items = iter(self._sampler)
            begun = list(itertools.islice(items, 1))
        return itertools.chain(begun, items)

    def _batches(self, items: Iterator[Any]) -> Iterator[Any]:
        if self._batch_size is None:
            yield from items
            return
        while batch := list(itertools.islice(items, self._batch_size)):
            if len(batch) < self._batch_size and self._drop_last:
                return
            yield batch

    def _batches_in(self, items: int) -> int:
        return items if self._batch_size is None else _batches_in(items, self._batch_size, self._drop_last)


class ReshardedBatches(BatchSampler):
    """The global batches of an earlier run with another number of processes, divided evenly among the current ones.

    If a global batch has fewer records than there are processes, some processes share a record, since each needs one.

    Args:
        batches: the unsharded, endless batches, beginning with the first one to train on.
        replicas: the earlier number of processes, which is the number of batches in a global batch.
        num_replicas, rank: the current number of processes, and the rank of this one.
    """

    def __init__(self, batches: BatchSampler, *, replicas: int, num_replicas: int, rank: int) -> None:
        self._batches, self._replicas, self._num_replicas, self._rank = batches, replicas, num_replicas, rank

    def __len__(self) -> int:
        # The length of the chief's shard in the earlier run, which was every process's epoch length.
        return Shard(num_replicas=self._replicas).count(len(self._batches))

    def __iter__(self) -> Iterator[list[Any]]:
        batches = iter(self._batches)
        while parts := list(itertools.islice(batches, self._replicas)):
            whole = [record for part in parts for record in part]
            start, stop = (len(whole) * rank // self._num_replicas for rank in (self._rank, self._rank + 1))
            yield whole[start:stop] or [whole[self._rank % len(whole)]]


class WorkerBatches(BatchSampler):
    """Batches for worker processes, which prepare for each one before they load it.

    The random numbers that a dataset draws in a worker process (augmentation) depend only on the batch: not on the
    number of workers, nor on earlier batches, which a resumed run does not load again. And workers load ahead of
    training, across epochs, so that the epoch has to reach them with the batch.

    Args:
        seed: determines the workers' random numbers; differs between ranks.
        first: the number of the first batch.
        epoch_of: the epoch of a batch, by its number; None: the data set does not learn of epochs.
        epoch_seed: determines the random numbers of `set_epoch`; the same on all ranks.
    """

    def __init__(
        self, batches: Any, *, seed: int, first: int, epoch_of: Callable[[int], int] | None = None, epoch_seed: int = 0
    ) -> None:
        self._batches, self._seed, self._first = batches, seed, first
        self._epoch_of, self._epoch_seed = epoch_of, epoch_seed

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        for number, batch in enumerate(self._batches, start=self._first):
            epoch = None if self._epoch_of is None else self._epoch_of(number)
            yield WorkerBatch(batch, self._seed + number, epoch, self._epoch_seed)


class WorkerBatch:
    """Record indices that, unpickled in a worker process, prepare it for loading them."""

    __slots__ = ("message",)

    def __init__(self, records: Any, seed: int, epoch: int | None = None, epoch_seed: int = 0) -> None:
        self.message = records, seed, epoch, epoch_seed

    def __reduce__(self) -> Any:
        return _prepare_worker, self.message


def drawn_seed(generator: torch.Generator | None = None) -> int:
    """Draw a seed as torch's samplers do, from a generator, by default the global RNG."""
    return int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())


_worker_epoch: int | None = None  # in a worker process: the epoch that its data set was given


def _prepare_worker(records: Any, seed: int, epoch: int | None, epoch_seed: int) -> Any:
    # Called on unpickling, by the worker process's thread that then loads these records: torch has no other hook
    # between two batches.
    global _worker_epoch
    worker = torch.utils.data.get_worker_info()
    if worker is not None:
        if epoch != _worker_epoch and epoch is not None:
            try:
                set_epoch(worker.dataset, epoch, epoch_seed)
            except Exception as error:
                return _Failed(error)
            _worker_epoch = epoch
        random.seed(seed)
        # With torch's seed both generators would draw the same numbers.
        np.random.seed((seed * 0x9E3779B97F4A7C15 >> 32) % 2**32)
        # torch.manual_seed() would queue a call for CUDA each time.
        torch.default_generator.manual_seed(seed % 2**63)
    return records


class _Failed:
    """Stands for records, and raises an error when they are loaded: raised earlier, it would end the worker process
    without a word to the training process."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def __iter__(self) -> Iterator[Any]:
        raise self._error


_TORCH_SAMPLERS = (
    torch.utils.data.RandomSampler,
    torch.utils.data.SubsetRandomSampler,
    torch.utils.data.WeightedRandomSampler,
)


def _batches_in(records: int, batch_size: int, drop_last: bool) -> int:
    return records // batch_size if drop_last else -(-records // batch_size)


def _skip_items(items: Iterator[Any], count: int) -> int:
    """Skip up to `count` items, and return how many there were."""
    counter = itertools.count()
    collections.deque(zip(itertools.islice(items, count), counter, strict=False), maxlen=0)
    return next(counter)


def set_epoch(dataset: Any, epoch: int, seed: int) -> None:
    """Call `set_epoch(epoch)` of a data set, or of those that it wraps.

    Its random draws are the same in all processes and in a resumed run, and leave the global RNGs unchanged.
    """
    if found := list(_with_epochs(dataset, set())):
        with rng.seeded(Random(f"{seed}:dataset:{epoch}").getrandbits(63)):
            for each in found:
                each.set_epoch(epoch)


def _with_epochs(dataset: Any, seen: set[int]) -> Iterator[Any]:
    """The outermost data sets that have `set_epoch`: those wrapped by one are its own affair."""
    if id(dataset) in seen:
        return
    seen.add(id(dataset))
    if callable(getattr(dataset, "set_epoch", None)):
        yield dataset
        return
    for name, value in getattr(dataset, "__dict__", {}).items():
        # Of containers only those named like torch's (ConcatDataset.datasets): others may hold a million records.
        is_group = name.endswith("datasets") and isinstance(value, (list, tuple, Mapping))
        inner = (value.values() if isinstance(value, Mapping) else value) if is_group else (value,)
        for each in inner:
            if is_group or isinstance(each, Dataset) or name.endswith("dataset"):
                yield from _with_epochs(each, seen)
