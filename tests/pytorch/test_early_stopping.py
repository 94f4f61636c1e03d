"""`pytorch.EarlyStopping`: when it ends a trial, and that a trial that is cut and resumed ends at the same batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from dray import pytorch
from dray.pytorch import Batch
from tests.pytorch.conftest import Fit
from tests.pytorch.fakes import FakeHost, OneWeight, trial

NAN = math.nan


def reporting(values: Sequence[float], name: str = "loss") -> type[Any]:
    """A trial with this validation metric after each of its batches, one validation a batch."""

    def evaluate_batch(self: Any, batch: Any, batch_idx: int) -> dict[str, Any]:
        return {name: values[self.context.current_train_batch()]}

    return trial(evaluate_batch=evaluate_batch)


def length(fit: Fit, made: type[Any], host: FakeHost, stopping: pytorch.EarlyStopping, **arguments: Any) -> int:
    arguments = {"max_length": Batch(20), "validation_period": Batch(1), **arguments}
    fit(made, host, callbacks={"early": stopping}, **arguments)
    return host.reports[-1].batches if host.reports else 0


@pytest.mark.parametrize(
    ("values", "arguments", "ends"),
    [
        ([3, 2, 2, 2, 1, 1, 1, 1], {"patience": 3}, 8),
        ([3, 2, 1.96875, 1.875, 1.9, 1], {"patience": 2, "min_delta": 0.125}, 4),
        ([3, 2, 1.9375, 1.875, 1.8, 1.8], {"patience": 3, "min_delta": 0.125}, 8),  # 1.8 is better than 2 by more
        ([0.5, 0.6, 0.6, 0.7, 0.1, 0.2], {"patience": 2, "smaller_is_better": False}, 6),
        ([NAN, NAN, NAN], {"patience": 2}, 2),
        ([NAN, 1, NAN, 0, NAN, NAN], {"patience": 2}, 6),
        ([0] * 20, {"patience": 30}, 20),
    ],
)
def test_a_trial_ends_once_it_has_not_improved_for_its_patience(
    fit: Fit,
    host: FakeHost,
    values: list[float],
    arguments: dict[str, Any],
    ends: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    values = values + values[-1:] * (20 - len(values))
    assert length(fit, reporting(values), host, pytorch.EarlyStopping("loss", **arguments)) == ends
    assert host.reports[-1].checkpoint is not None
    assert caplog.text.count("early stopping: loss has not improved by more than") == (ends < 20)


@pytest.mark.parametrize("cut", range(1, 7))
def test_a_trial_that_is_cut_anywhere_ends_where_the_whole_one_does(fit: Fit, tmp_path: Path, cut: int) -> None:
    made = reporting([3, 2, 2, 1, 1, 1, 1, 0, 0, 0])
    first, second = FakeHost(tmp_path / "first", stop_at=cut), FakeHost(tmp_path / "second")
    assert length(fit, made, first, pytorch.EarlyStopping("loss", 3)) == cut
    resumed = first.checkpoints()[-1]
    assert length(fit, made, second, pytorch.EarlyStopping("loss", 3), latest_checkpoint=resumed) == 7


def test_a_trial_that_has_ended_does_not_train_on_and_a_fork_of_it_does(fit: Fit, tmp_path: Path) -> None:
    made = reporting([1] * 10)
    ended, again, fork = (FakeHost(tmp_path / name) for name in ("ended", "again", "fork"))
    assert length(fit, made, ended, pytorch.EarlyStopping("loss", 2)) == 3
    at = {"latest_checkpoint": ended.checkpoints()[-1]}
    assert length(fit, made, again, pytorch.EarlyStopping("loss", 2), **at) == 0
    fork.is_changed_fork = True
    assert length(fit, made, fork, pytorch.EarlyStopping("loss", 2), **at) == 6


def test_arguments_and_metrics_that_can_not_be_are_errors(fit: Fit, host: FakeHost) -> None:
    for wrong in ({"patience": 0}, {"min_delta": -1.0}, {"min_delta": NAN}):
        with pytest.raises(ValueError, match="patience must be >= 1, and min_delta >= 0"):
            pytorch.EarlyStopping("loss", **wrong)
    with pytest.raises(ValueError, match=r"'los' must be a number in the validation metrics, got .*validation_loss"):
        fit(OneWeight, callbacks={"early": pytorch.EarlyStopping("los", 1)}, max_length=Batch(2))
