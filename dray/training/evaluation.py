"""Validation: what each rank computes over its share of the data, and the metrics of all shares."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dray.training.metrics import validation
from dray.training.metrics.reducers import Reducer, check_names
from dray.training.metrics.values import jsonable
from dray.training.rank import Rank
from dray.training.trial import by_name


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """One rank's share of a validation.

    Args:
        metrics: over its own batches.
        reduced: its values for the reducers that the trial has wrapped.
        reducers: how each metric is reduced over ranks.
        batches: the number of its batches.
    """

    metrics: Mapping[str, Any]
    reduced: list[Any]
    reducers: Mapping[str, Reducer] = field(default_factory=dict)
    batches: int = 0


@dataclass(kw_only=True, eq=False)
class Evaluation:
    """Evaluates a trial's models on one rank.

    Args:
        rank: the user's code on this rank, and what it validates.
        data: None on the ranks that don't evaluate.
        full_dataset: evaluate by `evaluate_full_dataset`, on the chief; with a sharded model on all ranks, as each has
            a part of the weights, and the chief's metrics count.
        spare: one batch for the ranks that have one less than others, who wait for them: a forward pass of a sharded
            model takes all. What comes of it does not count.

    Attributes:
        batches: how many batches of the latest validation are done.
    """

    rank: Rank
    data: Any
    full_dataset: bool
    spare: Any = None
    batches: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        trial = self.rank.trial
        evaluate_batch = by_name(
            trial.evaluate_batch, "batch", "batch_idx", required=1
        )  # as in Determined's user guide
        self._evaluate_batch = self.rank.optimisation.forward(evaluate_batch)
        self._evaluate_all = self.rank.optimisation.forward(by_name(trial.evaluate_full_dataset, "data_loader"))

    def share(self, *, test_mode: bool) -> Share:
        """Evaluate this rank's data; with `test_mode` one batch of it."""
        self.rank.reducers.reset(training=False)
        self.rank.optimisation.eval_mode()
        for callback in self.rank.callbacks.values():
            callback.on_validation_start()
        if self.full_dataset:
            found = self._of_full_dataset() if self.data is not None else {}
            return Share(metrics=found, reduced=self.rank.reducers.per_slot(training=False))
        for callback in self.rank.callbacks.values():
            callback.on_validation_epoch_start()
        rows = self._of_batches(test_mode)
        for callback in self.rank.callbacks.values():
            callback.on_validation_epoch_end(rows)
        reducers = validation.reducers_of(self.rank.trial.evaluation_reducer(), list(rows[0])) if rows else {}
        share = Share(
            metrics=validation.reduce_batches(rows, reducers),
            reduced=self.rank.reducers.per_slot(training=False),
            reducers=reducers,
            batches=len(rows),
        )
        if self.spare is not None and not (test_mode and rows):
            share = copy.deepcopy(share)  # reducers may go on with the values that they gave
            for batch in self.spare:
                self._evaluate_batch(batch=self._on_device(batch), batch_idx=len(rows))
        self.rank.optimisation.reshard()
        return share

    def _of_batches(self, test_mode: bool) -> list[dict[str, Any]]:
        metrics = validation.ValidationMetrics()
        evaluate_batch, get_batch_length = self._evaluate_batch, self.rank.trial.get_batch_length
        for batch_idx, batch in enumerate(self.data):
            get_batch_length(batch)
            metrics.add(evaluate_batch(batch=self._on_device(batch), batch_idx=batch_idx))
            self.batches = batch_idx + 1
            if test_mode:
                break
        return metrics.take()

    def _on_device(self, batch: Any) -> Any:
        return batch if self.rank.to_device is None else self.rank.to_device(batch)

    def _of_full_dataset(self) -> dict[str, Any]:
        found = self._evaluate_all(data_loader=self.data)
        if not isinstance(found, dict):
            raise TypeError(
                f"evaluate_full_dataset() must return a dict of metrics, got {found!r} of type {type(found).__name__}"
            )
        self.rank.optimisation.reshard()
        return jsonable(found, source="evaluate_full_dataset()")

    def combine(self, shares: Sequence[Share]) -> dict[str, Any]:
        """The metrics of all ranks' shares, in rank order. Each rank combines for itself, without another exchange."""
        # Of a sharded model all ranks have evaluated the same full dataset.
        same = self.full_dataset and self.rank.optimisation.has_sharded
        shares = shares[:1] if same else self.rank.distinct(shares)
        reduced = jsonable(
            self.rank.reducers.cross_slot([share.reduced for share in shares], training=False), source="a reducer"
        )
        if self.full_dataset:
            check_names(reduced, shares[0].metrics, "evaluate_full_dataset()")
            return {**shares[0].metrics, **reduced}
        shares = [share for share in shares if share.batches]
        if not shares:
            raise RuntimeError(
                "the validation data is empty: build_validation_data_loader() returned a loader without a batch; "
                "check its dataset, and drop_last with a dataset smaller than a batch"
            )
        if any(share.metrics.keys() != shares[0].metrics.keys() for share in shares):
            raise ValueError(
                "evaluate_batch() must return the same metrics on every rank, got "
                + ", ".join(str(sorted(share.metrics)) for share in shares)
            )
        own = validation.combine_ranks([(share.metrics, share.batches) for share in shares], shares[0].reducers)
        check_names(reduced, own, "evaluate_batch()")
        return {**own, **reduced}
