"""The data loader, and what is done to its batches."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from random import Random
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.utils.data
from torch.utils.data import BatchSampler, IterableDataset

from dray.pytorch.samplers import DistributedBatchSampler, RepeatBatchSampler, SkipBatchSampler
from dray.training.units import is_int

log = logging.getLogger(__name__)

TorchData: TypeAlias = Mapping[str, torch.Tensor] | Sequence[torch.Tensor] | torch.Tensor


class DataLoader:
    """A recipe for a `torch.utils.data.DataLoader`, with its arguments and defaults.

    The real loader is made when training starts, when it is known where in the data to start and which share of it is
    this process's. With `shuffle=True` the order depends on the trial's seed and the epoch alone: a resumed trial goes
    on where it was, at no cost, and nothing else that draws random numbers disturbs it.

    Args:
        dataset: map-style, with `__len__` and `__getitem__`.
        batch_size: records a batch on this slot: `context.get_per_slot_batch_size()`.
        generator: seeds `shuffle=True` in the place of the trial's seed.
        (others): as torch's.

    Raises:
        ValueError: for combinations that torch refuses, an `IterableDataset`, no batching at all.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int | None = 1,
        shuffle: bool = False,
        sampler: Any = None,
        batch_sampler: Any = None,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        generator: torch.Generator | None = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
    ) -> None:
        if isinstance(dataset, IterableDataset):
            raise ValueError(
                "pytorch.DataLoader can't shard and skip an IterableDataset; use a map-style dataset, or return a "
                "torch.utils.data.DataLoader after context.experimental.disable_dataset_reproducibility_checks()"
            )
        if num_workers < 0:
            raise ValueError(f"num_workers must be at least 0, got {num_workers}; 0 loads in the main process")
        if timeout < 0:
            raise ValueError(f"timeout must be at least 0 seconds, got {timeout}")
        if num_workers == 0 and prefetch_factor is not None:
            raise ValueError(f"prefetch_factor={prefetch_factor} needs num_workers > 0")
        if num_workers == 0 and persistent_workers:
            raise ValueError("persistent_workers=True needs num_workers > 0")
        if sampler is not None and shuffle:
            raise ValueError("give a sampler or shuffle=True, not both: the sampler decides the order")
        if batch_sampler is not None:
            if batch_size != 1 or shuffle or sampler is not None or drop_last:
                raise ValueError(
                    "batch_sampler excludes batch_size, shuffle, sampler and drop_last: it decides all of them"
                )
            batch_size = None
        elif batch_size is None:
            raise ValueError("batch_size=None needs a batch_sampler: training counts batches")
        elif not is_int(batch_size) or batch_size < 1:
            raise ValueError(f"batch_size must be an int of at least 1, got {batch_size!r}")
        self.dataset = dataset
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.drop_last = drop_last
        self.sampler = sampler
        self.num_workers = num_workers
        self.collate_fn = collate_fn
        self.pin_memory = pin_memory
        self.timeout = timeout
        self.worker_init_fn = worker_init_fn
        self.multiprocessing_context = multiprocessing_context
        self.generator = generator
        self.prefetch_factor = prefetch_factor
        self.persistent_workers = persistent_workers
        #: Set by the trainer: the trial's. None outside training.
        self.seed: int | None = None
        if batch_sampler is None and sampler is not None:
            assert batch_size is not None
            batch_sampler = BatchSampler(sampler, batch_size, drop_last)
        #: The user's, or of the user's sampler. None if the records are to be numbered off.
        self.batch_sampler = batch_sampler

    def get_data_loader(
        self, repeat: bool = False, skip: int = 0, num_replicas: int = 1, rank: int = 0
    ) -> torch.utils.data.DataLoader[Any]:
        """A torch DataLoader over this replica's share: repeated, then sharded by whole batches, then skipped.

        Args:
            repeat: go through the data for ever.
            skip: batches of this replica to leave out at the beginning.
            num_replicas, rank: take every num_replicas-th batch, beginning with the rank-th.
        """
        seed = self._shuffle_seed()
        # Torch seeds its worker processes by a draw; not from the global generator, which is the model's.
        generator = torch.Generator()
        generator.manual_seed(Random(f"{seed}:workers:{skip}:{rank}").getrandbits(63))
        return torch.utils.data.DataLoader(
            self.dataset,
            batch_sampler=self._batches(repeat, skip, num_replicas, rank, seed),
            num_workers=self.num_workers,
            collate_fn=self.collate_fn,
            pin_memory=self.pin_memory,
            timeout=self.timeout,
            worker_init_fn=self.worker_init_fn,
            multiprocessing_context=self.multiprocessing_context,
            generator=generator,
            prefetch_factor=self.prefetch_factor,
            persistent_workers=self.persistent_workers,
        )

    def __iter__(self) -> Iterator[Any]:
        """One pass over all the data, as torch's would."""
        return iter(self.get_data_loader())

    def __len__(self) -> int:
        """Batches of one pass over all the data."""
        return len(self._batches(False, 0, 1, 0, 0))

    def _batches(self, repeat: bool, skip: int, num_replicas: int, rank: int, seed: int) -> Any:
        if self.batch_sampler is None:
            assert self.batch_size is not None
            return NumberedBatches(
                records=len(self.dataset),
                batch_size=self.batch_size,
                drop_last=self.drop_last,
                seed=seed if self.shuffle else None,
                repeat=repeat,
                skip=skip,
                num_replicas=num_replicas,
                rank=rank,
            )
        batches = self.batch_sampler
        if repeat:
            batches = RepeatBatchSampler(batches)
        if num_replicas > 1:
            batches = DistributedBatchSampler(batches, num_replicas, rank)
        return SkipBatchSampler(batches, skip) if skip else batches

    def _shuffle_seed(self) -> int:
        if self.generator is not None:
            return self.generator.initial_seed()
        if self.seed is not None:
            return self.seed
        # Outside of training, as torch's RandomSampler.
        return int(torch.empty((), dtype=torch.int64).random_().item())


