"""Objects between ranks that are processes of their own, in a gloo group."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

RANK = """
import os, sys, time
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
        (directory / "closed").touch()
else:
    deadline = time.monotonic() + 30
    while not (directory / "closed").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    print("closed" if (directory / "closed").exists() else "rank 0 still waits")
    sys.stdout.flush()
os._exit(0)
"""


@pytest.mark.slow
def test_after_a_timeout_a_rank_closes_without_waiting_for_the_others(tmp_path: Path) -> None:
    ranks = [
        subprocess.Popen([sys.executable, "-c", RANK, str(rank), str(tmp_path)], stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=120)[0] for rank in ranks]
    assert said == ["", "closed\n"]
