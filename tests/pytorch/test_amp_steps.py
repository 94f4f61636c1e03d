"""Optimizer steps in mixed precision: in which types they compute, and several of one optimizer in a batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dray import pytorch
from dray.pytorch import Batch
from tests.pytorch.conftest import Fit
from tests.pytorch.fakes import FakeHost, OneWeight, one_weight
from tests.pytorch.test_amp import Types, scaling, state, with_scale


class Multiplying(torch.optim.SGD):
    """Multiplies matrices in its step, as Muon and Shampoo do."""

    def step(self, closure: Any = None) -> Any:
        self.product = (torch.eye(2) @ torch.eye(2)).dtype
        return super().step(closure)


@pytest.mark.api("2.25", "2.19")
@pytest.mark.parametrize("scale", [False, True])
def test_clipping_and_the_step_are_not_under_autocast(fit: Fit, scale: bool) -> None:
    class Trial(Types):
        def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
            super().__init__(context)
            self.optimizer = context.wrap_optimizer(Multiplying(self.model.parameters(), lr=self.lr))

        def clip(self, parameters: Any) -> None:
            self.types.append(("clip", (torch.eye(2) @ torch.eye(2)).dtype))

        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            self.context.backward(self.loss(batch))
            self.context.step_optimizer(self.optimizer, clip_grads=self.clip)
            self.types += [("step", self.optimizer.product), ("forward", self.model(batch).dtype)]
            return {}

    trial = fit(Trial, prepare=scaling() if scale else lambda trial: None, max_length=Batch(2))
    seen = {("clip", torch.float32), ("step", torch.float32), ("forward", torch.bfloat16)}
    assert {kind for kind in trial.types if kind[0] != "evaluate"} == seen
    assert trial.weight == one_weight(2)


@pytest.mark.api("2.25", "2.19")
def test_a_forward_pass_after_a_step_has_the_new_weights(fit: Fit) -> None:
    class Twice(Types):
        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            super().train_batch(batch, epoch_idx, batch_idx)
            return super().train_batch(batch, epoch_idx, batch_idx)

    assert fit(Twice, max_length=Batch(3)).weight == one_weight(6)


class Critic(OneWeight):
    """Steps its optimizer three times a batch, as a WGAN does its critic's. The gradients of another one are from
    before these steps, which it comes after."""

    explodes = -1
    clips = False

    def at_init(self) -> None:
        self.other = self.context.wrap_model(torch.nn.Linear(1, 1, bias=False))
        torch.nn.init.zeros_(self.other.weight)
        self.second = self.context.wrap_optimizer(torch.optim.SGD(self.other.parameters(), lr=self.lr))
        self.gradients: list[float] = []
        self.backwards = 0

    def note(self, parameters: Any) -> None:
        self.gradients += [float(parameter.grad) for parameter in parameters]

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        self.context.backward(((self.other(batch) - 1) ** 2).mean())
        for _ in range(3):
            loss = self.loss(batch)
            self.context.backward(loss * torch.inf if self.backwards == self.explodes else loss)
            self.backwards += 1
            self.context.step_optimizer(self.optimizer, clip_grads=self.note if self.clips else None)
        self.context.step_optimizer(self.second)
        return {"loss": loss}


@pytest.mark.api("2.25", "2.19")
@pytest.mark.parametrize("clips", [False, True])
def test_an_optimizer_may_step_several_times_a_batch(fit: Fit, host: FakeHost, clips: bool) -> None:
    trial = fit(type("Trial", (Critic,), {"clips": clips}), prepare=scaling(growth_interval=1), max_length=Batch(2))
    assert trial.weight == one_weight(6)
    assert float(trial.other.weight.detach()) == one_weight(2)
    assert trial.gradients == ([-2 * (1 - one_weight(step)) for step in range(6)] if clips else [])
    saved = state(host.checkpoints()[-1])["scaler_state_dict"]
    assert saved["scale"] == 4096.0, "doubled once a batch"


@pytest.mark.api("2.25", "2.19")
@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("explodes", [0, 1, 2])
def test_any_of_its_steps_may_be_left_out_for_an_infinite_gradient(
    fit: Fit, host: FakeHost, clips: bool, explodes: int
) -> None:
    trial = fit(
        type("Trial", (Critic,), {"clips": clips, "explodes": explodes}), prepare=scaling(), max_length=Batch(1)
    )
    assert trial.weight == one_weight(2)
    assert float(trial.other.weight.detach()) == one_weight(1)
    assert state(host.checkpoints()[-1])["scaler_state_dict"]["scale"] == 512.0, "halved once"


@pytest.mark.gpu
@pytest.mark.api("2.25", "2.19")
def test_on_a_gpu_an_optimizer_may_step_several_times_a_batch(fit: Fit) -> None:
    class Half(Critic):
        clips = True

        def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
            context.experimental.use_amp()
            super().__init__(context)

    trial = fit(Half, prepare=with_scale(1024.0), max_length=Batch(2))
    assert trial.weight == one_weight(6)
    assert trial.gradients == [-2 * (1 - one_weight(step)) for step in range(6)]
