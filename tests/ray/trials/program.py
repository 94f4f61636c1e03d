"""A program of trials on two slots, one rank of which does something alone: what, is for its trial's number to say."""

from __future__ import annotations

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
        if batch_idx == 5 and self.trial == 4 and self.context.get_initial_batch() == 0:
            if self.context.distributed.rank == 1:
                note(self.record, trial=self.trial, failed=time.time())
                raise KeyError("gone")
            time.sleep(600)  # alone: it does not hear of the other
        return super().train_batch(batch, epoch_idx, batch_idx)


def main() -> None:
    dist.init_process_group("gloo")  # as a program under torchrun does
    info = dray.get_cluster_info()
    assert info is not None
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


if __name__ == "__main__":
    main()
