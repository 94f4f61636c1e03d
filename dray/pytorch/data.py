"""`pytorch.DataLoader`, and the torch loaders that it makes."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from random import Random
from typing import Any, TypeAlias

import torch
import torch.utils.data
from torch.utils.data import IterableDataset, RandomSampler, SequentialSampler, Subset, TensorDataset
from torch.utils.data.dataloader import default_collate

from dray.pytorch.batches import (
    WHOLE,
    NumberedBatches,
    ReshardedBatches,
    SampledBatches,
    Shard,
    WorkerBatches,
    drawn_seed,
    set_epoch,
)
from dray.pytorch.samplers import DistributedBatchSampler
from dray.pytorch.streams import stateful_loader
from dray.training.parallel.mesh import Division
from dray.training.units import is_int


class TorchLoader(torch.utils.data.DataLoader[Any]):
    """Torch's loader, with a faster iterator if there are no worker processes.

    It indexes each tensor of a TensorDataset once per batch (`rows`) where that gives the same result as torch's
    collation. It also leaves out the profiler's range around each batch, which costs 10 µs even without a profiler;
    `BatchLoop` records it if there is one.
    """

    def _get_iterator(self) -> Any:
        batches = super()._get_iterator()
        # Private attributes of torch's iterators; only those without worker processes have the first.
        if (fetcher := getattr(batches, "_dataset_fetcher", None)) is None or batches._pin_memory:
            return batches
        fetch, whole = fetcher.fetch, self.dataset
        while type(whole) is Subset:
            whole = whole.dataset
        if type(whole) is not TensorDataset or self.collate_fn is not default_collate:
            return map(fetch, batches._sampler_iter)
        return (rows(self.dataset, records) or fetch(records) for records in batches._sampler_iter)


def rows(dataset: Any, records: Any) -> list[torch.Tensor] | None:
    """The same as `default_collate` on these records; None if the dataset is not plain enough for that.

    >>> dataset = Subset(TensorDataset(torch.arange(10), torch.eye(10)), range(5, 10))
    >>> rows(dataset, [0, 2])[0]
    tensor([5, 7])
    """
    while type(dataset) is Subset:
        if not isinstance(dataset.indices, (list, range)) or not _are_ints(records):
            return None
        records, dataset = [dataset.indices[record] for record in records], dataset.dataset
    if type(dataset) is not TensorDataset or not _are_ints(records):
        return None
    # From a tensor in another memory format, such as channels_last, indexing would give a batch in that format too.
    if any(type(each) is not torch.Tensor or not _is_plain(each) for each in dataset.tensors):
        return None
    chosen = torch.tensor(records)
    return [each[chosen] for each in dataset.tensors]


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _are_ints(records: Any) -> bool:
    return type(records) is list and bool(records) and all(type(record) is int for record in records)


TorchData: TypeAlias = Mapping[str, torch.Tensor] | Sequence[torch.Tensor] | torch.Tensor


class DataLoader:
    """Builds a `torch.utils.data.DataLoader`, with the same arguments and defaults.

    The torch loader is made when training starts, once this process's share of the data and the position in it are
    known. With `shuffle=True` the order depends only on the trial's seed and the epoch: a resumed trial skips to its
    position at no cost, and other code that draws random numbers does not change the order.

    When a trial resumes, a sampler of your own is iterated again up to the trial's position. Whole epochs are skipped
    without iterating if it is a sequence, one of torch's samplers, or has a `set_epoch(epoch)` like torch's
    `DistributedSampler`. Its draws from the global RNGs of Python, NumPy or torch at the start of an epoch, where
    torch's samplers draw, are the same in the resumed run. If it has a generator, seed that yourself.

    In worker processes, Python's, NumPy's and torch's RNGs are seeded for each batch with its number, so a resumed
    trial repeats the same augmentation with any number of workers. A generator that the dataset owns is not seeded.

    A dataset with a method `set_epoch(epoch)`, even one that is wrapped in another (`Subset`, `ConcatDataset`), is
    given each epoch's number in training, before the first record of that epoch is loaded. This happens in every
    process, including worker processes, and in a resumed run before its first record. The epoch is the `epoch_idx` of
    `train_batch`. Use it for curricula and for augmentation that changes. Other changes to the dataset after training
    has started do not reach worker processes. What `set_epoch` draws from the global RNGs is the same in all processes.

    If the number of processes changes (`resources.slots_per_trial: {min, max}`, or a checkpoint resumed on more or
    fewer slots), each step still trains on the same records: every record once per epoch, in the same global batches.
    The records move between processes, so dropout and augmentation draw other random numbers, which the trial's seed
    still determines. With a `batch_sampler`, each process takes every size-th batch, so the global batch grows or
    shrinks.

    An `IterableDataset` is read by torchdata's `StatefulDataLoader`, and checkpoints have its position: see
    docs/streaming.md.

    Args:
        dataset: a map-style dataset, with `__len__` and `__getitem__`; or an `IterableDataset`.
        batch_size: records per batch on this slot: `context.get_per_slot_batch_size()`. With the default `collate_fn`
            a record's tensor of shape (...) becomes one of shape (batch_size, ...). The last batch of an epoch may be
            smaller, unless `drop_last` is set.
        generator: seeds `shuffle=True` in place of the trial's seed. Training derives each epoch's order from its
            initial seed; outside training each pass draws from it.
        (others): as in torch.

    Raises:
        ValueError: the arguments are a combination that torch refuses, there is neither a batch_size nor a
            batch_sampler, or the dataset is an `IterableDataset` and torchdata is not installed.
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
        self._is_stream = isinstance(dataset, IterableDataset)
        if self._is_stream:
            if importlib.util.find_spec("torchdata") is None:
                raise ValueError(
                    "pytorch.DataLoader needs torchdata to continue within an IterableDataset: pip install "
                    "'dray-train[data]', or use a map-style dataset"
                )
            if shuffle or sampler is not None or batch_sampler is not None:
                raise ValueError(
                    "an IterableDataset gives its records in its own order: leave out shuffle, sampler and "
                    "batch_sampler, and shuffle in the dataset"
                )
        elif sampler is None and batch_sampler is None and not hasattr(type(dataset), "__len__"):
            raise TypeError(
                "pytorch.DataLoader needs a dataset with __len__ and __getitem__, or an instance of torch's "
                f"IterableDataset; got {dataset!r}"
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
        elif batch_size is None and not self._is_stream:
            raise ValueError("batch_size=None needs a batch_sampler, because training counts batches")
        elif batch_size is not None and (not is_int(batch_size) or batch_size < 1):
            raise ValueError(f"batch_size must be an int >= 1, got {batch_size!r}")
        self.dataset, self.batch_size, self.drop_last = dataset, batch_size, drop_last
        self.shuffle, self.sampler, self.batch_sampler, self.generator = shuffle, sampler, batch_sampler, generator
        self.num_workers, self.worker_init_fn, self.timeout = num_workers, worker_init_fn, timeout
        self.multiprocessing_context, self.persistent_workers = multiprocessing_context, persistent_workers
        self.collate_fn, self.pin_memory, self.prefetch_factor = collate_fn, pin_memory, prefetch_factor
        # Set by the trainer; None outside training: the trial's seed, and the epoch of a batch by its number.
        self.seed: int | None = None
        self.epoch_of: Callable[[int], int] | None = None

    def get_data_loader(
        self, repeat: bool = False, skip: int = 0, num_replicas: int = 1, rank: int = 0
    ) -> torch.utils.data.DataLoader[Any]:
        """Make a torch DataLoader over a replica's shard: repeated, then sharded by whole batches, then skipped.

        Args:
            repeat: repeat the data endlessly.
            skip: number of this replica's batches to leave out at the beginning.
            num_replicas, rank: take every num_replicas-th batch, beginning with the rank-th.

        Raises:
            ValueError: rank is negative, or not below num_replicas.
        """
        shard, seed = Shard(repeat=repeat, skip=skip, num_replicas=num_replicas, rank=rank), self._shuffle_seed()
        if self._is_stream:
            if repeat or skip:
                raise ValueError("an IterableDataset can't be repeated or skipped outside of training")
            return self._stream_loader(num_replicas, rank)
        return self._torch_loader(self._batches(shard, seed), shard, seed)

    def _epoch_length(self, division: Division, num_replicas: int) -> int:
        """The chief's batches per epoch with `num_replicas`, in a trial that began with this division of the data."""
        now = Division(replicas=num_replicas, batch_size=self.batch_size)
        if division == now or not division.same_global_batch(now):
            return len(self._batches(Shard(num_replicas=num_replicas)))
        whole = self._batches(WHOLE, batch_size=division.batch_size)
        return len(ReshardedBatches(whole, replicas=division.replicas, num_replicas=num_replicas, rank=0))

    def _resharded(
        self, division: Division, *, skip: int, num_replicas: int, rank: int
    ) -> torch.utils.data.DataLoader[Any]:
        """Like `get_data_loader(repeat=True, ...)`, but with the global batches of an earlier division of the data, for
        a run that is resumed with another number of processes."""
        seed, replicas = self._shuffle_seed(), division.replicas
        whole = self._batches(Shard(repeat=True, skip=skip * replicas), seed, division.batch_size)
        batches = ReshardedBatches(whole, replicas=replicas, num_replicas=num_replicas, rank=rank)
        shard = Shard(repeat=True, skip=skip, num_replicas=num_replicas, rank=rank)
        return self._torch_loader(batches, shard, seed)

    def __iter__(self) -> Iterator[Any]:
        """Iterate over all the data once. Outside training, `shuffle=True` gives each pass a new order, as in torch."""
        if self._is_stream:
            return iter(self._stream_loader(1, 0))
        seed = drawn_seed(self.generator) if self.seed is None else self._shuffle_seed()
        return iter(self._torch_loader(self._batches(WHOLE, seed), WHOLE, seed))

    def __len__(self) -> int:
        """The number of batches in one pass over all the data."""
        return len(self._stream_loader(1, 0) if self._is_stream else self._batches(WHOLE))

    @property
    def _shuffles(self) -> bool:
        """Whether each epoch has a new order, as with `shuffle=True`."""
        return self.shuffle or _is_shuffle(self.sampler)

    def _set_epoch(self, epoch: int) -> None:
        set_epoch(self.dataset, epoch, self.seed or 0)

    def _stream_loader(self, num_replicas: int, rank: int) -> torch.utils.data.DataLoader[Any]:
        options = self._options()
        # Not persistent workers: they would not learn of `set_epoch`.
        return stateful_loader(  # type: ignore[no-any-return]
            self.dataset, num_replicas, rank, batch_size=self.batch_size, drop_last=self.drop_last, **options
        )

    def _options(self) -> dict[str, Any]:
        return {
            "num_workers": self.num_workers,
            "collate_fn": self.collate_fn,
            "pin_memory": self.pin_memory,
            "timeout": self.timeout,
            "worker_init_fn": self.worker_init_fn,
            "multiprocessing_context": self.multiprocessing_context,
            "prefetch_factor": self.prefetch_factor,
        }

    def _torch_loader(self, batches: Any, shard: Shard, seed: int) -> torch.utils.data.DataLoader[Any]:
        workers_seed = Random(f"{seed}:workers:{shard.rank}").getrandbits(63)
        if self.num_workers > 0:
            epoch_of = self.epoch_of if shard.repeat else None  # only training has epochs
            batches = WorkerBatches(
                batches, seed=workers_seed, first=shard.skip, epoch_of=epoch_of, epoch_seed=self.seed or 0
            )
        # Torch draws a seed for its workers from this generator. Its default, the global one, is also the model's.
        generator = torch.Generator()
        generator.manual_seed(workers_seed)
        return TorchLoader(
            self.dataset,
            batch_sampler=batches,
            generator=generator,
            persistent_workers=self.persistent_workers,
            **self._options(),
        )

    def _batches(self, shard: Shard, seed: int = 0, batch_size: int | None = None) -> Any:
        """The batches of a shard, as lists of records; `batch_size` overrides the loader's."""
        batch_size = batch_size or self.batch_size
        records = _indexable(self.dataset, self.sampler) if self.batch_sampler is None else None
        if records is not None:
            assert batch_size is not None
            return NumberedBatches(
                records=records,
                batch_size=batch_size,
                drop_last=self.drop_last,
                seed=seed if self._shuffles else None,
                shard=shard,
            )
        batches = SampledBatches(
            self.sampler if self.batch_sampler is None else self.batch_sampler,
            batch_size=batch_size,
            drop_last=self.drop_last,
            repeat=shard.repeat,
            first=shard.skipped,
            seed=seed,
            shared=shard.num_replicas > 1,
        )
        return batches if shard.num_replicas == 1 else DistributedBatchSampler(batches, shard.num_replicas, shard.rank)

    def _shuffle_seed(self) -> int:
        if self.generator is not None:
            return self.generator.initial_seed()
        if self.seed is not None:
            return self.seed
        return drawn_seed()  # outside training: as torch's RandomSampler


def _indexable(dataset: Any, sampler: Any) -> Sequence[Any] | None:
    """The records in order, if the sampler's positions can be looked up directly; else None."""
    if sampler is None:
        return range(len(dataset))
    if type(sampler) is SequentialSampler or _is_shuffle(sampler):
        return range(len(sampler))
    return sampler if isinstance(sampler, (range, list, tuple)) else None


def _is_shuffle(sampler: Any) -> bool:
    """Whether the sampler is equivalent to the one that torch makes for shuffle=True."""
    if type(sampler) is not RandomSampler or sampler.replacement or sampler.generator is not None:
        return False
    return len(sampler) == len(sampler.data_source)
