"""A trial's data loaders: this process's share of the data in the trial's order, from the first batch to train."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from dray.pytorch.data import DataLoader
from dray.pytorch.samplers import samplers_in
from dray.pytorch.streams import Stream, global_batch, keeps_position
from dray.pytorch.trial_run import TrialRun
from dray.storage import determined_state
from dray.training import rng
from dray.training.checkpoint import files
from dray.training.parallel import ddp
from dray.training.parallel.mesh import Division
from dray.training.units import is_int

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingData:
    """This rank's share of the training data, from the batch numbered `begin` on."""

    batches: Any
    division: Division | None  # at the trial's start; None with a loader of the user's own
    begin: int
    set_epoch: Callable[[int], None] | None = None  # gives the data set an epoch's number in this process


def training_data(loader: Any, run: TrialRun, resumed: Path | None) -> TrainingData:
    """The training data from the run's first batch on; `loader` is the result of `build_training_data_loader()`."""
    begin = run.position.initial_batch
    is_own, given, loader = not isinstance(loader, DataLoader), loader, _stateful(loader, run)
    if keeps_position(loader) and (run.checks_loaders or not is_own):
        stream = Stream(
            loader,
            begin=begin,
            seed=run.seed,
            peers=run.peers,
            device=run.device,
            sharing=run.mesh_shape.sharing,
            global_batch=None if is_own else global_batch(given, run.replicas),
        )
        return TrainingData(batches=stream, division=None, begin=begin)
    if is_own:
        _check_allowed(loader, run, "build_training_data_loader")
        return TrainingData(batches=loader, division=None, begin=begin)
    _check_undivided(loader, run, "build_training_data_loader")
    loader.seed, loader.epoch_of = run.seed, run.position.epoch_of
    size, rank = run.replicas, run.replica
    now = Division(replicas=size, batch_size=loader.batch_size)
    before = _first_division(now, run, resumed)
    if loader._shuffles and resumed is not None and determined_state(resumed) is not None:
        begin = _epoch_start(begin, loader._epoch_length(before, size))
    if before != now and before.same_global_batch(now):
        batches = loader._resharded(before, skip=begin, num_replicas=size, rank=rank)
        return TrainingData(batches=batches, division=before, begin=begin, set_epoch=loader._set_epoch)
    if before != now:
        log.warning(
            "the checkpoint was written with %s, this run has %s: steps no longer train on the same records",
            before,
            now,
        )
    batches = loader.get_data_loader(repeat=True, skip=begin, num_replicas=size, rank=rank)
    return TrainingData(batches=batches, division=now, begin=begin, set_epoch=loader._set_epoch)


def _stateful(loader: Any, run: TrialRun) -> Any:
    """The loader, or if it is a `pytorch.DataLoader` over an `IterableDataset`, this rank's loader that keeps its
    position."""
    if isinstance(loader, DataLoader) and loader._is_stream:
        return loader.get_data_loader(num_replicas=run.replicas, rank=run.replica)
    return loader


def _epoch_start(batch: int, epoch_length: int) -> int:
    """The first batch of an epoch that Determined began, whose checkpoint does not have the order of the epoch."""
    if rest := batch % epoch_length:
        log.warning(
            "the checkpoint, which Determined wrote after batch %d, does not contain the order of its shuffled data: "
            "training resumes at the start of epoch %d, batch %d",
            batch,
            batch // epoch_length,
            batch - rest,
        )
    return batch - rest


def _first_division(now: Division, run: TrialRun, resumed: Path | None) -> Division:
    """The division of the data when the trial started, as far as known."""
    if resumed is not None and (before := files.read_division(resumed)) is not None:
        # Determined's checkpoint has only the number of slots: the batch size is assumed to be unchanged.
        return now if determined_state(resumed) is not None and before.replicas == now.replicas else before
    if isinstance(run.section("resources").get("slots_per_trial"), dict) and now.batch_size is not None:
        # An elastic trial has the batches of a single process, for any initial number of processes.
        return Division(replicas=1, batch_size=now.replicas * now.batch_size)
    return now


