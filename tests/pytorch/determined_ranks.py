"""What test_determined_checkpoints.py runs in two processes: `python determined_ranks.py <directory>`, once a rank.

Both resume Determined's checkpoints; the losses of each rank are saved to <directory>/rank_<n>.pt.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from dray.core import DistributedContext
from tests import queued
from tests.pytorch.test_determined_checkpoints import resumed


def main(directory: Path) -> None:
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    queued.init(directory / "rendezvous", rank, 2)
    peers = DistributedContext.from_torch_distributed()
    found = {
        name: resumed(name, directory / name, distributed=peers, global_batch_size=size).losses
        for name, size in (("plain-2", 8), ("two-2", 8), ("still", 4))
    }
    torch.save(found, directory / f"rank_{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
