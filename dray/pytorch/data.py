"""The data loader, and what is done to its batches."""

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
from dray.pytorch.samplers import DistributedBatchSampler
from dray.training.division import Division
from dray.training.units import is_int

log = logging.getLogger(__name__)

TorchData: TypeAlias = Mapping[str, torch.Tensor] | Sequence[torch.Tensor] | torch.Tensor


class DataLoader:
    """A recipe for a `torch.utils.data.DataLoader`, with its arguments and defaults.

    The real loader is made when training starts, when it is known where in the data to start and which share of it is
    this process's. With `shuffle=True` the order depends on the trial's seed and the epoch alone: a resumed trial goes
    on where it was, at no cost, and nothing else that draws random numbers disturbs it.

    A sampler of your own is drawn from again up to where the trial was, unless it is a sequence, or one of torch's, or
    is told its epoch by `set_epoch(epoch)` as torch's `DistributedSampler`: then whole epochs are skipped without a
    draw. What it draws from python's, numpy's or torch's own generators as an epoch begins (torch's samplers do) is the
    same again; for a generator that it keeps for itself, give that a seed.

    In worker processes python's, numpy's and torch's random numbers are seeded for each batch by its number, so that
    augmentation is the same again in a resumed trial, however many workers there are. A generator that the dataset
    keeps for itself is not.

    When the number of processes changes (`resources.slots_per_trial: {min, max}`, or a checkpoint that is gone on from
    with more or fewer of them), each step still trains on the records that it would have had: every record once an
    epoch, in the same global batches. Which process has which of them changes, and with it what is drawn for each:
    dropout, and augmentation, go on with numbers of the trial's seed, but not the same ones. With a `batch_sampler`
    the batches are its own affair: each process takes every size-th of them, so that a step has more or fewer.

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
            others = {"batch_size": batch_size != 1, "shuffle": shuffle, "sampler": sampler is not None}
            others["drop_last"] = drop_last
            if any(others.values()):
                raise ValueError(
                    "batch_sampler excludes batch_size, shuffle, sampler and drop_last, for it decides all of them; "
                    f"got {', '.join(name for name, given in others.items() if given)} too"
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
        #: Set by the trainer in a run that goes on from a checkpoint of Determined's, to go on as that run would have:
        #: what torch draws for its loaders comes from the process's own numbers, and so do the seeds of epochs' orders,
        #: which are here, by epochs. Each of several processes would draw its own, and not see that the others differ:
        #: these know those seeds only that the checkpoint tells.
        self.drawn: dict[int, int] | None = None
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
        batches = self._batches(repeat, skip, num_replicas, rank, seed, draws=num_replicas == 1)
        return self._over(batches, skip, rank, seed)

    def _divided_anew(
        self, division: Division, *, skip: int, num_replicas: int, rank: int
    ) -> torch.utils.data.DataLoader[Any]:
        """As `get_data_loader(repeat=True, ...)`, but each step trains on the records that it had in another run.

        For a run that goes on with other processes: the batches of all of them together are those of before.

        Args:
            division: how that run divided its data.
        """
        seed, replicas = self._shuffle_seed(), division.replicas
        whole = self._batches(True, skip * replicas, 1, 0, seed, division.batch_size, draws=num_replicas == 1)
        batches = DividedAnew(whole, replicas=replicas, num_replicas=num_replicas, rank=rank)
        return self._over(batches, skip, rank, seed)

    def __iter__(self) -> Iterator[Any]:
        """One pass over all the data, as torch's would."""
        return iter(self.get_data_loader())

    def __len__(self) -> int:
        """Batches of one pass over all the data."""
        return len(self._batches(False, 0, 1, 0, 0))

    def _over(self, batches: Any, skip: int, rank: int, seed: int) -> torch.utils.data.DataLoader[Any]:
        workers_seed = Random(f"{seed}:workers:{rank}").getrandbits(63)
        if self.num_workers > 0:
            batches = SeededBatches(batches, seed=workers_seed, first=skip)
        # Torch seeds its worker processes by a draw; not from the global generator, which is the model's.
        generator = torch.Generator() if self.drawn is None else None
        if generator is not None:
            generator.manual_seed(workers_seed)
        return torch.utils.data.DataLoader(
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
        draws: bool = False,
    ) -> Any:
        batch_size = batch_size or self.batch_size
        records = _numbers(self.dataset, self.sampler) if self.batch_sampler is None else None
        if records is not None:
            assert batch_size is not None
            drawn = self.drawn if self.generator is None else None
            return NumberedBatches(
                records=records,
                batch_size=batch_size,
                drop_last=self.drop_last,
                seed=seed if self.shuffle or _is_shuffle(self.sampler) else None,
                drawn=drawn,
                draws=draws and drawn is not None,
                repeat=repeat,
                skip=skip,
                num_replicas=num_replicas,
                rank=rank,
            )
        if self.batch_sampler is not None:
            batches = SampledBatches(
                self.batch_sampler, batch_size=None, repeat=repeat, first=skip * num_replicas, seed=seed
            )
        else:
            batches = SampledBatches(
                self.sampler,
                batch_size=batch_size,
                drop_last=self.drop_last,
                repeat=repeat,
                first=skip * num_replicas,
                seed=seed,
            )
        return batches if num_replicas == 1 else DistributedBatchSampler(batches, num_replicas, rank)

    def _shuffle_seed(self) -> int:
        if self.generator is not None:
            return self.generator.initial_seed()
        if self.seed is not None:
            return self.seed
        # Outside of training, as torch's RandomSampler.
        return drawn_seed()


