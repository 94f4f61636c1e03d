"""What test_elastic_ranks.py runs in four real processes: `python elastic_ranks.py <directory>`, once a rank.

One trial after another, each on a number of processes that changes. What each rank has seen of them is saved to
<directory>/rank_<n>.pt; the ranks share the directory.
"""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from dray import pytorch
from dray.core import DistributedContext
from dray.hosts import use_host
from dray.pytorch import Batch, FullyShard
from dray.training.checkpoint import sharded
from tests import queued
from tests.pytorch.fakes import FakeHost, state_of
from tests.pytorch.resuming import Numbered
from tests.pytorch.sharding import foreach_by_default

RECORDS, BATCH_SIZE, BATCHES = 42, 12, 14
#: The processes, and the batch that they train up to.
STORIES: dict[str, list[tuple[int, int]]] = {
    "2, 4, 3": [(2, 5), (4, 9), (3, BATCHES)],
    "1, 2, 1": [(1, 3), (2, 10), (1, BATCHES)],
}
SHARDED = ("sharded", "tensor parallel")
"""With two batches a step too."""
KINDS = ("whole batches", "partial batches", "two batches a step", *SHARDED)


class Trial(pytorch.PyTorchTrial):
    """Shuffled data, momentum, and no random numbers of a process's own in the model."""

    drop_last = True

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        self.context = context
        self.model = self.wrapped(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 1)))
        self.optimizer = context.wrap_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9))
        #: (batch, records, a random number) of each batch that was trained here.
        self.seen: list[tuple[int, list[int], float]] = []

    def wrapped(self, model: nn.Module) -> nn.Module:
        return self.context.wrap_model(model)

    def build_training_data_loader(self) -> Any:
        size = self.context.get_per_slot_batch_size()
        return pytorch.DataLoader(Numbered(RECORDS), size, shuffle=True, drop_last=self.drop_last)

    def build_validation_data_loader(self) -> Any:
        return pytorch.DataLoader(Numbered(RECORDS), batch_size=6)

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        self.seen.append((batch_idx, batch[0].tolist(), random.random()))
        loss = nn.functional.mse_loss(self.model(batch[1]), batch[2])
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return {"loss": loss}

    def evaluate_batch(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        return {"validation_loss": nn.functional.mse_loss(self.model(batch[1]), batch[2])}


class Partial(Trial):
    """The last batch of an epoch has six records."""

    drop_last = False


class Sharded(Trial):
    def wrapped(self, model: nn.Module) -> nn.Module:
        return self.context.wrap_model(model, parallel=FullyShard(units=[nn.Linear]))


class TensorParallel(Sharded):
    def wrapped(self, model: nn.Module) -> nn.Module:
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        parallelize_module(model, self.context.device_mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        return super().wrapped(model)


TRIALS = {"partial batches": Partial, "sharded": Sharded, "tensor parallel": TensorParallel}


def sharing(kind: str, size: int) -> int:
    """How many of so many ranks have the same data."""
    return 2 if kind == "tensor parallel" and size % 2 == 0 else 1


def run(kind: str, directory: Path, until: int, latest: str | None, **init: Any) -> dict[str, Any]:
    """Train up to a batch, and save there."""
    host = FakeHost(directory, stop_at=until)
    elastic = {"resources": {"slots_per_trial": {"min": 1, "max": 4}}}
    steps = 1 if kind in ("whole batches", "partial batches") else 2
    size = init["distributed"].size if "distributed" in init else 1
    init["mesh"] = {"tp": sharing(kind, size)}
    with (
        use_host(host),
        pytorch.init(
            hparams={"global_batch_size": BATCH_SIZE}, exp_conf=elastic, aggregation_frequency=steps, **init
        ) as context,
    ):
        trial = TRIALS.get(kind, Trial)(context)
        pytorch.Trainer(trial, context).fit(
            max_length=Batch(BATCHES), checkpoint_period=Batch(1), checkpoint_policy="none", latest_checkpoint=latest
        )
        return {"seen": trial.seen, "state": sharded.gathered(state_of(context), keep=True)}


def main(directory: Path) -> None:
    torch.set_num_threads(1)
    foreach_by_default()
    rank = int(os.environ["RANK"])
    found: dict[tuple[str, str, int], dict[str, Any]] = {}
    for story, parts in STORIES.items():
        for kind in KINDS:
            place, latest = directory / story / kind, None
            for part, (size, until) in enumerate(parts):
                # Whoever has no part in it goes on, and waits for the others where it has.
                meeting = directory / f"{story}-{kind}-{until}".replace(" ", "")
                if rank < size:
                    os.environ.update(WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size))
                    queued.init(meeting, rank, size)
                    peers = DistributedContext.from_torch_distributed()
                    found[story, kind, part] = run(kind, place, until, latest, distributed=peers)
                    dist.destroy_process_group()
                latest = str(place / f"checkpoint_{until}")
    torch.save(found, directory / f"rank_{rank}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
