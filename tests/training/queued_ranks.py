"""The program that test_queued.py runs in two real processes: `python queued_ranks.py <directory>`, once per rank."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dray import pytorch
from dray.core import DistributedContext
from dray.pytorch import Batch
from dray.training.errors import ShouldExit
from dray.training.parallel import agreement, ddp
from dray.training.parallel.agreement import Agreement
from dray.training.parallel.device import CPU
from tests import queued
from tests.pytorch.regression import Regression

HANGS_S = 60
CHIEF = os.environ.get("RANK") == "0"


def waits_by_gloo() -> tuple[Any, ...]:
    """The other rank leaves, and the chief waits for it as for the norm of offloaded weights: these are in the CPU's
    memory, for which groups of GPUs have gloo."""
    ddp.gradients_group()

    errors = []

    def work() -> None:
        if CHIEF:
            group: Any = ddp.gradients_group().group
            try:
                group._get_backend(CPU).allreduce([torch.ones(1)]).wait(timedelta(seconds=HANGS_S))  # noqa: SLF001
            except RuntimeError as error:
                errors.append(str(error))
                raise
        raise ShouldExit

    peers = DistributedContext.from_torch_distributed()
    agreed = Agreement(peers, stop_requested=lambda: False, trained=lambda: 0)
    with agreed.listening():
        _, leave = agreed.on_all(work, training=True)
    peers.close()
    assert leave is not None
    return leave.reason, leave.aborted, ["peer" in error for error in errors]


def some_make_groups() -> list[int]:
    """As Megatron and verl do: a group of gloo for some ranks, and one that only its own ranks make."""
    queued.SPLIT_S = 3.0
    dist.new_group([0], backend="gloo")
    if CHIEF:
        dist.new_group([0], use_local_synchronization=True)
    dist.barrier()
    connected: Any = [dist.group.WORLD, ddp.gradients_group().group]
    return [group.collectives for group in connected]


def again(rendezvous: Path) -> None:
    """New groups."""
    dist.distributed_c10d._abort_process_group()
    queued.init(rendezvous, 0 if CHIEF else 1, 2)


def ended() -> None:
    """The end of the default group waits for no rank."""
    if CHIEF:
        dist.group.WORLD.gone()  # type: ignore[union-attr]
    else:
        dist.all_reduce(torch.ones(1))
    ddp.end_group(CPU)
    assert not dist.is_initialized()


class Asserts(Regression):
    """The device of rank 1 fails in the third batch. Before the other one waits for it, its process has ended."""

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        super().__init__(context)
        self.pids = context.distributed.allgather(os.getpid())

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        if batch_idx == 2:
            if not CHIEF:
                queued.gone_for(queued.DEVICE.fail)
            with contextlib.suppress(ProcessLookupError):
                while True:
                    os.kill(self.pids[1], 0)
                    time.sleep(0.01)
        return super().train_batch(batch, epoch_idx, batch_idx)


def device_fails(directory: Path) -> None:
    """A local run, as under torchrun, in which a device fails."""
    os.environ["DRAY_HOME"] = str(directory)
    agreement.ABORT_S = 0.1
    with pytorch.init(
        hparams={"global_batch_size": 8}, distributed=DistributedContext.from_torch_distributed()
    ) as context:
        pytorch.Trainer(Asserts(context), context).fit(max_length=Batch(4))


def main(directory: Path, what: str = "all") -> None:
    rank = int(os.environ["RANK"])
    queued.init(directory / "rendezvous", rank, 2)
    if what == "device_fails":
        return device_fails(directory)
    agreement.LEAVE_S = 0.3
    results = {"some_make_groups": some_make_groups(), "waits_by_gloo": waits_by_gloo()}
    again(directory / "ended")
    ended()
    torch.save(results, directory / f"rank_{rank}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
