"""Objects between ranks that are processes of their own, in a gloo group."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

RANK = """
import sys
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
    sys.stdin.read()
"""


@pytest.mark.slow
def test_after_a_timeout_a_rank_ends_without_waiting_for_the_others(tmp_path: Path) -> None:
    ranks = [
        subprocess.Popen([sys.executable, "-c", RANK, str(rank), str(tmp_path)], stdin=subprocess.PIPE)
        for rank in range(2)
    ]
    try:
        assert ranks[0].wait(timeout=60) == 0
        assert ranks[1].poll() is None
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
