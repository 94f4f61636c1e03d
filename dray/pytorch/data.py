"""The data loader, and moving and measuring its batches."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from random import Random
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.utils.data
from torch.utils.data import IterableDataset, RandomSampler, SequentialSampler

from dray.pytorch.batches import DividedAnew, NumberedBatches, SampledBatches, SeededBatches, drawn_seed
from dray.pytorch.rows import TorchLoader
from dray.pytorch.samplers import DistributedBatchSampler
from dray.training.parallel.division import Division
from dray.training.units import is_int

log = logging.getLogger(__name__)

TorchData: TypeAlias = Mapping[str, torch.Tensor] | Sequence[torch.Tensor] | torch.Tensor


class DataLoader:
    """Builds a `torch.utils.data.DataLoader`, with the same arguments and defaults.

    The torch loader is made when training starts, when it is known where in the data to start and which share this
    process has. With `shuffle=True` the order depends only on the trial's seed and the epoch: a resumed trial skips to
    its position at no cost, and other code that draws random numbers does not change the order.

    On a resume, a sampler of your own is iterated again up to the trial's position. Whole epochs are skipped without
    iterating if it is a sequence, a sampler of torch's, or has `set_epoch(epoch)` as torch's `DistributedSampler`.
    What it draws from the global RNGs of Python, NumPy or torch at the start of an epoch (as torch's samplers do) is
    the same in the resumed run. Its own generator is yours to seed.

    In worker processes Python's, NumPy's and torch's RNGs are seeded for each batch by its number, so that a resumed
    trial repeats the same augmentation, with any number of workers. A generator that the dataset owns is not seeded.

    If the number of processes changes (`resources.slots_per_trial: {min, max}`, or a checkpoint resumed with more or
    fewer of them), each step still trains on the same records: every record once per epoch, in the same global
    batches. The records move between processes, so dropout and augmentation draw other random numbers, still
    determined by the trial's seed. With a `batch_sampler`, each process takes every size-th batch, so that the global
    batch grows or shrinks.

    Args:
        dataset: map-style, with `__len__` and `__getitem__`.
        batch_size: records per batch on this slot: `context.get_per_slot_batch_size()`. With the default `collate_fn`
            a record's tensor of shape (...) becomes one of shape (batch_size, ...); the last batch of an epoch may be
            smaller, unless `drop_last`.
        generator: seeds `shuffle=True` instead of the trial's seed. Training uses its initial seed, for each epoch's
            order; outside training each pass draws from it.
        (others): as torch's.

    Raises:
        ValueError: a combination that torch refuses, an `IterableDataset`, or no batching at all.
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
            raise ValueError(f"num_workers must be >= 0, got {num_workers}; 0 loads in the main process")
        if timeout < 0:
            raise ValueError(f"timeout must be >= 0 seconds, got {timeout}")
        if num_workers == 0 and prefetch_factor is not None:
            raise ValueError(f"prefetch_factor={prefetch_factor} needs num_workers > 0")
        if num_workers == 0 and persistent_workers:
            raise ValueError("persistent_workers=True needs num_workers > 0")
        if sampler is not None and shuffle:
            raise ValueError("give a sampler or shuffle=True, not both: the sampler decides the order")
        if batch_sampler is not None:
            others = {"batch_size": batch_size != 1, "shuffle": shuffle, "sampler": sampler is not None}
            others["drop_last"] = drop_last
            if any(others.values()):
                raise ValueError(
                    "batch_sampler can't be combined with batch_size, shuffle, sampler and drop_last, as it decides "
                    f"all of them; got {', '.join(name for name, given in others.items() if given)} too"
                )
            batch_size = None
        elif batch_size is None:
            raise ValueError("batch_size=None needs a batch_sampler, because training counts batches")
        elif not is_int(batch_size) or batch_size < 1:
            raise ValueError(f"batch_size must be an int >= 1, got {batch_size!r}")
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
        #: The trial's seed, set by the trainer; None outside training.
        self.seed: int | None = None
        self.batch_sampler = batch_sampler

    def get_data_loader(
        self, repeat: bool = False, skip: int = 0, num_replicas: int = 1, rank: int = 0
    ) -> torch.utils.data.DataLoader[Any]:
        """A torch DataLoader over this replica's share: repeated, then sharded by whole batches, then skipped.

        Args:
            repeat: repeat the data endlessly.
            skip: batches of this replica to leave out at the beginning.
            num_replicas, rank: take every num_replicas-th batch, beginning with the rank-th.
        """
        return self._loader(repeat, skip, num_replicas, rank, self._shuffle_seed())

    def _epoch_length(self, division: Division, num_replicas: int) -> int:
        """The chief's batches per epoch, in a run that divided its data so when it began, and has so many replicas."""
        now = Division(replicas=num_replicas, batch_size=self.batch_size)
        if division == now or not division.same_global_batch(now):
            return len(self._batches(False, 0, num_replicas, 0, 0))
        whole = self._batches(False, 0, 1, 0, 0, division.batch_size)
        return len(DividedAnew(whole, replicas=division.replicas, num_replicas=num_replicas, rank=0))

    def _loader(
        self, repeat: bool, skip: int, num_replicas: int, rank: int, seed: int
    ) -> torch.utils.data.DataLoader[Any]:
        batches = self._batches(repeat, skip, num_replicas, rank, seed)
        return self._over(batches, skip, rank, seed)

    def _divided_anew(
        self, division: Division, *, skip: int, num_replicas: int, rank: int
    ) -> torch.utils.data.DataLoader[Any]:
        """As `get_data_loader(repeat=True, ...)`, but with the global batches of another division of the data.

        For a run that is resumed with another number of processes.

        Args:
            division: how the trial divided its data when it began.
        """
        seed, replicas = self._shuffle_seed(), division.replicas
        whole = self._batches(True, skip * replicas, 1, 0, seed, division.batch_size)
        batches = DividedAnew(whole, replicas=replicas, num_replicas=num_replicas, rank=rank)
        return self._over(batches, skip, rank, seed)

    def __iter__(self) -> Iterator[Any]:
        """One pass over all the data. Outside training `shuffle=True` gives each pass another order, as in torch."""
        seed = drawn_seed(self.generator) if self.seed is None else self._shuffle_seed()
        return iter(self._loader(False, 0, 1, 0, seed))

    def __len__(self) -> int:
        """The number of batches in one pass over all the data."""
        return len(self._batches(False, 0, 1, 0, 0))

    @property
    def _shuffles(self) -> bool:
        """Whether each epoch has another order, as with `shuffle=True`."""
        return self.shuffle or _is_shuffle(self.sampler)

    def _over(self, batches: Any, skip: int, rank: int, seed: int) -> torch.utils.data.DataLoader[Any]:
        workers_seed = Random(f"{seed}:workers:{rank}").getrandbits(63)
        if self.num_workers > 0:
            batches = SeededBatches(batches, seed=workers_seed, first=skip)
        # Torch draws a seed for its workers from this generator; by default from the global one, which the model uses.
        generator = torch.Generator()
        generator.manual_seed(workers_seed)
        return TorchLoader(
            self.dataset,
            batch_sampler=batches,
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

    def _batches(
        self,
        repeat: bool,
        skip: int,
        num_replicas: int,
        rank: int,
        seed: int,
        batch_size: int | None = None,
    ) -> Any:
        batch_size = batch_size or self.batch_size
        records = _numbers(self.dataset, self.sampler) if self.batch_sampler is None else None
        if records is not None:
            assert batch_size is not None
            return NumberedBatches(
                records=records,
                batch_size=batch_size,
                drop_last=self.drop_last,
                seed=seed if self._shuffles else None,
                repeat=repeat,
                skip=skip,
                num_replicas=num_replicas,
                rank=rank,
            )
        if self.batch_sampler is not None:
            batches = SampledBatches(
                self.batch_sampler,
                batch_size=None,
                repeat=repeat,
                first=skip * num_replicas,
                seed=seed,
                shared=num_replicas > 1,
            )
        else:
            batches = SampledBatches(
                self.sampler,
                batch_size=batch_size,
                drop_last=self.drop_last,
                repeat=repeat,
                first=skip * num_replicas,
                seed=seed,
                shared=num_replicas > 1,
            )
        return batches if num_replicas == 1 else DistributedBatchSampler(batches, num_replicas, rank)

    def _shuffle_seed(self) -> int:
        if self.generator is not None:
            return self.generator.initial_seed()
        if self.seed is not None:
            return self.seed
        # Outside training, as torch's RandomSampler does.
        return drawn_seed()


def _numbers(dataset: Any, sampler: Any) -> Sequence[Any] | None:
    """The records in order, if a sampler allows to look up any position directly; else None."""
    if sampler is None:
        return range(len(dataset))
    if type(sampler) is SequentialSampler or _is_shuffle(sampler):
        return range(len(sampler))
    return sampler if isinstance(sampler, (range, list, tuple)) else None


def _is_shuffle(sampler: Any) -> bool:
    """Whether the sampler is what torch makes for shuffle=True."""
    if type(sampler) is not RandomSampler or sampler.replacement or sampler.generator is not None:
        return False
    return len(sampler) == len(sampler.data_source)


def batch_length(batch: Any) -> int:
    """Records in a batch: the length of the first tensor or array in it, at any depth of dicts, lists and tuples.

    Raises:
        ValueError: the batch is empty.
        TypeError: it is of another type; override `PyTorchTrial.get_batch_length`.

    >>> batch_length({"data": [torch.zeros(4, 2)], "label": torch.zeros(4)})
    4
    """
    # A fast path for most batches: a third of the cost.
    kind = type(batch)
    found = batch[0] if (kind is list or kind is tuple) and batch else batch
    if type(found) is torch.Tensor and found.dim() > 0:
        return found.shape[0]
    found = batch
    while not isinstance(found, (torch.Tensor, np.ndarray)):
        if not isinstance(found, (dict, list, tuple)):
            raise TypeError(
                f"get_batch_length() can't count the records of a batch of type {type(found).__module__}."
                f"{type(found).__qualname__}; override PyTorchTrial.get_batch_length()"
            )
        if not found:
            raise ValueError(f"a batch needs at least one record, got {batch!r} with an empty {type(found).__name__}")
        found = next(iter(found.values() if isinstance(found, dict) else found))
    return len(found)


#: Up to this size CUDA copies from unpinned memory without waiting for the device; beyond, it waits.
MAX_STAGED_BYTES = 1 << 16


class ToDevice:
    """Moves batches to a device: tensors, arrays, whatever has a method `to`; and dicts, lists and tuples of them.

    What can't be moved stays, with one warning per type.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._on_cpu = device.type == "cpu"
        self._warned: set[type] = set()

    def __call__(self, data: Any) -> Any:
        kind = type(data)
        if kind is tuple or kind is list:  # a fast path for most batches
            for item in data:
                if type(item) is not torch.Tensor or not (self._on_cpu and item.is_cpu):
                    return kind([self(item) for item in data])
            return kind(data)  # a new list, as in the other cases: the trial may change it
        if isinstance(data, torch.Tensor):
            if data.device == self.device:
                return data
            # Pinned memory is copied without waiting; the device uses the tensor only after the copy.
            return self._pinned(data).to(self.device, non_blocking=True)
        if callable(getattr(data, "to", None)):
            # Before the check for tuples: a PackedSequence is one too.
            return data.to(self.device)
        if isinstance(data, (list, tuple)):
            moved = [self(item) for item in data]
            if hasattr(data, "_fields"):
                return kind(*moved)
            return moved if isinstance(data, list) else tuple(moved)
        if isinstance(data, dict):
            return {key: self(item) for key, item in data.items()}
        if isinstance(data, np.ndarray) and data.dtype.kind in "fciub":
            return self._pinned(torch.from_numpy(data)).to(self.device, non_blocking=True)
        if type(data) not in self._warned:
            self._warned.add(type(data))
            log.warning(
                "can't move values of type %s in a batch to %s; they stay as they are", type(data).__name__, self.device
            )
        return data

    def _pinned(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor in pinned memory, for a CUDA device; a small one as it is."""
        if self.device.type != "cuda" or tensor.device.type != "cpu" or tensor.layout is not torch.strided:
            return tensor
        return tensor.pin_memory() if tensor.nbytes > MAX_STAGED_BYTES else tensor
