"""Tensor parallelism of size 1 with a plan for some of the layers, so that the others stay plain: default optimizers
(foreach on a GPU), clipping and a GradScaler on DTensors beside tensors. The weights are those of the plain model."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import torch
from part import DEVICE, attempt, check, figure
from torch import nn

from dray import pytorch
from dray.core import DistributedContext

BATCHES = 3
OPTIMIZERS: dict[str, Any] = {
    "AdamW": torch.optim.AdamW,
    "SGD with momentum": lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9),
    "fused AdamW": lambda parameters: torch.optim.AdamW(parameters, fused=True),
}


def main(tiny: bool) -> None:
    """Train each way."""
    if tiny:
        _as_on_a_gpu()
    for name, optimizer in OPTIMIZERS.items():
        plain: dict[str, torch.Tensor] = {}
        for way, options in {
            "plain": {"divided": False, "sharded": False},
            "tp": {"divided": True, "sharded": False},
            "tp, FullyShard": {"divided": True, "sharded": True},
        }.items():
            with attempt(f"{name}, {way}"):
                weights, _ = train(optimizer, **options)
                plain = plain or weights
                differ = max(float((weights[each] - plain[each]).abs().max()) for each in plain)
                check(f"{name}, {way}: weights of the plain model", differ < 1e-4, True)
                figure(f"{name}, {way}: they differ by at most", f"{differ:.1e}")


def _as_on_a_gpu() -> None:
    """On CPUs too, optimizers are foreach by default."""
    for module in ("torch.utils._foreach_utils", "torch.optim.optimizer"):
        importlib.import_module(module)._get_foreach_kernels_supported_devices = lambda: ["cpu", "cuda"]


class Block(nn.Module):
    """The norm is not in the plan."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = x + self.down(torch.relu(self.up(self.norm(x))))
        return result


class Trial(pytorch.PyTorchTrial):
    """With gradients scaled and clipped."""

    def __init__(self, context: pytorch.PyTorchTrialContext, optimizer: Any, *, divided: bool, sharded: bool) -> None:
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        self.context = context
        self.scaler = context.wrap_scaler(torch.amp.GradScaler(DEVICE.type, init_scale=1024.0))
        torch.manual_seed(7)
        model = nn.Sequential(nn.Linear(8, 64), Block(64), Block(64), nn.Linear(64, 1)).to(context.device)
        if divided:
            plan = {
                f"{n}.{name}": way()
                for n in (1, 2)
                for name, way in (("up", ColwiseParallel), ("down", RowwiseParallel))
            }
            parallelize_module(model, context.device_mesh["tp"], plan)
        self.model = context.wrap_model(model, parallel=pytorch.FullyShard(units=[Block]) if sharded else None)
        self.optimizer = context.wrap_optimizer(optimizer(self.model.parameters()))

    def build_training_data_loader(self) -> pytorch.DataLoader:
        x = torch.linspace(-1, 1, 16 * BATCHES * 8).sin().reshape(-1, 8)
        shares = self.context.device_mesh["dp_shard"].size()
        return pytorch.DataLoader(torch.utils.data.TensorDataset(x), batch_size=16 // shares)

    build_validation_data_loader = build_training_data_loader

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        loss = self.model(batch[0]).square().mean()
        self.context.backward(self.scaler.scale(loss))
        self.scaler.unscale_(self.optimizer)
        self.context.step_optimizer(
            self.optimizer,
            clip_grads=lambda parameters: nn.utils.clip_grad_norm_(parameters, 0.1),
            scaler=self.scaler,
        )
        self.scaler.update()
        return {"loss": loss}

    def evaluate_batch(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        return {"validation_loss": self.model(batch[0]).square().mean()}


def train(
    optimizer: Any,
    *,
    distributed: DistributedContext | None = None,
    tp: int = 1,
    length: int = BATCHES,
    latest_checkpoint: str | None = None,
    **options: bool,
) -> tuple[dict[str, torch.Tensor], Path]:
    """The weights after a few batches, whole, and the last checkpoint."""
    with pytorch.init(mesh={"tp": tp}, distributed=distributed, enable_tensorboard_logging=False) as context:
        trial = Trial(context, optimizer, **options)
        pytorch.Trainer(trial, context).fit(
            max_length=pytorch.Batch(length), checkpoint_policy="none", latest_checkpoint=latest_checkpoint
        )
        weights = {
            name: (weight.full_tensor() if hasattr(weight, "full_tensor") else weight).float().cpu().clone()
            for name, weight in trial.model.state_dict().items()
        }
        return weights, context.get_tensorboard_path().parent / f"checkpoint_{length}"
