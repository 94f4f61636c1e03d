"""Batch processing: one pass over a dataset on all slots of a trial, for inference, embeddings or statistics."""

from __future__ import annotations

import abc
import contextlib
import logging
import math
from collections.abc import Iterator, Mapping, Sized
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.utils.data import Dataset

from dray import core
from dray.core import DistributedContext
from dray.pytorch.batch_functions import to_device
from dray.pytorch.data import DataLoader
from dray.storage import Location, RemoteDirectory
from dray.storage.disk import scratch
from dray.storage.manifest import MANIFEST
from dray.training.cluster_info import current_cluster_info
from dray.training.metrics.reducers import ReducerRegistry
from dray.training.parallel.device import own_device
from dray.training.parallel.exchange import all_or_none
from dray.training.units import is_int

log = logging.getLogger(__name__)

M = TypeVar("M", bound=torch.nn.Module)

_NOT_ALLOWED = {
    "sampler": "the batches are distributed over the slots in the dataset's order",
    "batch_sampler": "the batches are distributed over the slots in the dataset's order",
    "shuffle": "a run that is resumed must find the batches in the same order",
}


class TorchBatchProcessorContext:
    """The context of a `TorchBatchProcessor`, made by `torch_batch_process`."""

    def __init__(self, core_context: core.Context, outputs: Location) -> None:
        self.device = get_default_device(core_context)
        self._core = core_context
        self._outputs = outputs.child(f"rank_{core_context.distributed.rank}")
        self._reducers = ReducerRegistry(self.device)

    def get_hparams(self) -> dict[str, Any]:
        """Return the experiment's hyperparameters.

        Raises:
            RuntimeError: this is a local run, which has none.
        """
        info = current_cluster_info()
        if info is None:
            raise RuntimeError(
                "get_hparams(): a local run has no hyperparameters; start it with `dray experiment create`"
            )
        return dict(info.trial.hparams)

    def to_device(self, data: Any, warned_types: set[type] | None = None) -> Any:
        """Move data to `device`, see `pytorch.to_device`."""
        return to_device(data, self.device, warned_types)

    def get_tensorboard_path(self) -> Path:
        """Return the directory of this trial's event files and traces."""
        return self._core.train.get_tensorboard_path()

    def prepare_model_for_inference(self, model: M) -> M:
        """Move a model to `device`, and put it in eval mode."""
        return model.eval().to(self.device)

    @contextlib.contextmanager
    def upload_path(self) -> Iterator[Path]:
        """Yield a directory for this rank's results. Its files are kept beside the trial's checkpoints, in
        `outputs/rank_<rank>`, even when those are deleted. A file replaces an earlier one of the same name."""
        if self._outputs.is_local:
            self._outputs.path.mkdir(parents=True, exist_ok=True)
            yield self._outputs.path
            return
        with scratch("outputs") as directory:
            yield directory
            RemoteDirectory(self._outputs).add(directory, without=MANIFEST)

    def report_metrics(self, group: str, steps_completed: int, metrics: Mapping[str, Any]) -> None:
        """Report metrics as `core.TrainContext.report_metrics` does. Only the chief's reports count; for metrics over
        all ranks see `wrap_reducer`."""
        self._core.train.report_metrics(group, steps_completed, metrics)

    def wrap_reducer(
        self, reducer: Any, name: str | None = None, for_training: bool = True, for_validation: bool = True
    ) -> Any:
        """Add a validation metric over all ranks, see `PyTorchTrialContext.wrap_reducer`. If the run is paused, each
        part reports its own. `for_training` and `for_validation` have no effect."""
        return self._reducers.wrap_reducer(reducer, name)

    def _reduce(self, steps_completed: int) -> None:
        ranks = self._core.distributed.gather(self._reducers.per_slot(training=False))
        if ranks is not None and ranks[0]:
            metrics = self._reducers.cross_slot(ranks, training=False)
            self._core.train.report_validation_metrics(steps_completed, metrics)

    def report_task_using_model_version(self, model_version: Any) -> None:
        """Log a model version: there is no model registry."""
        self._core.experimental.report_task_using_model_version(model_version)

    def report_task_using_checkpoint(self, checkpoint: Any) -> None:
        """Log a checkpoint: there is no checkpoint registry."""
        self._core.experimental.report_task_using_checkpoint(checkpoint)

    def get_distributed_rank(self) -> int:
        """The rank of this process in the trial."""
        return self._core.distributed.rank

    def get_distributed_size(self) -> int:
        """The number of processes of the trial."""
        return self._core.distributed.size


