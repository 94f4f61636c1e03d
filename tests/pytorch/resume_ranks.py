"""What test_resume_ranks.py runs in two real processes: `python resume_ranks.py <directory>`, once a rank.

Runs of every kind, cut and resumed, and runs that go on from one process's checkpoints. What each rank has made of them
is saved to <directory>/rank_<n>.pt; both ranks share the directory.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dray.core import DistributedContext
from dray.training import rng
from tests import queued
from tests.pytorch import resuming
from tests.pytorch.fakes import FakeHost

CUTS = 2
"""Of each kind: all kinds together are cut almost everywhere."""


def two(kind: str, directory: Path, **fit: Any) -> dict[str, Any]:
    return resuming.run(kind, FakeHost(directory), distributed=DistributedContext.from_torch_distributed(), **fit)


def go_on(kind: str, directory: Path, source: Path) -> dict[int, dict[str, Any]]:
    """The runs that go on from each cut of `source`."""
    found = {}
    for cut in resuming.cuts(kind, CUTS):
        rng.seed_all(999)
        found[cut] = two(kind, directory / str(cut), latest_checkpoint=str(source / f"checkpoint_{cut}"))
    return found


def main(directory: Path) -> None:
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    # By a file, not by a port: no other program can take it first.
    queued.init(directory / "rendezvous", rank, 2)
    found: dict[str, Any] = {}
    for kind in resuming.KINDS:
        place = directory / kind
        found[kind] = {"whole": two(kind, place / "two")}
        found[kind]["resumed"] = go_on(kind, place / "resumed", place / "two")
        if kind in resuming.MOVING:
            found[kind]["from one"] = go_on(kind, place / "from_one", place / "one")
    torch.save(found, directory / f"rank_{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
