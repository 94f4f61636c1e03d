"""Processes as torchrun would start them, for what only real ones show."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dray.training.parallel import agreement
from tests import queued
from tests.core.test_distributed import nodes
from tests.forks.process import Forked

ROOT = Path(__file__).parents[2]
HANGS_S = 250
"""Processes that take longer hang: less than the limit of a slow test, so that their errors are told."""


@pytest.fixture(scope="module", params=["gloo", "queued"])
def backend(request: pytest.FixtureRequest) -> str:
    """The backends that all tests of several ranks run on: see `tests.queued`."""
    return str(request.param)


@pytest.fixture(scope="module", name="backend", params=["gloo", pytest.param("queued", marks=pytest.mark.long)])
def gloo_first(request: pytest.FixtureRequest) -> str:
    """For tests of what ranks compute: `make test` runs them on gloo alone. How ranks end is tested on both."""
    return str(request.param)


@contextmanager
def two_processes(script: str, *arguments: object, backend: str = "gloo") -> Iterator[list[Forked]]:
    """`python <script> <arguments>` on two ranks, forked; what still runs at the end of the block is killed."""
    with _processes(2, script, *arguments, backend=backend) as processes:
        yield processes


@contextmanager
def _processes(
    size: int, script: str, *arguments: object, backend: str, local_sizes: Sequence[int] = ()
) -> Iterator[list[Forked]]:
    processes = []
    places = nodes(*(local_sizes or (size,)))
    # Each rank needs its own GPU.
    hidden = {} if torch.cuda.device_count() >= size else {"CUDA_VISIBLE_DEVICES": ""}
    for rank in range(size):
        environment = {
            **os.environ,
            **hidden,
            "PYTHONPATH": str(ROOT),
            "TEST_BACKEND": backend,
            "USE_TORCH_DISTRIBUTED": "true",
            "RANK": str(rank),
            "WORLD_SIZE": str(size),
            "LOCAL_RANK": str(places[rank]["local_rank"]),
            "LOCAL_WORLD_SIZE": str(places[rank]["local_size"]),
            "GROUP_RANK": str(places[rank]["cross_rank"]),
            "GROUP_WORLD_SIZE": str(places[rank]["cross_size"]),
        }
        processes.append(Forked(script, *map(str, arguments), environment=environment))
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()


def results_of(
    size: int, script: str, directory: Path, backend: str = "gloo", local_sizes: Sequence[int] = ()
) -> list[dict[Any, Any]]:
    """What each of so many ranks has put into `directory`, after all have ended well; `local_sizes`: how many of them
    are on each node, instead of all on one."""
    with _processes(size, script, directory, backend=backend, local_sizes=local_sizes) as processes:
        errors = [process.communicate(timeout=HANGS_S)[1] for process in processes]
        codes = [process.returncode for process in processes]
        assert codes == [0] * size, "\n".join(errors)  # of all: another's may be the reason
    return [torch.load(directory / f"rank_{rank}.pt", weights_only=False) for rank in range(size)]


def serve(scenarios: Sequence[Callable[[Path], Any]]) -> None:
    """The main function of a script for `results_of`: all ranks run all scenarios, each with a directory that they
    share. What a rank has made of each is saved by the scenario's name."""
    torch.set_num_threads(1)
    agreement.LEAVE_S = 0.5
    directory, rank, size = Path(sys.argv[1]), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    # By a file, not by a port: no other program can take it first.
    queued.init(directory / "rendezvous", rank, size)
    found = {}
    for scenario in scenarios:
        name = scenario.__name__
        found[name] = scenario(directory / name)
        queued.init_again_if_aborted(directory / f"rendezvous_after_{name}", rank, size)
    torch.save(found, directory / f"rank_{rank}.pt")
    dist.destroy_process_group()