def validation_data(
    loader: Any, run: TrialRun, *, full_dataset: bool
) -> tuple[Any, Callable[[], Iterable[Any]] | None]:
    """This rank's share of the validation data, and a function that gives spare batches or None.

    With `full_dataset`, the share is all of the data on ranks that evaluate, and None on the others. A rank with fewer
    batches than others needs spare ones if a model is sharded, since all ranks take part in its forward passes.
    """
    sharded = run.optimisation.has_sharded
    is_own = not isinstance(loader, DataLoader)
    if is_own and not keeps_position(loader):
        _check_allowed(loader, run, "build_validation_data_loader")
    if not is_own:
        _check_undivided(loader, run, "build_validation_data_loader")
        loader.seed = run.seed
    if full_dataset:
        if run.optimisation.validates_together or run.peers.rank == 0:
            return (loader if is_own else loader.get_data_loader()), None
        return None, None
    if is_own or loader._is_stream:
        share = _stateful(loader, run)
        if not sharded or run.replicas == 1:
            return share, None
        in_step = _InStep(share, run)
        return in_step, in_step.spare
    spare = None
    if sharded and (total := len(loader)) % run.replicas and run.replica >= total % run.replicas:
        spare = partial(loader.get_data_loader, num_replicas=total, rank=0)
    return loader.get_data_loader(num_replicas=run.replicas, rank=run.replica), spare


class _InStep:
    """A rank's validation batches, of which the other ranks may have more or fewer, for a sharded model."""

    def __init__(self, loader: Any, run: TrialRun) -> None:
        self._loader, self._run = loader, run

    def __iter__(self) -> Iterator[Any]:
        self._batches = 0
        for batch in self._loader:
            self._goes_on(True)
            self._last, self._batches = batch, self._batches + 1
            yield batch

    def spare(self) -> Iterator[Any]:
        """The last batch, for as long as other ranks have more."""
        while self._goes_on(False):
            yield self._last

    def _goes_on(self, has_batch: bool) -> bool:
        peers = self._run.peers
        ranks = ddp.gather_numbers(has_batch, peers.rank, peers.size, self._run.device)
        if self._batches == 0 and any(ranks) and not all(ranks):
            without = [rank for rank, has in enumerate(ranks) if not has]
            raise RuntimeError(
                f"ranks {without} have no batch of validation data, and all ranks take part in a forward pass of a "
                "sharded model: give each rank a batch or more"
            )
        return any(ranks)


def _check_allowed(loader: Any, run: TrialRun, method: str) -> None:
    if run.checks_loaders:
        raise RuntimeError(
            f"{method}() must return a pytorch.DataLoader, which can shard the data and resume within it, or a loader "
            f"with state_dict() and load_state_dict(), such as torchdata's StatefulDataLoader; got "
            f"{type(loader).__module__}.{type(loader).__qualname__}. To use another loader, call "
            "context.experimental.disable_dataset_reproducibility_checks() in the trial's constructor, and repeat, "
            "shard and skip the data yourself (see pytorch.samplers)"
        )


def _check_undivided(loader: DataLoader, run: TrialRun, method: str) -> None:
    """Check that the loader's sampler does not itself divide the data among processes."""
    if run.peers.size == 1:
        return
    for sampler in samplers_in(loader.sampler, loader.batch_sampler):
        for name in ("num_replicas", "num_processes", "world_size", "_world_size"):
            parts = getattr(sampler, name, 1)
            if is_int(parts) and parts > 1:
                raise ValueError(
                    f"{method}(): the loader's {type(sampler).__qualname__} gives each process a part of the data "
                    f"({name}={parts}), and pytorch.DataLoader divides that part again; leave the sampler out "
                    "(shuffle=True shuffles), or pass one that gives all records, in the same order on all ranks"
                )


def epoch_length(loader: Any, run: TrialRun) -> int | None:
    """The epoch length that the chief's `training_data` will have, from the trial's own loader."""
    loader = _stateful(loader, run)
    if not isinstance(loader, DataLoader):
        return batches_per_epoch(loader, run)
    began = _first_division(Division(replicas=run.replicas, batch_size=loader.batch_size), run, None)
    return batches_per_epoch(loader, run, lambda: loader._epoch_length(began, run.replicas))


def batches_per_epoch(batches: Any, run: TrialRun, length: Callable[[], int] | None = None) -> int | None:
    """The loader's number of batches, or else the config's records_per_epoch in batches; None if there is neither."""
    try:
        return len(batches) if length is None else length()
    except TypeError:
        records = (run.config or {}).get("records_per_epoch")
        if not records or run.global_batch_size is None:
            return None
        # As in Determined, the remainder is dropped.
        return max(1, int(records) // run.global_batch_size)


@contextlib.contextmanager
def iterating(loader: Any, seed: int) -> Iterator[Iterator[Any]]:
    """Yield an iterator over a loader, whose worker processes end with the block, even after an error. What a loader of
    the user's own draws at the start (torch's draws a seed for its workers) is the same in a resumed run."""
    with rng.seeded(seed):
        iterator = iter(loader)
    try:
        yield iterator
    finally:
        shutdown = getattr(iterator, "_shutdown_workers", None)
        if shutdown is not None:
            shutdown()