def _numbers(dataset: Any, sampler: Any) -> Sequence[Any] | None:
    """The records in order, where any of them can be told without those before it; None for a sampler that draws."""
    if sampler is None:
        return range(len(dataset))
    if type(sampler) is SequentialSampler or _is_shuffle(sampler):
        return range(len(sampler))
    return sampler if isinstance(sampler, (range, list, tuple)) else None


def _is_shuffle(sampler: Any) -> bool:
    """Whether it is what torch makes of shuffle=True."""
    if type(sampler) is not RandomSampler or sampler.replacement or sampler.generator is not None:
        return False
    return len(sampler) == len(sampler.data_source)


def batch_length(batch: Any) -> int:
    """Records in a batch: the length of its first tensor or array, looked for in dicts, lists and tuples.

    Raises:
        ValueError: there is none in it.
        TypeError: it is of another type; override `PyTorchTrial.get_batch_length`.

    >>> batch_length({"data": [torch.zeros(4, 2)], "label": torch.zeros(4)})
    4
    """
    # Most batches, at a third of the cost of asking what else they could be.
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
            raise ValueError(f"a batch is empty: {batch!r} holds an empty {type(found).__name__}, hence no record")
        found = next(iter(found.values() if isinstance(found, dict) else found))
    return len(found)


#: Up to here CUDA takes a copy of what is in ordinary memory at once; beyond it waits for what the device has to do.
MAX_STAGED_BYTES = 1 << 16


class ToDevice:
    """Moves batches to a device: tensors, arrays, dicts, lists, tuples, and whatever has a method `to`.

    What can't be moved stays, with one warning a type.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._on_cpu = device.type == "cpu"
        self._warned: set[type] = set()

    def __call__(self, data: Any) -> Any:
        kind = type(data)
        if kind is tuple or kind is list:  # most batches; every microsecond here is one of each batch
            for item in data:
                if type(item) is not torch.Tensor or not (self._on_cpu and item.is_cpu):
                    return kind([self(item) for item in data])
            return kind(data)  # a list of its own, as otherwise: the trial may change it
        if isinstance(data, torch.Tensor):
            if data.device == self.device:
                return data
            # From pinned memory without waiting; the copy is ordered before whatever the device does with it.
            return self._pinned(data).to(self.device, non_blocking=True)
        if callable(getattr(data, "to", None)):
            # Before it is asked whether it is a tuple, which a PackedSequence is too.
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
            log.warning("values of type %s in a batch can't be moved to %s, and stay", type(data).__name__, self.device)
        return data

    def _pinned(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor where a CUDA device can fetch it without us; a small one is taken along as it is."""
        if self.device.type != "cuda" or tensor.device.type != "cpu" or tensor.layout is not torch.strided:
            return tensor
        return tensor.pin_memory() if tensor.nbytes > MAX_STAGED_BYTES else tensor
