"""What one trial has compiled the next one uses, where it would have compiled the same, and nowhere else."""

from __future__ import annotations

import gc
import importlib
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from dray import pytorch
from dray.hosts import use_host
from dray.training.trial import before_training
from dray.worker.isolation import compiled as compiled_module
from dray.worker.isolation.snapshot import ProcessSnapshot
from tests.pytorch.fakes import FakeHost, OneWeight

pytestmark = pytest.mark.slow  # the compiler takes a second to import, and some tenths for each function

FACTOR = 2.0


def scaled(x: torch.Tensor) -> torch.Tensor:
    return x * FACTOR


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(4, width)
        nn.init.constant_(self.linear.weight, 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.linear(x))


class Net(nn.Module):
    slope = 1.0

    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.layer = Layer(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return scaled(self.layer(x)) * self.slope + torch.zeros(1)


@pytest.fixture
def snapshot() -> Iterator[ProcessSnapshot]:
    torch._dynamo.reset()
    yield ProcessSnapshot()
    torch._dynamo.reset()


def compilations() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def outputs(change: Callable[[], Any] = lambda: None, *, width: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    """What a compiled model says, and what the same model says that is not compiled; in a trial."""
    change()
    torch.manual_seed(0)
    model = Net(width)
    compiled = torch.compile(model, backend="eager")
    for prepare in before_training:
        prepare([model])
    x = torch.ones(2, 4)
    return compiled(x).detach(), model(x).detach()


class Trial(OneWeight):
    """As users write it: the optimizer is not compiled, and gets a plain number."""

    def at_init(self) -> None:
        context, model = self.context, Net()
        context.models.clear()
        context.optimizers.clear()
        if context.get_hparam("before"):
            self.model = context.wrap_model(torch.compile(model, backend="eager"))  # type: ignore[assignment]
        else:
            self.model = torch.compile(context.wrap_model(model), backend="eager")  # type: ignore[assignment]
        given = {"lr": context.get_hparam("lr"), "weight_decay": context.get_hparam("weight_decay")}
        self.optimizer = context.wrap_optimizer(torch.optim.Adam(self.model.parameters(), **given))

    def build_training_data_loader(self) -> pytorch.DataLoader:
        return pytorch.DataLoader(torch.utils.data.TensorDataset(torch.ones(8, 4)), batch_size=2)

    build_validation_data_loader = build_training_data_loader

    def loss(self, batch: Any) -> torch.Tensor:
        loss: torch.Tensor = self.model(batch[0]).square().mean()
        return loss


@pytest.mark.parametrize("before", [True, False])
def test_trials_that_differ_in_lr_and_weight_decay_compile_once(
    snapshot: ProcessSnapshot, before: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    weights: list[float] = []
    alive: list[weakref.ref[Any]] = []

    def trial(number: int) -> None:
        hparams = {"lr": 10 ** -(1 + number / 4), "weight_decay": number / 1000, "before": before}
        with use_host(FakeHost(tmp_path_factory.mktemp("trial"))), pytorch.init(hparams=hparams) as context:
            trial = Trial(context)
            alive.append(weakref.ref(trial.model))
            pytorch.Trainer(trial, context).fit(max_length=pytorch.Batch(3))
            weights.append(next(trial.model.parameters()).sum().item())

    began, counts = compilations(), []
    for number in range(16):
        snapshot.run(lambda number=number: trial(number))  # type: ignore[misc]
        counts.append(compilations() - began)
    assert counts == [2] * 16, "one to train, and one, without gradients, to validate"
    assert len(set(weights)) == 16
    gc.collect()
    assert [model() for model in alive] == [None] * 16, "no trial is kept alive"


def patch(owner: Any, name: str, value: Any) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda patches: patches.setattr(owner, name, value)


def zeros(self: Any, x: torch.Tensor) -> torch.Tensor:
    return x[:, :1] * 0


@pytest.mark.parametrize(
    "change",
    [
        patch(sys.modules[__name__], "FACTOR", 3.0),
        patch(sys.modules[__name__], "scaled", lambda x: x + 7),
        patch(Net, "slope", 5.0),
        patch(Layer, "forward", zeros),
        patch(nn.Linear, "forward", zeros),
        patch(F, "relu", lambda x: x - 1),
        lambda patches: torch.set_default_dtype(torch.float64),
    ],
    ids=["global", "function", "class attribute", "method", "torch's method", "torch's function", "default dtype"],
)
def test_what_a_trial_patches_is_what_it_and_only_it_runs(
    snapshot: ProcessSnapshot, change: Callable[[pytest.MonkeyPatch], None]
) -> None:
    plain, _ = snapshot.run(outputs)[0]
    with pytest.MonkeyPatch.context() as patches:
        found, expected = snapshot.run(lambda: outputs(lambda: change(patches)))[0]
        assert torch.equal(found, expected)
        assert found.dtype != plain.dtype or not torch.equal(found, plain), "the change is one"
    assert torch.equal(snapshot.run(outputs)[0][0], plain)


@pytest.mark.parametrize(
    "change",
    [
        lambda: setattr(torch._dynamo.config, "capture_scalar_outputs", True),
        lambda: setattr(importlib.import_module("torch._inductor.config"), "max_autotune", True),
        lambda: torch.use_deterministic_algorithms(True),
        lambda: setattr(torch.backends.cudnn, "benchmark", True),
    ],
    ids=["dynamo", "inductor", "determinism", "cudnn"],
)
def test_trials_with_other_settings_compile_for_themselves(
    snapshot: ProcessSnapshot, change: Callable[[], Any]
) -> None:
    began, counts = compilations(), []
    for each in (lambda: None, lambda: None, change, change, lambda: None):
        snapshot.run(lambda each=each: outputs(each))  # type: ignore[misc]
        counts.append(compilations() - began)
    assert counts[:4] == [1, 1, 2, 2]
    # torch's own guards keep both, ours the last one only.
    assert counts[4] in (2, 3)


def test_settings_of_the_compiler_are_those_of_the_modules_and_end_with_the_trial(snapshot: ProcessSnapshot) -> None:
    config = torch._dynamo.config

    def trial() -> tuple[bool, int]:
        seen = config.capture_scalar_outputs, config.accumulated_recompile_limit
        config.accumulated_recompile_limit = 9
        return seen

    default = config.accumulated_recompile_limit
    with config.patch(capture_scalar_outputs=True):  # as by a module of the model's code, before the first trial
        assert [snapshot.run(trial)[0] for _ in range(2)] == [(True, default)] * 2


def test_each_trial_may_compile_as_often_as_the_first(
    snapshot: ProcessSnapshot, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled_module, "MAX_COMPILATIONS", 20)
    began = compilations()
    # More shapes than torch compiles for a function (8), in trials of three each.
    for number in range(0, 36, 3):
        snapshot.run(lambda number=number: [outputs(width=number + i + 1) for i in range(3)])  # type: ignore[misc]
        assert compilations() - began == number + 3
        assert max(torch._dynamo.convert_frame.FRAME_COMPILE_COUNTER.values(), default=0) <= 20


def test_a_trial_that_is_out_of_compilations_leaves_the_next_ones_as_many_as_ever(snapshot: ProcessSnapshot) -> None:
    counts = []
    for widths in ([1], range(10, 22), [1], [2]):
        began = compilations()
        snapshot.run(lambda widths=widths: [outputs(width=width) for width in widths])  # type: ignore[misc]
        counts.append(compilations() - began)
    limit = torch._dynamo.config.recompile_limit
    assert counts == [1, limit, 1, 1]
