"""Trials whose models are sharded, or the same ones whole; and what their runs are compared by."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from dray import pytorch
from dray.core import DistributedContext
from dray.hosts import use_host
from dray.pytorch import Batch
from dray.training import rng
from dray.training.checkpoint import sharded
from tests.pytorch.fakes import FakeHost, state_of
from tests.pytorch.resuming import Numbered

BATCHES = 8
RECORDS = 24
"""In global batches of 8: three an epoch."""


def foreach_by_default() -> None:
    """From now on optimizers use foreach kernels on a CPU too, as they do on GPUs."""
    for name in ("torch.utils._foreach_utils", "torch.optim.optimizer"):
        vars(sys.modules[name])["_get_foreach_kernels_supported_devices"] = lambda: ["cpu"]


def whole(model: nn.Module) -> nn.Module:
    return model


def fsdp(model: nn.Module) -> nn.Module:
    """Every layer a unit; a bias of one element leaves all ranks but the first without a shard."""
    from torch.distributed.fsdp import fully_shard

    for layer in model.children():
        if list(layer.parameters()):
            fully_shard(layer)
    fully_shard(model)
    return model


def tensor_parallel(model: nn.Module) -> nn.Module:
    """Columns of one layer, rows of the next; the last one is whole on every rank."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    return parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


class Epochs(pytorch.PyTorchCallback):
    """Counts epochs. Without a hook for checkpoints, which would have training wait for them."""

    def __init__(self) -> None:
        self.ended = 0

    def state_dict(self) -> dict[str, Any]:
        return {"ended": self.ended}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.ended = state_dict["ended"]

    def on_training_epoch_end(self, epoch_idx: int) -> None:
        self.ended += 1


class Keeper(pytorch.PyTorchCallback):
    """Has state that only the chief's part of is known."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def state_dict(self) -> dict[str, Any]:
        return {"first": next(self.model.parameters())}


class Sharded(pytorch.PyTorchTrial):
    """A model that `shard` divides, with Adam, beside a small whole one with SGD and momentum."""

    shard: Callable[[nn.Module], nn.Module]
    width = 8
    dropout = 0.0
    keeps_shards = False

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        self.context = context
        torch.manual_seed(3)
        layers = [
            nn.Linear(6, self.width),
            nn.Tanh(),
            nn.Linear(self.width, 5),
            nn.Dropout(self.dropout),
            nn.Linear(5, 1),
        ]
        self.model = context.wrap_model(type(self).shard(nn.Sequential(*layers)))
        self.scale = context.wrap_model(nn.Linear(1, 1))
        self.adam = context.wrap_optimizer(torch.optim.Adam(self.model.parameters(), lr=0.05))
        self.sgd = context.wrap_optimizer(torch.optim.SGD(self.scale.parameters(), lr=0.01, momentum=0.9))
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.adam, T_max=2 * BATCHES)
        context.wrap_lr_scheduler(schedule, pytorch.LRScheduler.StepMode.STEP_EVERY_BATCH)
        self.epochs = Epochs()

    def build_callbacks(self) -> dict[str, pytorch.PyTorchCallback]:
        return {"epochs": self.epochs, **({"keeper": Keeper(self.model)} if self.keeps_shards else {})}

    def build_training_data_loader(self) -> Any:
        return pytorch.DataLoader(Numbered(RECORDS), self.context.get_per_slot_batch_size(), shuffle=True)

    def build_validation_data_loader(self) -> Any:
        return pytorch.DataLoader(Numbered(), batch_size=5)

    def loss(self, batch: Any) -> torch.Tensor:
        return nn.functional.mse_loss(self.scale(self.model(batch[1])), batch[2])

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.context.backward(loss)
        self.context.step_optimizer(self.adam)
        self.context.step_optimizer(self.sgd)
        return {"loss": loss}

    def evaluate_batch(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        return {"validation_loss": self.loss(batch)}


def trial(shard: Callable[[nn.Module], nn.Module] = whole, **attributes: Any) -> type[Sharded]:
    return type("Trial", (Sharded,), {"shard": staticmethod(shard), **attributes})


def run(
    trial_class: type[Sharded],
    directory: Path | FakeHost,
    *,
    distributed: DistributedContext | None = None,
    aggregation: int = 2,
    batches: int = BATCHES,
    full: bool = False,
    **fit: Any,
) -> dict[str, Any]:
    """Train, with a checkpoint after each batch; what two equal runs have equal, or the error that ended it."""
    host = directory if isinstance(directory, FakeHost) else FakeHost(directory)
    rng.seed_all(999)
    with (
        use_host(host),
        pytorch.init(
            hparams={"global_batch_size": 8},
            exp_conf={"checkpoint_format": "full"} if full else {},
            distributed=distributed,
            aggregation_frequency=aggregation,
        ) as context,
    ):
        made = trial_class(context)
        try:
            pytorch.Trainer(made, context).fit(
                max_length=Batch(batches),
                validation_period=Batch(3),
                checkpoint_period=Batch(1),
                reporting_period=Batch(1),
                checkpoint_policy="none",
                **fit,
            )
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}", "saved": [each.batches for each in host.committed]}
        return {
            "state": sharded.gathered(state_of(context), keep=True),
            "rng": rng.capture(context.device),
            "reports": [(each.batches, each.training, each.validation) for each in host.reports],
            "epochs": made.epochs.ended,
            "saved": [each.batches for each in host.committed],
        }