class NumberedBatches(BatchSampler):
    """Batches of record numbers, of which any can be told without those before it.

    Batch g of the endless, unsharded sequence is batch `g % n` of epoch `g // n`; an epoch's order is a permutation
    that depends on the seed and the epoch alone. So a skip of a million batches costs what a skip of ten does.

    Args:
        seed: None for the natural order.
        (others): see `DataLoader.get_data_loader`.
    """

    def __init__(
        self,
        *,
        records: int,
        batch_size: int,
        drop_last: bool = False,
        seed: int | None = None,
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
        self._per_epoch = records // batch_size if drop_last else -(-records // batch_size)
        self._seed = seed
        self._repeat = repeat
        self._skip = skip
        self._num_replicas = num_replicas
        self._rank = rank

    def __len__(self) -> int:
        whole, rest = divmod(self._per_epoch, self._num_replicas)
        return whole + (self._rank < rest)

    def __iter__(self) -> Iterator[list[int]]:
        if self._per_epoch == 0:
            return
        first = self._skip * self._num_replicas + self._rank
        first_epoch, position = divmod(first, self._per_epoch)
        for epoch in itertools.count(first_epoch) if self._repeat else range(first_epoch, 1):
            order = self._order(epoch)
            while position < self._per_epoch:
                start = position * self.batch_size
                yield order(start, min(start + self.batch_size, self._records))
                position += self._num_replicas
            position -= self._per_epoch

    def _order(self, epoch: int) -> Callable[[int, int], list[int]]:
        if self._seed is None:
            return lambda start, stop: list(range(start, stop))
        generator = torch.Generator()
        generator.manual_seed(Random(f"{self._seed}:shuffle:{epoch}").getrandbits(63))
        order = torch.randperm(self._records, generator=generator)
        return lambda start, stop: order[start:stop].tolist()


def batch_length(batch: Any) -> int:
    """Records in a batch: the length of its first tensor or array, looked for in dicts, lists and tuples.

    Raises:
        ValueError: there is none in it.
        TypeError: it is of another type; override `PyTorchTrial.get_batch_length`.

    >>> batch_length({"data": [torch.zeros(4, 2)], "label": torch.zeros(4)})
    4
    """
    found = batch
    while not isinstance(found, (torch.Tensor, np.ndarray)):
        if not isinstance(found, (dict, list, tuple)):
            raise TypeError(
                f"get_batch_length() can't count the records of a batch of type {type(found).__module__}."
                f"{type(found).__qualname__}; override PyTorchTrial.get_batch_length()"
            )
        if not found:
            raise ValueError(f"a batch is empty: {batch!r} holds an empty {type(found).__name__}, hence no record")
        found = next(iter(found.values() if isinstance(found, dict) else found))
    return len(found)


class ToDevice:
    """Moves batches to a device: tensors, arrays, dicts, lists, tuples, and whatever has a method `to`.

    What can't be moved stays, with one warning a type.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._warned: set[type] = set()

    def __call__(self, data: Any) -> Any:
        kind = type(data)
        if kind is tuple or kind is list:  # most batches; every microsecond here is one of each batch
            return kind([self(item) for item in data])
        if isinstance(data, torch.Tensor):
            if data.device == self.device:
                return data
            # From pinned memory without waiting; the copy is ordered before whatever the device does with it.
            return data.to(self.device, non_blocking=True)
        if isinstance(data, (list, tuple)):
            moved = [self(item) for item in data]
            if hasattr(data, "_fields"):
                return kind(*moved)
            return moved if isinstance(data, list) else tuple(moved)
        if isinstance(data, dict):
            return {key: self(item) for key, item in data.items()}
        if isinstance(data, np.ndarray) and data.dtype.kind in "fciub":
            return torch.from_numpy(data).to(self.device)
        if callable(getattr(data, "to", None)):
            return data.to(self.device)
        if type(data) not in self._warned:
            self._warned.add(type(data))
            log.warning("values of type %s in a batch can't be moved to %s, and stay", type(data).__name__, self.device)
        return data
