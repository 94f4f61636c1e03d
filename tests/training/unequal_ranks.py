"""What test_queued.py runs in three real processes, two on one node and one on another:
`python unequal_ranks.py <directory>`, once a rank.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dray.core import DistributedContext
from dray.pytorch import Batch
from dray.training.checkpoint.joint import open_together
from tests import queued
from tests.pytorch.fakes import FakeHost
from tests.pytorch.regression import Regression, run


class Leaving(Regression):
    """The rank that is alone on its node leaves in the third batch."""

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        if batch_idx == 2 and self.context.distributed.rank == 2:
            queued.gone_for(leave)
        return super().train_batch(batch, epoch_idx, batch_idx)


def leave() -> None:
    raise KeyError("gone")


def main(directory: Path) -> None:
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    queued.init(directory / "rendezvous", rank, 3)
    peers = DistributedContext.from_torch_distributed("127.0.0.1")
    local = [dist.new_group(ranks) for ranks in ((0, 1), (2,))][peers.cross_rank]
    total = torch.ones(1)
    dist.all_reduce(total, group=local)
    opened: list[int] = []

    def open_one() -> Path:
        opened.append(rank)
        return Path(str(peers.cross_rank))

    results = {
        "place": (peers.rank, peers.local_rank, peers.local_size, peers.cross_rank, peers.cross_size),
        "local": peers.allgather_local(rank),
        "on the node": total.item(),
        "opened": (str(open_together(peers, open_one, "opening")), opened),
        "left": run(Leaving, FakeHost(directory), distributed=peers, global_batch_size=9, max_length=Batch(9))["error"],
    }
    torch.save(results, directory / f"rank_{rank}.pt")
    dist.distributed_c10d._abort_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
