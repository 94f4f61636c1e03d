"""The ends of a program on two ranks, which are threads here; what passes between them is torch's own store."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import DistNetworkError, HashStore  # type: ignore[attr-defined]

from dray.worker import exits
from dray.worker.exits import ProgramExits, collectives_begun


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exits, "CHECK_EVERY_S", 0.01)


@pytest.mark.parametrize("waits", [0, 1])
def test_a_rank_that_has_ended_hears_that_another_waits_for_it_and_where(waits: int) -> None:
    over = threading.Event()

    def train() -> None:
        begun[waits] += 1
        assert over.wait(30)  # as in a collective operation, which it has begun

    begun = [3, 3]
    store = HashStore()
    program = ThreadPoolExecutor(1)
    other = ProgramExits(store, 1, waits, 2, lambda: begun[waits])

    def run() -> None:
        with other.watch(Path(__file__).parent):
            train()

    running = program.submit(run)
    told = ProgramExits(store, 1, 1 - waits, 2, lambda: begun[1 - waits]).wait()
    over.set()
    running.result(30)
    line = train.__code__.co_firstlineno + 2
    what, where, source = told.splitlines()
    assert what == f"rank {waits} is blocked in a collective; rank {1 - waits} already exited"
    assert where == f"  {Path(__file__).name}:{line}, in train"
    assert source.strip() == "assert over.wait(30)  # as in a collective operation, which it has begun"


def test_a_rank_may_go_on_alone_as_long_as_it_waits_for_nobody() -> None:
    store, looks = HashStore(), []

    def begun() -> int:
        looks.append(3)
        return 3

    chief, other = ProgramExits(store, 1, 0, 2, begun), ProgramExits(store, 1, 1, 2, lambda: 3)
    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(other.wait)
        with chief.watch(None):
            while len(looks) < 5:
                assert not ended.done()
        assert chief.wait() == ended.result(30) == ""


def test_where_there_is_no_other_rank_there_is_nothing_to_wait_for() -> None:
    alone = ProgramExits(None, 1, 0, 1)
    with alone.watch(None):
        assert not [thread for thread in threading.enumerate() if thread.name == "dray-exits"]
    assert alone.wait() == ""


def test_program_goes_on_where_another_rank_has_died_with_the_store(recwarn: pytest.WarningsRecorder) -> None:
    """What it finds of that in its next collective operation is told better."""
    asked = threading.Event()

    class Gone:
        def check(self, keys: list[str]) -> bool:
            asked.set()
            raise DistNetworkError("Connection reset by peer")

    with ProgramExits(Gone(), 1, 1, 2, lambda: 3).watch(None):
        assert asked.wait(30)
    assert not recwarn.list, "nothing is left to a thread that nobody sees"


def test_only_what_all_ranks_do_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        before = collectives_begun()
        dist.all_reduce(torch.ones(1))
        dist.barrier()
        dist.all_reduce(torch.ones(1), group=dist.new_group([0]))
        assert collectives_begun() == before + 2
        # What two of three ranks send one another is in gloo's count of these two alone.
        monkeypatch.setattr(dist, "get_world_size", lambda: 3)
        assert collectives_begun() == 0
    finally:
        dist.destroy_process_group()
