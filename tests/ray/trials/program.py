"""Programs of trials on two slots, or on one: what each does is for its trial's number to say.

``python3 program.py faults``: one rank of two does something alone. ``python3 program.py codes``: they exit with codes.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from recorded import Recorded, note

import dray
from dray import core, pytorch


class Alone(Recorded):
    """Rank 1 does something alone, at its sixth batch, before backward."""

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, torch.Tensor]:
        if batch_idx == 5 and self.context.distributed.rank == 1:
            if self.trial == 1:
                self.context.set_stop_requested(True)
            if self.trial == 2:
                raise pytorch.ShouldExit
            if self.trial == 3:
                raise pytorch.InvalidHP("rank 1 has no room for it")
            if self.trial == 4 and self.context.get_initial_batch() == 0:
                raise ArithmeticError("rank 1 went wrong")
        if batch_idx == 5 and self.trial == 5 and self.context.get_initial_batch() == 0:
            rank = self.context.distributed.rank
            note(self.record, trial=self.trial, pid=os.getpid(), busy=rank)
            if rank == 1:
                raise KeyError("gone")
            time.sleep(600)  # alone: it does not hear of the other
        return super().train_batch(batch, epoch_idx, batch_idx)


def faults(info: Any) -> None:
    dist.init_process_group("gloo")  # as a program under torchrun does
    ranks = core.DistributedContext.from_torch_distributed() if info.trial.trial_id in (1, 3) else None
    with pytorch.init(distributed=ranks) as context:
        peers = context.distributed
        print(f"rank {peers.rank} of {peers.size} on slots {info.slot_ids}")
        pytorch.Trainer(Alone(context), context).fit(
            max_length=pytorch.Batch(12),
            validation_period=pytorch.Batch(4),
            checkpoint_policy="all",
            latest_checkpoint=info.latest_checkpoint,
        )
    dist.destroy_process_group()


def codes(info: Any) -> None:
    trial, attempt = info.trial.trial_id, os.environ["HOOKED"]
    if trial == 1:
        print("no data for it")
        sys.exit(3)
    with pytorch.init(hparams=dict(info.trial.hparams)) as context:
        pytorch.Trainer(Recorded(context), context).fit(
            max_length=pytorch.Batch(8), latest_checkpoint=info.latest_checkpoint
        )
    child = subprocess.run([sys.executable, "-c", "import determined"], check=False, capture_output=True, text=True)
    told = {"after": attempt, "went_on": info.latest_checkpoint, "child": child.stderr}
    note(info.trial.hparams["record"], trial=trial, pid=os.getpid(), **told)
    if trial == 2 and info.latest_checkpoint is None:
        raise OSError("what comes after training failed")
    os.environ["LEFT_BY"] = str(trial)


if __name__ == "__main__":
    assert "LEFT_BY" not in os.environ, "what another trial has set is gone"
    [what] = sys.argv[1:]
    {"faults": faults, "codes": codes}[what](dray.get_cluster_info())
