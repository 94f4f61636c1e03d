"""The exits of a program on two ranks, which are threads here and share a store of torch."""

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
def test_a_rank_that_exited_learns_which_rank_it_blocks_and_where(waits: int) -> None:
    over = threading.Event()

    def train() -> None:
        begun[waits] += 1
        assert over.wait(30)  # blocked in a collective that it has begun

    begun = [3, 3]
    store = HashStore()
    program = ThreadPoolExecutor(1)
    other = ProgramExits(store, 1, waits, 2, lambda: begun[waits])

    def run() -> None:
        with other.watch(Path(__file__).parent):
            train()

    running = program.submit(run)
    error = ProgramExits(store, 1, 1 - waits, 2, lambda: begun[1 - waits]).wait()
    over.set()
    running.result(30)
    line = train.__code__.co_firstlineno + 2
    what, where, source = error.splitlines()
    assert what == f"rank {waits} is blocked in a collective; rank {1 - waits} already exited"
    assert where == f"  {Path(__file__).name}:{line}, in train"
    assert source.strip() == "assert over.wait(30)  # blocked in a collective that it has begun"


def test_a_rank_may_train_on_alone_if_it_is_not_blocked() -> None:
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


def test_the_death_of_the_stores_rank_is_left_to_the_programs_next_collective(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    errors: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", errors.append)
    asked = threading.Event()

    class Gone:
        def check(self, keys: list[str]) -> bool:
            asked.set()
            raise DistNetworkError("Connection reset by peer")

    with ProgramExits(Gone(), 1, 1, 2, lambda: 3).watch(None):
        assert asked.wait(30)
    assert errors == [], "the watching thread ends without an error"


def test_only_collectives_of_all_ranks_are_counted(group: None, monkeypatch: pytest.MonkeyPatch) -> None:
    before = collectives_begun()
    dist.all_reduce(torch.ones(1))
    dist.barrier()
    dist.all_reduce(torch.ones(1), group=dist.new_group([0]))
    assert collectives_begun() == before + 2
    # gloo counts what two of three ranks send each other on these two only.
    monkeypatch.setattr(dist, "get_world_size", lambda: 3)
    assert collectives_begun() == 0