class TorchBatchProcessor(abc.ABC):
    """Base class for the code that processes each batch."""

    @abc.abstractmethod
    def __init__(self, context: TorchBatchProcessorContext) -> None:
        """Load the model and other resources."""

    @abc.abstractmethod
    def process_batch(self, batch: Any, batch_idx: int) -> None:
        """Process one batch.

        Args:
            batch: a batch of the data loader, not yet on the device: call `context.to_device(batch)`.
            batch_idx: the number of the batch on this rank, from 0.
        """

    def on_checkpoint_start(self) -> None:  # noqa: B027
        """Called before progress is saved: write results that are in memory, as a resumed run does not repeat them."""

    def on_finish(self) -> None:  # noqa: B027
        """Called after the last batch and the last checkpoint."""


def get_default_device(core_context: core.Context) -> torch.device:
    """Return this process's GPU, or the CPU if there is none or the experiment has `resources.slot: cpu`."""
    info = core_context.info
    return own_device(core_context.distributed.local_rank, None if info is None else info.trial.config)


def torch_batch_process(
    batch_processor_cls: type[TorchBatchProcessor],
    dataset: Dataset[Any],
    batch_size: int | None = None,
    max_batches: int | None = None,
    checkpoint_interval: int = 5,
    dataloader_kwargs: Mapping[str, Any] | None = None,
    distributed_context: DistributedContext | None = None,
) -> None:
    """Process a dataset once, batch by batch, divided among all slots of the trial.

    A program that is an experiment's entrypoint is paused, resumed after failures, and shown like any other trial. Run
    by itself or under torchrun it is a local run.

    Args:
        batch_processor_cls: the class that processes batches; each slot makes one with a `TorchBatchProcessorContext`.
        dataset: a map-style dataset with a length.
        batch_size: records per batch, unless `dataloader_kwargs` has it. Default: 1.
        max_batches: the maximum number of batches per slot. Default: all.
        checkpoint_interval: save progress after every so many batches per slot.
        dataloader_kwargs: further arguments of `pytorch.DataLoader`, such as num_workers and collate_fn.
        distributed_context: the processes that divide the data. Default: all of the trial's in an experiment, otherwise
            torchrun's.

    Raises:
        ValueError: checkpoint_interval is below 1; batch_size is given twice; dataloader_kwargs has shuffle=True, a
            sampler or a batch_sampler.
        TypeError: the dataset has no length.
    """
    arguments = dict(dataloader_kwargs or {})
    if not is_int(checkpoint_interval) or checkpoint_interval < 1:
        raise ValueError(f"checkpoint_interval must be an int >= 1, got {checkpoint_interval!r}")
    for name, why in _NOT_ALLOWED.items():
        if arguments.pop(name, None):
            raise ValueError(f"dataloader_kwargs can't contain {name}: {why}; leave it out")
    if batch_size is not None and "batch_size" in arguments:
        raise ValueError("batch_size is given both as an argument and in dataloader_kwargs; leave one of them out")
    if not isinstance(dataset, Sized):
        raise TypeError(f"torch_batch_process() needs a dataset with a length, got {type(dataset).__name__}")
    arguments.setdefault("batch_size", 1 if batch_size is None else batch_size)
    with core.init(distributed=distributed_context) as core_context:
        _process(core_context, batch_processor_cls, DataLoader(dataset, **arguments), max_batches, checkpoint_interval)


def _process(
    core_context: core.Context,
    batch_processor_cls: type[TorchBatchProcessor],
    loader: DataLoader,
    max_batches: int | None,
    checkpoint_interval: int,
) -> None:
    peers = core_context.distributed
    done = 0
    if core_context.info is not None and core_context.info.latest_checkpoint is not None:
        done = core_context.checkpoint.get_metadata(core_context.info.latest_checkpoint)["steps_completed"]
        log.info("continuing after %d batches per slot", done)
    with all_or_none(peers, "starting batch processing"):
        context = TorchBatchProcessorContext(core_context, core_context.checkpoint.outputs)
        processor = batch_processor_cls(context)
        batches = iter(loader.get_data_loader(skip=done, num_replicas=peers.size, rank=peers.rank))
    # The same number on every rank, since ranks meet at each checkpoint; some have no batch in the last round.
    end = math.ceil(len(loader) / peers.size)
    if max_batches is not None and 0 < max_batches < end:
        end = max_batches
    while done < end:
        with all_or_none(peers, "processing batches"):
            upto = min(end, done + checkpoint_interval - done % checkpoint_interval)
            # The range comes first in zip(), so that no batch is drawn without being processed.
            for batch_idx, batch in zip(range(done, upto), batches, strict=False):
                processor.process_batch(batch=batch, batch_idx=batch_idx)
            done = upto
            processor.on_checkpoint_start()
        if peers.rank == 0:
            with core_context.checkpoint.store_path({"steps_completed": done}):
                log.info("processed %d of %d batches per slot", done, end)
            core_context.train.report_progress(done / end)
        if done < end and core_context.preempt.should_preempt():
            context._reduce(done)
            return
    context._reduce(done)
    with all_or_none(peers, "running on_finish()"):
        processor.on_finish()
    if peers.rank == 0:
        log.info("the files written to upload_path() are in %s", core_context.checkpoint.outputs)
