"""What test_queued.py runs in two real processes: `python queued_ranks.py <directory>`, once a rank."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable
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
from dray.worker.process_group import TIMEOUT_S
from tests import queued
from tests.pytorch.two_ranks import Regression

SOON_S, HANGS_S = 0.3, 60
CHIEF = os.environ.get("RANK") == "0"


def sound() -> dict[str, Any]:
    """Collectives that all ranks call, in the default group and in groups of some of the ranks."""
    total, chiefs, everything = torch.ones(2), torch.full((2,), float(CHIEF)), [torch.zeros(1) for _ in range(2)]
    dist.all_reduce(total)
    dist.broadcast(chiefs, src=0)
    dist.all_gather(everything, torch.tensor([float(not CHIEF)]))
    groups = [dist.new_group([rank]) for rank in (0, 1)]
    mine = torch.ones(1)
    dist.all_reduce(mine, group=groups[not CHIEF])
    return {"total": total, "chiefs": chiefs, "everything": everything, "mine": mine}


def hangs(work: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """Work that is not over soon, and what it will have returned."""
    result: list[Any] = []
    thread = threading.Thread(target=lambda: result.append(work()), daemon=True)
    thread.start()
    thread.join(SOON_S)
    assert thread.is_alive(), f"it was to hang, and returned {result}"
    return thread, result


def left_alone() -> dict[str, Any]:
    """The chief waits for a rank that has gone, until it aborts the group."""
    group: Any = dist.new_group(timeout=timedelta(seconds=TIMEOUT_S))
    dist.new_group()  # whose abort waits for the other's
    if not CHIEF:
        group.gone()
        return {}
    total = torch.ones(2)
    dist.all_reduce(total, group=group)  # returns: it is only queued
    other = torch.ones(1)
    dist.all_reduce(other)  # so is what comes after it, in another group
    reading, read = hangs(total.tolist)
    waiting, _ = hangs(torch.cpu.synchronize)
    ending, _ = hangs(group.shutdown)
    aborting = threading.Thread(target=ddp.abort, daemon=True)
    aborting.start()
    for thread in (aborting, reading, waiting, ending):
        thread.join(HANGS_S)
        assert not thread.is_alive(), "an abort was to end it"
    raised = ""
    try:
        dist.all_reduce(total, group=group)
    except dist.DistBackendError as error:
        raised = str(error)
    return {"read": read, "other": other, "raised": raised, "is_aborted": ddp.is_aborted()}


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


def alone() -> str:
    """The chief makes a group of itself, and the other rank has no part in it."""
    if CHIEF:
        queued.SPLIT_S = SOON_S
        try:
            dist.new_group([0], use_local_synchronization=True)
        except dist.DistBackendError as error:
            return str(error)
    return ""


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
    results = {"queues": ddp.queues_collectives(CPU), "sound": sound(), "left_alone": left_alone()}
    again(directory / "waits_by_gloo")
    agreement.LEAVE_S = SOON_S
    results["waits_by_gloo"] = waits_by_gloo()
    again(directory / "alone")
    results["alone"] = alone()
    again(directory / "ended")
    ended()
    torch.save(results, directory / f"rank_{rank}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
