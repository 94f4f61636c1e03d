"""Three real processes, one of which is slow: the machine's figures name it, however its slowness reaches the others.

Time is a number that stands still, unless a rank works. The slow rank works longer once the others wait for it, so that
they see its time pass.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn
from torch.utils.data import default_collate

from dray import pytorch
from dray.core import DistributedContext
from dray.pytorch import Batch
from dray.training import batch_loop, step_timer, usage
from tests.pytorch.fakes import FakeHost
from tests.pytorch.processes import results_of, serve
from tests.pytorch.regression import Regression, run

pytestmark = pytest.mark.slow

RANKS, BATCHES, WORK_MS, LAG_MS = 3, 5, 10, 50
SLOW_FROM = 2  # in the second forward pass, DistributedDataParallel's ranks wait for one another too


class Clock:
    """Each rank's own work, and that of the slow rank, which all ranks see."""

    def __init__(self, directory: Path) -> None:
        self.rank, self.own_ms, self.batches = int(os.environ["RANK"]), 0, 0
        directory.mkdir(exist_ok=True)
        path = directory / "clock"
        with contextlib.suppress(FileExistsError), path.open("xb") as file:
            file.truncate(8 * (1 + RANKS))
        while path.stat().st_size == 0:
            threading.Event().wait(0.001)
        self.shared = np.memmap(path, np.int64, "r+", shape=(1 + RANKS,))  # the slow rank's ms; how often each waited

    def perf_counter(self) -> float:
        return (self.own_ms + int(self.shared[0])) / 1000

    def waits(self) -> None:
        self.shared[1 + self.rank] += 1

    def lag(self) -> None:
        """In one batch after another, work longer once the others wait."""
        self.batches += 1
        if self.batches > SLOW_FROM:
            while any(self.shared[1 + rank] < self.batches for rank in range(RANKS) if rank != self.rank):
                threading.Event().wait(0.001)
            self.shared[0] += LAG_MS


class Timed(Regression):
    """`slow`: the rank that is slow, and where."""

    clock: Clock
    slow = (-1, "")
    has_buffers = False

    def wrap(self, model: nn.Module) -> Any:
        self.watched = False
        return super().wrap(nn.Sequential(*([nn.BatchNorm1d(4)] if self.has_buffers else []), model))

    def work(self, where: str) -> None:
        if self.slow == (self.clock.rank, where):
            self.clock.lag()

    def build_training_data_loader(self) -> pytorch.DataLoader:
        def collate(records: Any) -> Any:
            self.work("data")
            return default_collate(records)

        return self.data(24, collate_fn=collate)

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        if not self.watched:  # after dray's own hooks
            self.watched, syncing = True, self.model.while_syncing

            @contextlib.contextmanager
            def waits() -> Iterator[None]:
                with syncing():
                    self.clock.waits()
                    yield

            if self.has_buffers:
                self.model.while_syncing = waits
            else:
                first = next(self.model.parameters())
                first.register_post_accumulate_grad_hook(lambda _: self.clock.waits())
        self.clock.own_ms += WORK_MS
        self.work("forward")
        return super().train_batch(batch, epoch_idx, batch_idx)


def figures(trial_class: type[Timed], directory: Path) -> Any:
    """The last figures of the machine, on the chief."""
    host = FakeHost(directory)
    trial_class.clock = batch_loop.time = step_timer.time = Clock(directory)  # type: ignore[attr-defined, assignment]
    usage.MEASURE_EVERY_S = 0.0
    peers = DistributedContext.from_torch_distributed()
    told = run(trial_class, host, distributed=peers, global_batch_size=6, max_length=Batch(BATCHES))
    assert told["error"] is None, told["error"]
    return host.reports[-1].system if host.reports else None


def even(directory: Path) -> Any:
    return figures(Timed, directory)


def slow_data(directory: Path) -> Any:
    class Slow(Timed):
        slow = (1, "data")

    return figures(Slow, directory)


def slow_forward(directory: Path) -> Any:
    class Slow(Timed):
        slow = (2, "forward")

    return figures(Slow, directory)


def slow_chief(directory: Path) -> Any:
    """The others wait for its buffers, before their own forward pass."""

    class Slow(Timed):
        slow = (0, "data")
        has_buffers = True

    return figures(Slow, directory)


@pytest.fixture(scope="module")
def chief(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = results_of(RANKS, __file__, tmp_path_factory.mktemp("slow"))[0]
    return found


def slowest(found: dict[str, float]) -> dict[str, float]:
    return {name.partition("/")[2]: value for name, value in found.items() if name.startswith("slowest_rank_percent/")}


@pytest.mark.parametrize(("scenario", "rank"), [("slow_data", 1), ("slow_forward", 2), ("slow_chief", 0)])
def test_the_slow_rank_is_named_with_its_node(chief: dict[str, dict[str, float]], scenario: str, rank: int) -> None:
    found = chief[scenario]
    assert slowest(found) == {f"{socket.gethostname()}/{rank}": pytest.approx(100 * LAG_MS / WORK_MS)}
    assert found["step_ms"] == pytest.approx(WORK_MS)
    assert found["step_p99_ms"] == pytest.approx(WORK_MS + LAG_MS)


def test_of_equal_ranks_none_is_slower(chief: dict[str, dict[str, float]]) -> None:
    [percent] = slowest(chief["even"]).values()
    assert percent == pytest.approx(0)


def test_only_waiting_for_data_is_waiting_for_the_host(chief: dict[str, dict[str, float]]) -> None:
    waited_ms = LAG_MS * (BATCHES - SLOW_FROM)
    share = 100 * waited_ms / (waited_ms + WORK_MS * BATCHES) / RANKS  # on one of them
    shares = {name: found["host_wait_percent"] for name, found in chief.items()}
    expected = {"even": 0, "slow_data": share, "slow_forward": 0, "slow_chief": share}
    assert shares == {name: pytest.approx(value) for name, value in expected.items()}


if __name__ == "__main__":
    serve([even, slow_data, slow_forward, slow_chief])
