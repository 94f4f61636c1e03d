"""What test_feature_ranks.py runs in two real processes: `python feature_ranks.py <directory>`, once a rank.

Each scenario returns what its rank saw; all of them are saved to <directory>/rank_<n>.pt.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from dray import pytorch
from dray.pytorch import Batch
from tests import queued
from tests.pytorch.two_ranks import Regression, two

TRAINING: dict[str, Any] = {"max_length": Batch(7), "reporting_period": Batch(3), "checkpoint_period": Batch(4)}


class Shown(Regression):
    """Metrics that differ between ranks."""

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        loss = super().train_batch(batch, epoch_idx, batch_idx)["loss"]
        rank = self.context.distributed.rank
        return {"loss": loss, "rank": torch.tensor(float(rank)), "at": float(2 * batch_idx + rank)}


class CompiledBefore(Regression):
    def wrap(self, model: nn.Module) -> Any:
        return self.context.wrap_model(torch.compile(model, backend="eager"))  # type: ignore[arg-type]


class CompiledAfter(Regression):
    def wrap(self, model: nn.Module) -> Any:
        return torch.compile(self.context.wrap_model(model), backend="eager")


def wrapped_by(kind: Any) -> Any:
    """Regression with its model wrapped in another way."""

    class Wrapped(kind):  # type: ignore[misc]
        def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
            super().__init__(context)
            model = self.model.module if isinstance(self.model, nn.parallel.DistributedDataParallel) else self.model
            context.models.clear()
            context.optimizers.clear()
            self.model = self.wrap(model)
            self.optimizer = context.wrap_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9))

    return Wrapped


@pytorch.cached
def table() -> torch.Tensor:
    """Random, but the same on all ranks."""
    return torch.randn(24, 4)


class OnCachedData(Regression):
    """The trial's own random numbers, its weights among them, are those of a trial without the data."""

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        everywhere = context.distributed.allgather(table().tolist())
        assert everywhere == [table().tolist()] * context.distributed.size
        super().__init__(context)


class Half(Regression):
    """In mixed precision."""

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        context.experimental.use_amp(torch.bfloat16)
        super().__init__(context)


KINDS: dict[str, Any] = {
    "plain": Regression,
    "shown": Shown,
    "compiled before": wrapped_by(CompiledBefore),
    "compiled after": wrapped_by(CompiledAfter),
    "on cached data": OnCachedData,
    "half": Half,
}


def main(directory: Path) -> None:
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    # By a file, not by a port: no other program can take it first.
    queued.init(directory / "rendezvous", rank, 2)
    found = {kind: two(trial, directory / kind, **TRAINING) for kind, trial in KINDS.items()}
    torch.save(found, directory / f"rank_{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
