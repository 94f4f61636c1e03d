"""Objects between ranks that are processes of their own, in a gloo group."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.forks.process import ROOT, Forked

HANGS_S = 250

RANK = """
import sys, time
from pathlib import Path

import torch.distributed as dist
from dray.training.parallel.transport import TorchTransport

rank, directory = int(sys.argv[1]), Path(sys.argv[2])
dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=2)
transport = TorchTransport()
assert transport.allgather(rank) == [0, 1]
if rank == 0:
    try:
        transport.allgather("still there?", timeout_s=0.1)
    except TimeoutError:
        transport.close()
        del transport
        dist.destroy_process_group()
else:
    time.sleep(600)
"""


#: The chief works alone for longer than torch's default timeout, which is a second here instead of half an hour.
WORKS_ALONE = """
import sys, time
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
dist.distributed_c10d.default_pg_timeout = timedelta(seconds=1)
from dray.training.parallel.transport import TorchTransport

rank, directory = int(sys.argv[1]), Path(sys.argv[2])
long = timedelta(seconds=100)
dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=2, timeout=long)
transport = TorchTransport()
if rank == 0:
    time.sleep(3)
assert transport.allgather(rank) == [0, 1]
transport.close()
dist.destroy_process_group()
"""


def start(script: str, directory: Path) -> list[Forked]:
    """It on two ranks."""
    file = directory / "rank.py"
    file.write_text(script)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return [Forked(str(file), str(rank), str(directory), environment=environment) for rank in range(2)]


@pytest.mark.slow
def test_ranks_wait_for_a_chief_that_works_alone(tmp_path: Path) -> None:
    ranks = start(WORKS_ALONE, tmp_path)
    try:
        for rank in ranks:
            _, errors = rank.communicate(timeout=HANGS_S)
            assert rank.returncode == 0, errors
    finally:
        for rank in ranks:
            rank.kill()


@pytest.mark.slow
def test_after_a_timeout_a_rank_ends_without_waiting_for_the_others(tmp_path: Path) -> None:
    ranks = start(RANK, tmp_path)
    try:
        _, errors = ranks[0].communicate(timeout=HANGS_S)
        assert ranks[0].returncode == 0, errors
        assert ranks[1].returncode is None
    finally:
        for rank in ranks:
            rank.kill()
