"""What test_interrupted_ranks.py runs in two real processes: `python interrupted_ranks.py <directory>`, once a rank.

Ctrl-C reaches one rank only, in the middle of training.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dray import pytorch
from dray.core import DistributedContext
from tests import queued
from tests.pytorch.fakes import OneWeight

BATCHES, ASKED_AT = 1_000_000, 12


class Interrupted(OneWeight):
    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        if batch_idx == ASKED_AT and self.context.distributed.rank == 1:
            os.kill(os.getpid(), signal.SIGINT)
        return super().train_batch(batch, epoch_idx, batch_idx)


def main(directory: Path) -> None:
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    queued.init(directory / "rendezvous", rank, 2)
    raised = False
    with pytorch.init(distributed=DistributedContext.from_torch_distributed()) as context:
        trial = Interrupted(context)
        try:
            # An explicit "best" is warned about.
            pytorch.Trainer(trial, context).fit(max_length=pytorch.Batch(BATCHES), checkpoint_policy="best")
        except KeyboardInterrupt:
            raised = True
    dist.barrier()
    found = {"raised": raised, "begun": len(trial.seen), "level": logging.getLogger("dray").level}
    torch.save(found, directory / f"rank_{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ["DRAY_HOME"] = str(Path(sys.argv[1]) / "results")
    # So that each rank's are kept apart: the tests read what this one says.
    sys.stderr = (Path(sys.argv[1]) / f"said_by_{os.environ['RANK']}").open("w", buffering=1)
    main(Path(sys.argv[1]))
