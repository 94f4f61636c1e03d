"""Training data from a loader that keeps its own position, such as torchdata's `StatefulDataLoader`."""

from __future__ import annotations

import copy
import hashlib
import logging
from collections.abc import Mapping
from random import Random
from typing import Any

import torch

from dray.pytorch.batches import set_epoch
from dray.pytorch.samplers import samplers_in
from dray.training import rng
from dray.training.checkpoint.plain_state import check_savable
from dray.training.parallel import ddp
from dray.training.parallel.distributed import DistributedContext

log = logging.getLogger(__name__)

_END = object()  # of a pass over the data


def keeps_position(loader: Any) -> bool:
    return callable(getattr(loader, "state_dict", None)) and callable(getattr(loader, "load_state_dict", None))


class Stream:
    """The endless batches of a loader that keeps its own position: one pass over its data after another.

    On several ranks a pass ends when any rank's loader ends, at the same batch on all of them. If all loaders have a
    length, that is the shortest one; otherwise the ranks agree on it in a collective before each batch.

    A position is the loader's state after a batch, and the number of batches to draw from there. That number is 0
    unless a rank left in the middle of a batch, or the loader's own state is not exact (see `_is_exact`).

    Args:
        begin: the number of batches that were trained before.
        seed: the trial's, from which a loader's own draws at the start of a pass follow.
        sharing: the number of neighbouring ranks with the same data.
        global_batch: records of a global batch, if these are always the next ones of the whole stream.
    """

    def __init__(
        self,
        loader: Any,
        *,
        begin: int,
        seed: int,
        peers: DistributedContext,
        device: torch.device,
        sharing: int = 1,
        global_batch: int | None = None,
    ) -> None:
        self._loader, self._seed, self._peers, self._device = loader, seed, peers, device
        self._sharing, self._global_batch = sharing, global_batch
        self._is_exact = _is_exact(getattr(loader, "dataset", None))
        if isinstance(loader, torch.utils.data.DataLoader) and loader.generator is None:
            # For the seed of its workers: MosaicML's loader draws that only with the first batch of a run.
            workers_seed = Random(f"{seed}:workers:{peers.rank // sharing}").getrandbits(63)
            loader.generator = torch.Generator().manual_seed(workers_seed)
        generator = getattr(loader, "generator", None)
        self._order_seed = None if generator is None else generator.initial_seed()
        self._length: int | None = None  # of a pass, in batches; None: unknown
        self._ends_at: int | None = None  # the same of the current pass
        self._batches: Any = None  # the iterator of that pass
        self._pass = self._batch = 0  # the number of that pass, and of batches drawn from it
        self._begin = self._drawn = begin  # in total, with one that is being drawn
        self._said: set[str] = set()
        self._resume: Any = None  # the loader's state at which the first pass begins

    def agree(self) -> None:
        """Find the length of a pass, with all ranks together."""
        ranks = self._peers.allgather(_length(self._loader))
        lengths = [length for length in ranks if length is not None]
        self._length = self._ends_at = min(lengths) if len(lengths) == len(ranks) else None
        self._set_mark(None, self._begin)
        if self._length is not None and len(set(lengths)) > 1 and self._peers.rank == 0:
            log.warning(
                "the ranks' training loaders have %s batches: each epoch ends after %d, and the rest is not trained",
                lengths,
                self._length,
            )

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError("the training loader has no length")
        return self._length

    def state_dict(self, trained: int) -> dict[str, Any]:
        """The position after this number of batches in total, as plain data."""
        if self._is_exact and self._begin < self._drawn == trained:
            self._set_mark(copy.deepcopy(self._loader.state_dict()), trained)
        skip = trained - self._marked_at
        return {**self._mark, "skip": skip, "global_batch": self._global_batch}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._pass, self._batch, self._drawn = state["pass"], state["batch"], self._begin - state["skip"]
        self._resume = state["loader"]
        if state["length"] != self._length:  # with another batch size, or other data
            self._ends_at = None
        self._set_mark(self._resume, self._drawn)

    def load_divided_anew(self, state: Mapping[str, Any], before: int, now: int) -> None:
        """Load the position of another number of ranks: by drawing the batches of the pass again, if they have the same
        records, and otherwise only between two passes."""
        drawn = state["batch"] + state["skip"]
        if state["global_batch"] is not None and state["global_batch"] == self._global_batch:
            self._pass, self._drawn = state["pass"], self._begin - drawn
        elif self._length is not None and drawn == state["length"] and self._begin % self._length == 0:
            self._pass = self._begin // self._length
        else:
            raise ValueError(
                f"the checkpoint has the positions of {before} ranks in the training data, and this run has {now}: a "
                "stream can be divided anew only between two epochs of known length; resume with as many ranks as "
                "before, or from a checkpoint at the end of an epoch"
            )
        self._set_mark(None, self._drawn)

    def _set_mark(self, state: Any, drawn: int) -> None:
        """Remember the position after so many batches in total."""
        self._mark = {"pass": self._pass, "batch": self._batch, "loader": state, "length": self._ends_at}
        self._marked_at = drawn

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Any:
        if self._drawn > self._begin:
            return self._draw()
        # Drawn again to reach the position; the trial's random numbers stay those of the checkpoint.
        with rng.seeded(self._seed):
            while self._drawn < self._begin:
                self._draw()
        first = self._draw()
        self._check(first)
        return first

    def _draw(self) -> Any:
        self._drawn += 1
        while True:
            batch = self._begin_pass() if self._batches is None else next(self._batches, _END)
            if batch is _END and self._batch == 0:
                # After a resume at the end of a pass, an IterableDataset may still be at that end in the next one:
                # torchdata does not ask it for a record that would follow.
                batch = self._begin_pass()
            if self._continues(batch is not _END):
                self._batch += 1
                return batch
            if self._batch == 0:
                raise RuntimeError(
                    "the training data is empty: the loader of build_training_data_loader() ended without a batch"
                )
            self._pass, self._batch, self._batches, self._ends_at = self._pass + 1, 0, None, self._length
            if not self._is_exact:
                self._set_mark(None, self._drawn - 1)

    def _check(self, first: Any) -> None:
        """Check the loader's state at the first batch, since an error at the first checkpoint would come late; and that
        ranks have different batches."""
        if self._is_exact:
            check_savable({"state_dict() of the training loader": self._loader.state_dict()})
        if self._peers.size > 1:
            digests = self._gather(_digest(first))[:: self._sharing]
            if self._peers.rank == 0 and len(set(digests)) < len(digests):
                self._say(
                    "several ranks have the same first batch of training data: a loader of your own must give each "
                    "rank its part, by context.distributed.get_rank(); pytorch.DataLoader does"
                )

    def _gather(self, number: int) -> list[int]:
        return ddp.gather_numbers(number, self._peers.rank, self._peers.size, self._device)

    def _begin_pass(self) -> Any:
        """Begin the next pass, or the resumed one, and draw its first batch."""
        loader, state, self._resume = self._loader, self._resume, None
        if getattr(loader, "persistent_workers", False):
            loader._iterator = None  # torchdata's: its workers would keep what a resumed run's don't have
        sources = [loader]
        if not callable(getattr(loader, "set_epoch", None)):
            samplers = samplers_in(getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None))
            sources = [getattr(loader, "dataset", None), *samplers]
        for source in sources:
            set_epoch(source, self._pass, self._seed)
        if self._order_seed is not None:  # after a resume, torchdata's next pass would begin from another state
            seed = Random(f"{self._order_seed}:pass:{self._pass}").getrandbits(63) if self._pass else self._order_seed
            loader.generator.manual_seed(seed)
        # Samplers draw their order here, and a generator, which starts with the first batch, its own: both must be the
        # same in a resumed run, where torchdata draws the batches before its own again here.
        try:
            with rng.seeded(Random(f"{self._seed}:pass:{self._pass}").getrandbits(63)):
                if state is not None:
                    loader.load_state_dict(copy.deepcopy(state))
                self._batches = iter(loader)
                if state is None:
                    return next(self._batches, _END)
            return next(self._batches, _END)
        except Exception as error:
            if state is None:
                raise
            raise ValueError(
                f"the training loader can't continue from its state in the checkpoint: {error!r}; resume with the same "
                "loader, data set and number of workers"
            ) from error

    def _continues(self, has_batch: bool) -> bool:
        """Whether the pass continues on all ranks."""
        rank, size = self._peers.rank, self._peers.size
        if self._ends_at is None:
            ranks = [has_batch] if size == 1 else self._gather(has_batch)
            if rank == 0 and any(ranks) and not all(ranks):
                self._say(
                    "ranks %s still have data at the end of the pass, which the others have trained to the end: at "
                    "least a batch each is not trained",
                    [rank for rank, has in enumerate(ranks) if has],
                )
            return all(ranks)
        if self._batch == self._ends_at:
            if has_batch and _length(self._loader) == self._length:
                self._say(
                    "the training loader has more batches than its length, %d: the rest is not trained", self._length
                )
            return False
        if not has_batch and size > 1:
            raise RuntimeError(
                f"the training loader of rank {rank} ended after {self._batch} batches, but has a length of "
                f"{self._length}: the other ranks would wait for it; correct its length, or give it none, and set "
                "records_per_epoch in the config"
            )
        if not has_batch:
            self._say(
                "the training loader ended after %d batches, but has a length of %d: it begins again within an epoch",
                self._batch,
                self._length,
            )
        return has_batch

    def _say(self, message: str, *arguments: Any) -> None:
        if message not in self._said:
            self._said.add(message)
            log.warning(message, *arguments)

    def _shutdown_workers(self) -> None:
        """Named like that of torch's iterators: see `loaders.iterating`."""
        shutdown = getattr(self._batches, "_shutdown_workers", None)
        if shutdown is not None:
            shutdown()


