"""A trial's data loaders: this process's share of the data, from where training begins, in the trial's order."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from dray.pytorch.context import PyTorchTrialContext
from dray.pytorch.data import DataLoader
from dray.pytorch.trial import PyTorchTrial
from dray.training.checkpoint import determined, files
from dray.training.parallel.division import Division
from dray.training.position import Position

log = logging.getLogger(__name__)


def training_loader(
    trial: PyTorchTrial, context: PyTorchTrialContext, directory: Path | None
) -> tuple[Any, Division | None]:
    """The training data from the run's first batch on, and how they were divided when the trial started."""
    loader: Any = trial.build_training_data_loader()
    if not isinstance(loader, DataLoader):
        _check_allowed(loader, context, "build_training_data_loader")
        return loader, None
    loader.seed = context.get_trial_seed()
    peers, position = context.distributed, context._position
    now = Division(replicas=peers.size, batch_size=loader.batch_size)
    before = _first_division(now, context, directory)
    if loader._shuffles and directory is not None and determined.is_determined(directory):
        _back_to_epoch_start(position, loader._epoch_length(before, peers.size))
    skip = position.initial_batch
    if before != now and before.same_global_batch(now):
        return loader._divided_anew(before, skip=skip, num_replicas=peers.size, rank=peers.rank), before
    if before != now:
        log.warning(
            "the checkpoint was written with %s, this run has %s: steps no longer train on the same records",
            before,
            now,
        )
    return loader.get_data_loader(repeat=True, skip=skip, num_replicas=peers.size, rank=peers.rank), now


def _back_to_epoch_start(position: Position, epoch_length: int) -> None:
    """Repeat an epoch of Determined's that was interrupted: its order is not in the checkpoint."""
    saved = position.initial_batch
    saved = position.initial_batch
    if rest := saved % epoch_length:
        position.start(saved - rest)
        log.warning(
            "the checkpoint, which Determined wrote after batch %d, does not contain the order of its shuffled data: "
            "training resumes at the start of epoch %d, batch %d",
            saved,
            saved // epoch_length,
            position.initial_batch,
        )


def _first_division(now: Division, context: PyTorchTrialContext, directory: Path | None) -> Division:
    """How the trial divided its data when it started, as far as known."""
    if directory is not None and (before := files.read_division(directory)) is not None:
        # Determined's checkpoint has the number of slots only: the batch size is taken as unchanged.
        return now if determined.is_determined(directory) and before.replicas == now.replicas else before
    resources = (context._exp_conf or {}).get("resources") or {}
    if isinstance(resources.get("slots_per_trial"), dict) and now.batch_size is not None:
        # However many processes it starts with, its batches are those of a single process.
        return Division(replicas=1, batch_size=now.replicas * now.batch_size)
    return now


def validation_loader(trial: PyTorchTrial, context: PyTorchTrialContext, *, full_dataset: bool) -> Any:
    """This process's share of the validation data; with `full_dataset` all of it on the chief, None on the others."""
    peers = context.distributed
    loader: Any = trial.build_validation_data_loader()
    if not isinstance(loader, DataLoader):
        _check_allowed(loader, context, "build_validation_data_loader")
        return loader
    loader.seed = context.get_trial_seed()
    if full_dataset:
        return loader.get_data_loader() if peers.rank == 0 else None
    return loader.get_data_loader(num_replicas=peers.size, rank=peers.rank)


def _check_allowed(loader: Any, context: PyTorchTrialContext, method: str) -> None:
    if context.experimental._reproducibility_checks:
        raise RuntimeError(
            f"{method}() must return a pytorch.DataLoader, which can shard the data and resume within it; got "
            f"{type(loader).__module__}.{type(loader).__qualname__}. To use another loader, call "
            "context.experimental.disable_dataset_reproducibility_checks() in the trial's constructor, and repeat, "
            "shard and skip the data yourself (see pytorch.samplers)"
        )


def epoch_length(loader: Any, context: PyTorchTrialContext) -> int | None:
    """What `batches_per_epoch` of the chief's `training_loader` will be, from the trial's own loader."""
    if not isinstance(loader, DataLoader):
        return batches_per_epoch(loader, context)
    size = context.distributed.size
    began = _first_division(Division(replicas=size, batch_size=loader.batch_size), context, None)
    return _length_or_configured(lambda: loader._epoch_length(began, size), context)


def batches_per_epoch(loader: Any, context: PyTorchTrialContext) -> int | None:
    """The loader's length; else that of the config's records_per_epoch; None if there is neither."""
    return _length_or_configured(lambda: len(loader), context)


def _length_or_configured(length: Callable[[], int], context: PyTorchTrialContext) -> int | None:
    try:
        return length()
    except TypeError:
        records = (context._exp_conf or {}).get("records_per_epoch")
        if not records or context._global_batch_size is None:
            return None
        # As in Determined, the remainder makes no batch.
        return max(1, int(records) // context._global_batch_size)


@contextlib.contextmanager
def iterating(loader: Any) -> Iterator[Iterator[Any]]:
    """An iterator over a loader, whose worker processes end with the block, also after an error."""
    iterator = iter(loader)
    try:
        yield iterator
    finally:
        shutdown = getattr(iterator, "_shutdown_workers", None)
        if shutdown is not None:
            shutdown()
