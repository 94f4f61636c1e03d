"""What test_stop_ranks.py runs in two real processes: `python stop_ranks.py <directory>`, once a rank.

A run without a stop; the same with SIGTERM to one rank in its middle; and the rest of that. The ranks step, and so wait
for one another, only every eighth batch, and the one that is asked to stop is much slower than the other.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

from dray import pytorch
from dray.core import DistributedContext
from dray.hosts import LocalHost, use_host
from tests import queued

BATCHES, TOGETHER, ASKED_AT = 800, 8, 21


class Stopped(pytorch.PyTorchTrial):
    asks = False

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        self.context = context
        self.model = context.wrap_model(nn.Sequential(nn.Dropout(0.5), nn.Linear(6, 3)))
        self.optimizer = context.wrap_optimizer(torch.optim.Adam(self.model.parameters(), lr=0.01))
        self.begun: list[int] = []

    def build_training_data_loader(self) -> pytorch.DataLoader:
        numbers = torch.arange(60 * 6, dtype=torch.float32).reshape(60, 6) / 360
        return pytorch.DataLoader(TensorDataset(numbers), batch_size=4, shuffle=True)

    build_validation_data_loader = build_training_data_loader

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, torch.Tensor]:
        self.begun.append(batch_idx)
        if self.asks and self.context.distributed.rank == 1:
            time.sleep(0.01 if batch_idx <= ASKED_AT else 0.1)  # then there is all the time to hear of it
            if batch_idx == ASKED_AT:
                os.kill(os.getpid(), signal.SIGTERM)
        loss = (self.model(batch[0]) ** 2).mean()
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return {"loss": loss}

    def evaluate_batch(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        return {"loss": self.model(batch[0]).mean()}


def run(directory: Path, *, asks: bool = False, latest: str | None = None) -> dict[str, Any]:
    """The batches that this rank has begun, and its weights at the end."""
    peers = DistributedContext.from_torch_distributed()
    with (
        LocalHost(directory, trial_seed=5) as host,
        use_host(host, peers),
        pytorch.init(aggregation_frequency=TOGETHER) as context,
    ):
        trial = Stopped(context)
        trial.asks = asks
        pytorch.Trainer(trial, context).fit(
            max_length=pytorch.Batch(BATCHES), reporting_period=pytorch.Batch(BATCHES), latest_checkpoint=latest
        )
    weights = {name: value.clone() for name, value in trial.model.state_dict().items()}
    return {"begun": trial.begun, "weights": weights}


def main(directory: Path) -> None:
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    queued.init(directory / "rendezvous", rank, 2)
    (directory / "code").mkdir(exist_ok=True)
    os.chdir(directory / "code")  # each checkpoint has a copy of it
    found = {"whole": run(directory / "whole"), "stopped": run(directory / "stopped", asks=True)}
    dist.barrier()
    [saved] = (directory / "stopped").glob("checkpoint_*")
    found["rest"] = run(directory / "rest", latest=str(saved))
    found["saved"] = {"batches": int(saved.name.removeprefix("checkpoint_"))}
    torch.save(found, directory / f"rank_{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    main(Path(sys.argv[1]))
