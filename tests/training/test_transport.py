"""Objects between ranks that are processes of their own, in a gloo group."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from dray.training.parallel.transport import TorchTransport
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


def test_ranks_wait_for_a_chief_that_works_alone_for_any_time() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        transport = TorchTransport()
        backend = transport._group._get_backend(torch.device("cpu"))  # noqa: SLF001 - torch has no public way to ask it
        assert backend.options._timeout > timedelta(days=30)  # noqa: SLF001
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
def test_after_a_timeout_a_rank_ends_without_waiting_for_the_others(tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text(RANK)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ranks = [Forked(str(tmp_path / "rank.py"), str(n), str(tmp_path), environment=environment) for n in range(2)]
    try:
        _, errors = ranks[0].communicate(timeout=HANGS_S)
        assert ranks[0].returncode == 0, errors
        assert ranks[1].returncode is None
    finally:
        for rank in ranks:
            rank.kill()
