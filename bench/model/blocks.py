"""Models of equal layers for bench/sharded.py, as trials of dray and by hand."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from _measure import stamp
from small import Points
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

from dray import pytorch
from dray.pytorch import FullyShard

BATCH = 16
RECORDS_OF_TURN = 3_200
"""100 batches on two ranks."""


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + torch.tanh(self.layer(x))
        return out


def blocks(width: int, count: int, *, meta: bool = False) -> nn.Module:
    with torch.device("meta" if meta else "cpu"):
        return nn.Sequential(*(Block(width) for _ in range(count)), nn.Linear(width, 1))


def shard_by_hand(model: nn.Module) -> nn.Module:
    """Does the same as FullyShard(units=[Block]), without dray."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.children():
        if isinstance(block, Block):
            fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def points(width: int) -> Points:
    x = torch.randn(RECORDS_OF_TURN, width, generator=torch.Generator().manual_seed(1))
    return Points(x, x.square().mean(1, keepdim=True))


class ByHand:
    """The minimum that trains a sharded model: no metrics, no schedule, no aggregation."""

    def __init__(self, width: int, count: int) -> None:
        self.model = shard_by_hand(blocks(width, count))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        data = points(width)
        self.data = DataLoader(data, batch_size=BATCH, sampler=DistributedSampler(data))

    def train(self) -> None:
        """One epoch."""
        self.model.train()
        for x, y in self.data:
            self.optimizer.zero_grad()
            nn.functional.mse_loss(self.model(x), y).backward()
            self.optimizer.step()


class OfBlocks(pytorch.PyTorchTrial):
    """The hyperparameters: width and count of the layers, and whether the model is sharded."""

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        self.context = context
        width, count, sharded = (context.get_hparam(name) for name in ("width", "count", "sharded"))
        model = blocks(width, count, meta=sharded)
        self.model = context.wrap_model(model, parallel=FullyShard(units=[Block]) if sharded else None)
        self.optimizer = context.wrap_optimizer(torch.optim.AdamW(self.model.parameters(), lr=1e-4))
        self.data = points(width)

    def build_training_data_loader(self) -> pytorch.DataLoader:
        return pytorch.DataLoader(self.data, batch_size=BATCH, shuffle=True)

    def build_validation_data_loader(self) -> pytorch.DataLoader:
        return pytorch.DataLoader(torch.utils.data.Subset(self.data, range(2 * BATCH)), batch_size=BATCH)

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, torch.Tensor]:
        x, y = batch
        loss = nn.functional.mse_loss(self.model(x), y)
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return {"loss": loss}

    def evaluate_batch(self, batch: Any, batch_idx: int) -> dict[str, torch.Tensor]:
        x, y = batch
        return {"validation_loss": nn.functional.mse_loss(self.model(x), y)}


class InTurns(OfBlocks):
    """Runs an epoch by hand after each of its own, and stamps the CPU and wall time of both."""

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        super().__init__(context)
        self.by_hand = ByHand(context.get_hparam("width"), context.get_hparam("count"))
        self.by_hand.train()

    def build_callbacks(self) -> dict[str, pytorch.PyTorchCallback]:
        return {"turns": _Turns(self.by_hand, self.context.distributed.rank)}


class _Turns(pytorch.PyTorchCallback):
    def __init__(self, by_hand: ByHand, rank: int) -> None:
        self.by_hand, self.rank = by_hand, rank
        self.since = self.now()

    def now(self) -> tuple[float, float]:
        return time.process_time(), time.perf_counter()

    def on_training_epoch_start(self, epoch_idx: int) -> None:
        dray, began = self.now(), self.now()
        self.by_hand.train()
        ended = self.now()
        if epoch_idx > 1:  # the first epoch is for warming up
            fields = {
                f"{who}_{clock}": after - before
                for who, one, other in (("dray", self.since, dray), ("by_hand", began, ended))
                for clock, before, after in zip(("cpu_s", "wall_s"), one, other, strict=True)
            }
            stamp("turn", rank=self.rank, batches=len(self.by_hand.data), **fields)
        self.since = self.now()


class Stamped(OfBlocks):
    """Stamps when each batch begins and ends."""

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, torch.Tensor]:
        stamp("begin", rank=self.context.distributed.rank)
        metrics = super().train_batch(batch, epoch_idx, batch_idx)
        stamp("trained", rank=self.context.distributed.rank)
        return metrics


class Counted(OfBlocks):
    """Stamps the size of this rank's parameters, gradients and Adam's moments, once all exist."""

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, torch.Tensor]:
        x, y = batch
        loss = nn.functional.mse_loss(self.model(x), y)
        self.context.backward(loss)
        if batch_idx == 1:
            found: list[Any] = []
            for parameter in self.model.parameters():
                moments = self.optimizer.state[parameter]
                found += [parameter, parameter.grad, moments["exp_avg"], moments["exp_avg_sq"]]
            local: Callable[[Any], torch.Tensor] = lambda each: each.detach().to_local()  # noqa: E731
            parts = [local(each) if hasattr(each, "to_local") else each for each in found]
            stamp("counted", rank=self.context.distributed.rank, nbytes=sum(part.nbytes for part in parts))
        self.context.step_optimizer(self.optimizer)
        return {"loss": loss}
