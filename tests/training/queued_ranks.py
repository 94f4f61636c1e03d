"""What test_queued.py runs in two real processes: `python queued_ranks.py <directory>`, once a rank."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dray.training.parallel import ddp
from dray.training.parallel.device import CPU
from dray.worker.process_group import TIMEOUT_S
from tests import queued

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
    ddp.abort()
    for thread in (reading, waiting, ending):
        thread.join(HANGS_S)
        assert not thread.is_alive(), "an abort was to end it"
    raised = ""
    try:
        dist.all_reduce(total, group=group)
    except dist.DistBackendError as error:
        raised = str(error)
    return {"read": read, "other": other, "raised": raised, "is_aborted": ddp.is_aborted()}


def ended(directory: Path) -> None:
    """The end of the default group waits for no rank."""
    dist.distributed_c10d._abort_process_group()
    queued.init(directory / "again", 0 if CHIEF else 1, 2)
    if CHIEF:
        dist.group.WORLD.gone()  # type: ignore[union-attr]
    else:
        dist.all_reduce(torch.ones(1))
    ddp.end_group(CPU)
    assert not dist.is_initialized()


def main(directory: Path) -> None:
    rank = int(os.environ["RANK"])
    queued.init(directory / "rendezvous", rank, 2)
    results = {"queues": ddp.queues_collectives(CPU), "sound": sound(), "left_alone": left_alone()}
    ended(directory)
    torch.save(results, directory / f"rank_{rank}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