def _length(loader: Any) -> int | None:
    try:
        return len(loader)
    except TypeError:
        return None


def _digest(batch: Any) -> int:
    return int.from_bytes(hashlib.sha256(repr(batch).encode()).digest()[:7], "little")


def _is_exact(dataset: Any) -> bool:
    """Whether a data set continues exactly from its own state. Those of Hugging Face forget what is in a shuffle
    buffer, so that they are read again from the start of the pass."""
    parts = [getattr(dataset, "_ex_iterable", None)]
    for part in parts:  # grows during the loop
        if type(part).__name__ == "BufferShuffledExamplesIterable":
            return False
        if part is not None:
            parts += [getattr(part, "ex_iterable", None), *getattr(part, "ex_iterables", ())]
    return True


def stateful_loader(dataset: Any, num_replicas: int, rank: int, **arguments: Any) -> Any:
    """A torchdata loader over a replica's share of an `IterableDataset`."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(_share(dataset, num_replicas, rank), **arguments)


def global_batch(loader: Any, num_replicas: int) -> int | None:
    """The records of a global batch, if a `pytorch.DataLoader` divides its stream record by record; else None."""
    dataset = loader.dataset
    if loader.num_workers > 0 or loader.batch_size is None or not _is_hugging_face(dataset) or dataset._distributed:
        return None
    # As split_dataset_by_node: other numbers of files are divided by file.
    by_record = num_replicas == 1 or dataset.num_shards % num_replicas > 0
    return loader.batch_size * num_replicas if by_record else None


def _is_hugging_face(dataset: Any) -> bool:
    return type(dataset).__module__ == "datasets.iterable_dataset"


def _share(dataset: Any, num_replicas: int, rank: int) -> Any:
    if num_replicas == 1:
        return dataset
    if _is_hugging_face(dataset):
        from datasets.distributed import split_dataset_by_node

        is_divided = dataset._distributed is not None  # by the trial's code
        return dataset if is_divided else split_dataset_by_node(dataset, rank=rank, world_size=num_replicas)
    shard = getattr(dataset, "shard", None)
    if callable(shard) and (part := shard(num_shards=num_replicas, index=rank)) is not None:
        return part
    raise ValueError(
        f"{num_replicas} slots can't share {type(dataset).__qualname__}, which does not say how it is divided: give it "
        "a method shard(num_shards, index) that returns a part of it, or divide it by context.distributed.get_rank() "
        "and return a torchdata StatefulDataLoader"
    )
