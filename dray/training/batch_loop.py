"""The hot path: the loop over one rank's training batches. It runs ahead of the device."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from dray.text import counted
from dray.training.errors import DataExhausted
from dray.training.metrics.training import TrainingMetrics
from dray.training.parallel.agreement import Agreement
from dray.training.trial import Rank, by_name, epoch_start_of
from dray.training.usage import Usage, count_flops

log = logging.getLogger(__name__)

_END = object()  # of the data


@dataclass(kw_only=True, eq=False)
class BatchLoop:
    """Trains on batches, and advances the position. `Executor` describes the fields."""

    rank: Rank
    data: Iterator[Any]
    agreement: Agreement
    metrics: TrainingMetrics
    usage: Usage
    profiler: Any = None
    set_epoch: Callable[[int], None] | None = None

    def __post_init__(self) -> None:
        train_batch = by_name(self.rank.trial.train_batch, "batch", "epoch_idx", "batch_idx")
        self._train_batch = self.rank.optimisation.forward(train_batch)
        if self.rank.optimisation.has_sharded:
            self._train_batch = self.usage.steps.waiting()(self._train_batch)
        if self.usage.flops_per_record == "count":
            self._train_batch = partial(self._count_flops, self._train_batch)
        if self.profiler is not None:
            self.data = _recorded(self.data)
        self._epoch_starts = [epoch_start_of(callback) for callback in self.rank.callbacks.values()]
        if self.set_epoch is not None:
            self._epoch_starts.insert(0, self.set_epoch)
            position = self.rank.position
            if not position.starts_epoch(position.trained):  # resumed within an epoch, whose start hooks have run
                self.set_epoch(position.epoch_of(position.trained))

    def train(self, until: int) -> list[Any]:
        """Train until `until` batches have been trained in total, or to the batch at which the ranks agree to stop.

        Returns:
            This rank's contributions to the reducers.

        Raises:
            DataExhausted: the data ended before.
        """
        self.rank.optimisation.training_mode()
        self._train(until)
        self.rank.optimisation.reshard()
        return self.rank.reducers.per_slot(training=True)

    def _train(self, until: int) -> None:
        rank, position, optimisation = self.rank, self.rank.position, self.rank.optimisation
        epoch_length = position.epoch_length or 0
        epoch_idx, batch_in_epoch = divmod(position.trained, epoch_length) if epoch_length else (0, position.trained)
        waited_s, records, tokens, steps = 0.0, 0, 0, self.usage.steps
        steps.begin()
        if self.agreement.stop_at <= position.trained and self.agreement.must_stop(position.trained):
            return
        try:
            for batch_idx in range(position.trained, until):
                position.batch_idx = batch_idx
                if batch_in_epoch == 0:
                    # Before the epoch's first batch is drawn: these hooks may change the data set.
                    for epoch_start in self._epoch_starts:
                        epoch_start(epoch_idx)
                since = time.perf_counter()
                if (batch := next(self.data, _END)) is _END:
                    break
                waited_s += time.perf_counter() - since
                records += rank.batch_length(batch)  # raises if the batch is empty or of an unknown type
                if rank.batch_tokens is not None:
                    if (count := rank.batch_tokens(batch)) is None:
                        raise TypeError("get_batch_tokens() must return a number, the tokens in the batch; got None")
                    tokens += count
                if rank.to_device is not None:
                    batch = rank.to_device(batch)
                if optimisation.aggregation_frequency > 1:
                    optimisation.before_batch()
                self.metrics.add(self._train_batch(batch=batch, epoch_idx=epoch_idx, batch_idx=batch_idx))
                if optimisation.lr_schedulers or optimisation.amp is not None:
                    optimisation.after_batch(batch_idx)
                if self.profiler is not None:
                    self.profiler.step()
                steps.end_step()
                position.trained = batch_idx + 1
                batch_in_epoch += 1
                if batch_in_epoch == epoch_length:
                    for callback in rank.callbacks.values():
                        callback.on_training_epoch_end(epoch_idx)
                    epoch_idx, batch_in_epoch = epoch_idx + 1, 0
                # Stop before the next batch is drawn, which may draw random numbers that belong to the resumed run.
                if self.agreement.stop_at <= batch_idx + 1 and self.agreement.must_stop(batch_idx + 1):
                    return
        finally:
            self.usage.trained(records, tokens, waited_s)
        if position.trained < until:
            raise DataExhausted(
                f"the training data ended after {counted(position.trained, 'batch')}, but training continues to "
                f"{until} or more; return a pytorch.DataLoader, or repeat the data yourself (see "
                "samplers.RepeatBatchSampler)"
            )

    def _count_flops(self, train_batch: Callable[..., Any], *, batch: Any, **at: int) -> Any:
        self._train_batch = train_batch
        records = self.rank.batch_length(batch)
        metrics, flops = count_flops(partial(train_batch, batch=batch, **at))
        self.usage.flops_per_record = flops / records
        log.info("training takes %.4g FLOPs a record, forward and backward", flops / records)
        return metrics


def _recorded(batches: Iterator[Any]) -> Iterator[Any]:
    """The batches; the profiler's trace shows the wait for each under the name that torch uses for its own loaders."""
    while True:
        with torch.profiler.record_function("enumerate(DataLoader)#next"):
            batch = next(batches, _END)
        if batch is _END:
            return
        yield batch
