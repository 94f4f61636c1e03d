"""Batches of record numbers, begun anywhere: what stands between a dataset and the batches that a process trains on."""

from __future__ import annotations

import collections
import itertools
import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.utils.data
from torch.utils.data import BatchSampler

from dray.training import rng


class NumberedBatches(BatchSampler):
    """Batches of a sequence of records, of which any can be told without those before it.

    Batch g of the endless, unsharded sequence is batch `g % n` of epoch `g // n`; an epoch's order is a permutation
    that depends on the seed and the epoch alone. So a skip of a million batches costs what a skip of ten does.

    Args:
        records: the numbers of the records in their natural order.
        seed: None for the natural order.
        drawn: the seeds of some epochs' orders, in the place of those that are made of `seed`.
        draws: draw the seed of an epoch that is not in `drawn` when it begins, from the process's own numbers and as
            torch's `RandomSampler` does, and put it there.
        (others): see `DataLoader.get_data_loader`.
    """

    #: Batches of a shuffled epoch that are made together.
    AT_ONCE = 64

    def __init__(
        self,
        *,
        records: Sequence[Any],
        batch_size: int,
        drop_last: bool = False,
        seed: int | None = None,
        drawn: dict[int, int] | None = None,
        draws: bool = False,
        repeat: bool = False,
        skip: int = 0,
        num_replicas: int = 1,
        rank: int = 0,
    ) -> None:
        if not 0 <= rank < num_replicas:
            raise ValueError(f"rank must be at least 0 and below num_replicas={num_replicas}, got {rank}")
        self.batch_size = batch_size
        self.drop_last = drop_last
        self._records = records
        self._seed = seed
        self._drawn = {} if drawn is None else drawn
        self._draws = draws
        self._repeat = repeat
        self._skip = skip
        self._num_replicas = num_replicas
        self._rank = rank

    def __len__(self) -> int:
        return _share(self._per_epoch(), self._num_replicas, self._rank)

    def __iter__(self) -> Iterator[list[Any]]:
        per_epoch = self._per_epoch()
        if per_epoch == 0:
            return
        first = self._skip * self._num_replicas + self._rank
        first_epoch, position = divmod(first, per_epoch)
        for epoch in itertools.count(first_epoch) if self._repeat else range(first_epoch, 1):
            numbers = range(position, per_epoch, self._num_replicas)
            yield from self._in_order(numbers) if self._seed is None else self._shuffled(epoch, numbers)
            position += len(numbers) * self._num_replicas - per_epoch

    def _per_epoch(self) -> int:
        return _batches_in(len(self._records), self.batch_size, self.drop_last)

    def _in_order(self, numbers: range) -> Iterator[list[Any]]:
        """The batches of these numbers."""
        records, size = self._records, self.batch_size
        for number in numbers:
            yield list(records[number * size : (number + 1) * size])

    def _seed_of(self, epoch: int) -> int:
        if self._draws and epoch not in self._drawn:
            self._drawn[epoch] = drawn_seed()
        if epoch in self._drawn:
            return self._drawn[epoch]
        return random.Random(f"{self._seed}:shuffle:{epoch}").getrandbits(63)

    def _shuffled(self, epoch: int, numbers: range) -> Iterator[list[Any]]:
        """The batches of these numbers, of an epoch's order."""
        records, size = self._records, self.batch_size
        generator = torch.Generator()
        generator.manual_seed(self._seed_of(epoch))
        order = torch.randperm(len(records), generator=generator).numpy()
        whole = order[: len(order) // size * size].reshape(-1, size)
        # Some at a time: one by one costs more, and all at once would be long for who starts in the middle.
        stretch = self.AT_ONCE * numbers.step
        parts = [whole[start : start + stretch : numbers.step] for start in range(numbers.start, len(whole), stretch)]
        if len(whole) in numbers:
            parts.append(order[len(whole) * size :].reshape(1, -1))
        for part in parts:
            if isinstance(records, range):  # of the whole dataset: a record's number is its place
                yield from part.tolist()
            else:
                yield from ([records[place] for place in row] for row in part.tolist())


class SampledBatches(BatchSampler):
    """Batches of a sampler of the user's, whose order is known to itself alone: what is skipped has to be drawn.

    What a sampler draws from the process's own generators at the beginning of an epoch, as torch's do, depends on the
    seed and the epoch alone: it is the same again in a resumed run, and the same on every rank. So whole epochs of
    torch's samplers are skipped without a draw, and those of a sampler with torch's `set_epoch(epoch)`, which is told
    each epoch's number.

    Args:
        sampler: of records, or of batches.
        batch_size: None if the sampler gives batches.
        repeat: go on with the next epoch for ever.
        first: batches to leave out at the beginning.
        seed: of the epochs' orders, if they repeat; one pass draws as it always does.
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
    ) -> None:
        self._sampler = sampler
        self._batch_size = batch_size
        self._drop_last = drop_last
        self._repeat = repeat
        self._first = first
        self._seed = seed

    def __len__(self) -> int:
        return self._batches_in(len(self._sampler))

    def __iter__(self) -> Iterator[Any]:
        set_epoch = getattr(self._sampler, "set_epoch", None) if self._repeat else None
        known = self._repeat and (set_epoch is not None or _keeps_no_state(self._sampler))
        first_epoch, position = divmod(self._first, max(len(self), 1)) if known else (0, self._first)
        for epoch in itertools.count(first_epoch) if self._repeat else (0,):
            if set_epoch is not None:
                set_epoch(epoch)
            items = self._items(epoch)
            wanted = position * (self._batch_size or 1)
            passed = _pass_over(items, wanted)
            if passed < wanted:  # the position is in a later epoch
                if self._batches_in(passed) == 0:
                    return
                position -= self._batches_in(passed)
                continue
            empty = passed == 0
            for batch in self._batches(items):
                empty = False
                yield batch
            if empty:
                # Nothing to repeat: an endless search for a first record would hang.
                return
            position = 0

    def _items(self, epoch: int) -> Iterator[Any]:
        if not self._repeat:
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


class DividedAnew(BatchSampler):
    """The global batches of a run of other processes, each divided evenly among those that there are now.

    Some processes train on a record that another one has too where a global batch has fewer records than there are
    processes: none may be left without any.

    Args:
        batches: of the whole run, unsharded, endless, from the first one that is to be trained.
        replicas: of the run as it was: so many batches are one global batch.
        num_replicas, rank: of the run as it is.
    """

    def __init__(self, batches: BatchSampler, *, replicas: int, num_replicas: int, rank: int) -> None:
        self._batches = batches
        self._replicas = replicas
        self._num_replicas = num_replicas
        self._rank = rank

    def __len__(self) -> int:
        # As long as the chief's share was, which every process counted epochs by.
        return _share(len(self._batches), self._replicas, 0)

    def __iter__(self) -> Iterator[list[Any]]:
        batches = iter(self._batches)
        while parts := list(itertools.islice(batches, self._replicas)):
            whole = [record for part in parts for record in part]
            start, stop = (len(whole) * rank // self._num_replicas for rank in (self._rank, self._rank + 1))
            yield whole[start:stop] or [whole[self._rank % len(whole)]]


class SeededBatches(BatchSampler):
    """Batches that seed the worker process which loads them, each with a number of its own.

    What a dataset draws in a worker process (augmentation) so depends on the batch alone: not on how many worker
    processes there are, nor on what was loaded before, which a resumed run does not load again.

    Args:
        batches: lists are seeded, batches of other types pass as they are.
        seed: of the trial and the rank.
        first: number of the first one.
    """

    def __init__(self, batches: Any, *, seed: int, first: int) -> None:
        self._batches = batches
        self._seed = seed
        self._first = first

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        for number, batch in enumerate(self._batches, start=self._first):
            yield SeededBatch(batch, self._seed + number) if type(batch) is list else batch


class SeededBatch(list[Any]):
    """Record numbers that arrive in another process together with a seed for it."""

    __slots__ = ("seed",)

    def __init__(self, records: list[Any], seed: int) -> None:
        super().__init__(records)
        self.seed = seed

    def __reduce__(self) -> Any:
        return _arrive, (list(self), self.seed)


def drawn_seed() -> int:
    """A seed as torch's samplers draw one."""
    return int(torch.empty((), dtype=torch.int64).random_().item())


def _arrive(records: list[Any], seed: int) -> list[Any]:
    # Unpickled: in a worker process, by the thread that loads these records next. There is no other place between two
    # batches where torch lets us in.
    if torch.utils.data.get_worker_info() is not None:
        random.seed(seed)
        # Other bits: numpy and torch make the same numbers of the same 32.
        np.random.seed((seed * 0x9E3779B97F4A7C15 >> 32) % 2**32)
        # Not torch.manual_seed(), which queues a call for CUDA each time.
        torch.default_generator.manual_seed(seed % 2**63)
    return records


def _keeps_no_state(sampler: Any) -> bool:
    """Whether nothing goes from one epoch of a sampler to the next: torch's, without a generator of their own."""
    return type(sampler) in _TORCHS and sampler.generator is None


_TORCHS = (
    torch.utils.data.RandomSampler,
    torch.utils.data.SubsetRandomSampler,
    torch.utils.data.WeightedRandomSampler,
)


def _batches_in(records: int, batch_size: int, drop_last: bool) -> int:
    return records // batch_size if drop_last else -(-records // batch_size)


def _share(batches: int, num_replicas: int, rank: int) -> int:
    whole, rest = divmod(batches, num_replicas)
    return whole + (rank < rest)


def _pass_over(items: Iterator[Any], count: int) -> int:
    """Draw up to `count` items; how many there were."""
    counter = itertools.count()
    collections.deque(zip(itertools.islice(items, count), counter, strict=False), maxlen=0)
    return next(counter)
