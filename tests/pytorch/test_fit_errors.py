"""A faulty trial is reported as early as possible; most errors are tested in tests/api/test_errors.py."""

from __future__ import annotations

from typing import Any

import pytest

from dray import pytorch
from dray.pytorch import Batch
from tests.pytorch.conftest import Fit
from tests.pytorch.fakes import FakeHost, OneWeight, one_weight


class Neither(OneWeight):
    evaluate_batch = pytorch.PyTorchTrial.evaluate_batch


class NoTokens(OneWeight):
    def get_batch_tokens(self, batch: Any) -> Any:
        batch.numel()


class OtherOrder(OneWeight):
    def train_batch(self, batch: Any, batch_idx: int, epoch: int) -> Any:  # type: ignore[override]
        return {}


class OtherNames(OneWeight):
    """As one writes it who does not look the names up."""

    def train_batch(self, data: Any, e: int, i: int) -> Any:  # type: ignore[override]
        return super().train_batch(data, e, i)

    def evaluate_batch(self, data: Any) -> dict[str, Any]:  # type: ignore[override]
        return super().evaluate_batch(data, 0)


class OtherNameOfLoader(Neither):
    def evaluate_full_dataset(self, loader: Any) -> dict[str, Any]:  # type: ignore[override]
        return {"batches": len(loader)}


def reduces(name: str, **where: bool) -> type[OneWeight]:
    """A trial with a reducer that gives a metric of this name."""

    class Reduces(OneWeight):
        def at_init(self) -> None:
            self.context.wrap_reducer(len, name=name, **where)

    return Reduces


@pytest.mark.parametrize(
    ("trial", "kind", "says"),
    [
        (NoTokens, TypeError, r"get_batch_tokens\(\) must return a number, .* got None"),
        (OtherOrder, TypeError, r"must take the arguments \(batch, epoch_idx, batch_idx\), in this order"),
        (reduces("validation_loss", for_training=False), ValueError, "a reducer and evaluate_batch.* both give"),
        (reduces("loss", for_validation=False), ValueError, "a reducer and train_batch.* both give .*'loss'"),
    ],
)
def test_the_error_of_a_faulty_trial_has_the_cure(fit: Fit, trial: type, kind: type[Exception], says: str) -> None:
    with pytest.raises(kind, match=says):
        fit(trial, max_length=Batch(2))


@pytest.mark.api("8.16")
def test_a_trial_may_name_the_arguments_of_its_methods(fit: Fit) -> None:
    assert fit(OtherNames, max_length=Batch(3)).weight == one_weight(3)
    fit(OtherNameOfLoader, max_length=Batch(1))


def test_a_trainer_takes_a_trial(host: FakeHost) -> None:
    with pytorch.init() as context, pytest.raises(TypeError, match=r"an instance of a pytorch\.PyTorchTrial"):
        pytorch.Trainer(OneWeight, context)  # type: ignore[arg-type]
