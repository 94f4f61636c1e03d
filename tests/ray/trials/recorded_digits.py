"""The digits trial, noting where its processes run, and its batches. To be put beside the example's model_def.py."""

from __future__ import annotations

import functools
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import model_def
import ray
import torch
import torch.distributed
from recorded import note, trial_id

from dray import pytorch
from dray.training.checkpoint import checkpointer, shard_file


class RecordedDigits(model_def.DigitsTrial):
    """Notes into the file ``record``; sleeps for ``pause_s`` a batch."""

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        super().__init__(context)
        self.record, self.pause_s = context.get_hparam("record"), context.get_hparam("pause_s")
        self.trial = trial_id()
        distributed = torch.distributed.is_initialized()
        note(
            self.record,
            trial=self.trial,
            pid=os.getpid(),
            made=context.distributed.get_rank(),
            size=torch.distributed.get_world_size() if distributed else 1,
            backend=torch.distributed.get_backend() if distributed else None,
            device=str(context.device),
            gpus=os.environ.get("CUDA_VISIBLE_DEVICES"),
            node=ray.get_runtime_context().get_node_id(),
            file=model_def.__file__,
        )

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, torch.Tensor]:
        note(self.record, trial=self.trial, pid=os.getpid(), batch=batch_idx)
        time.sleep(self.pause_s)
        return super().train_batch(batch, epoch_idx, batch_idx)


class WithDropout(RecordedDigits):
    """Its result depends on the order of the data and on random numbers of both kinds.

    The trials of the list ``sharded`` shard their models. Files beside ``record`` say what happens to a trial: it waits
    before a batch for as long as one is there, or a rank raises, or is killed while it writes its shards.
    """

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        if trial_id() in context.get_hparam("sharded"):
            shard = pytorch.FullyShard(units=[torch.nn.Linear])
            context.wrap_model = functools.partial(context.wrap_model, parallel=shard)  # type: ignore[method-assign]
        super().__init__(context)
        self.dropout = torch.nn.Dropout(0.25)
        self.rank = context.distributed.get_rank()
        _die_saving(Path(f"{self.record}.save.{self.trial}.{self.rank}"))

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, torch.Tensor]:
        while Path(f"{self.record}.hold.{self.trial}.{batch_idx}").exists():
            time.sleep(0.02)
        if _taken(Path(f"{self.record}.raise.{self.trial}.{self.rank}")):
            raise ArithmeticError("this rank alone")
        images, labels = batch
        return super().train_batch((self.dropout(images), labels), epoch_idx, batch_idx)


def _taken(file: Path) -> bool:
    """Whether the file was there; it no longer is."""
    try:
        file.unlink()
    except FileNotFoundError:
        return False
    return True


def _die_saving(file: Path) -> None:
    """Have this process killed when it writes shards and the file is there. Small states, too, are saved meanwhile."""

    def write(output: Any, shards: Mapping[str, Any]) -> None:
        if _taken(file):
            os.kill(os.getpid(), signal.SIGKILL)
        WRITE(output, shards)

    shard_file.write = write
    checkpointer.AT_ONCE_BYTES = 0


WRITE = shard_file.write
