"""What is wrong with a trial is said as soon as it can be known; most of it is in tests/api/test_errors.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dray import pytorch
from dray.pytorch import Batch, Epoch
from tests.pytorch.conftest import Fit
from tests.pytorch.fakes import FakeHost, OneWeight, one_weight


class Neither(OneWeight):
    evaluate_batch = pytorch.PyTorchTrial.evaluate_batch


class NotJson(Neither):
    def evaluate_full_dataset(self, data_loader: Any) -> dict[str, Any]:
        return {"model": self.model}


class NotADict(Neither):
    def evaluate_full_dataset(self, data_loader: Any) -> Any:
        return 3.0


class StrangeBatch(OneWeight):
    def build_training_data_loader(self) -> pytorch.DataLoader:
        return pytorch.DataLoader(torch.ones(4, 1), batch_size=2, collate_fn=lambda rows: object())


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
        def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
            super().__init__(context)
            context.wrap_reducer(len, name=name, **where)

    return Reduces


@pytest.mark.api("1.8", "1.10", "9.3b")
@pytest.mark.parametrize(
    ("trial", "kind", "says"),
    [
        (Neither, ValueError, "exactly one of.*neither"),
        (NotJson, TypeError, "'model' of type Linear, which is not JSON-serialisable"),
        (NotADict, TypeError, "must return a dict of metrics, got 3.0"),
        (StrangeBatch, TypeError, r"override PyTorchTrial\.get_batch_length"),
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


def test_callback_state_that_would_not_load_is_refused_when_saved(fit: Fit, host: FakeHost) -> None:
    class Remembering(pytorch.PyTorchCallback):
        def state_dict(self) -> dict[str, Any]:
            return {"device": object()}

    with pytest.raises(TypeError, match=r"callback 'memory' at \['device'\] is of type builtins\.object"):
        fit(OneWeight, max_length=Batch(2), prepare=lambda trial: trial.callbacks.update(memory=Remembering()))
    assert host.checkpoints() == []


def test_a_trainer_takes_a_trial(host: FakeHost) -> None:
    with pytorch.init() as context, pytest.raises(TypeError, match=r"an instance of a pytorch\.PyTorchTrial"):
        pytorch.Trainer(OneWeight, context)  # type: ignore[arg-type]


@pytest.mark.api("1.1")
@pytest.mark.parametrize(
    "missing", ["train_batch", "build_training_data_loader", "build_validation_data_loader", "__init__"]
)
def test_a_trial_must_define_its_methods(missing: str) -> None:
    methods = {
        name: OneWeight.__dict__[name]
        for name in ("__init__", "train_batch", "build_training_data_loader", "build_validation_data_loader")
        if name != missing
    }
    with pytest.raises(TypeError, match=missing):
        type("Partial", (pytorch.PyTorchTrial,), methods)(None)


@pytest.mark.api("2.29")
def test_an_epoch_that_can_not_be_counted_names_the_argument(fit: Fit) -> None:
    class Unsized(OneWeight):
        def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
            super().__init__(context)
            context.experimental.disable_dataset_reproducibility_checks()

        def build_training_data_loader(self) -> Any:
            return iter([torch.ones(2, 1)] * 9)

    with pytest.raises(ValueError, match=r"validation_period=Epoch\(1\) needs a sized training loader"):
        fit(Unsized, max_length=Batch(3), validation_period=Epoch(1))
