"""A rank's own time of a step, by a GPU's events and over ranks; tests/pytorch/test_slow_ranks.py has real ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dray.training import step_timer
from dray.training.step_timer import STEPS, StepTimer, over_ranks

GPU = torch.device("cuda:0")


class Stream:
    """A GPU's stream of work, and the host's time in s, which waits for it or not."""

    def __init__(self) -> None:
        self.done_ms = self.host_s = 0.0

    def perf_counter(self) -> float:
        return self.host_s


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Stream:
    stream = Stream()

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at_ms = stream.done_ms

        def elapsed_time(self, later: Any) -> float:
            return float(later.at_ms - self.at_ms)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(step_timer, "time", stream)
    return stream


def step(timer: StepTimer, stream: Stream, *, ms: float, waits_ms: float) -> None:
    """A step that a GPU is given in no time, with two backward passes."""
    weight = torch.ones(1)
    for _ in range(2):
        stream.done_ms += ms / 2
        timer.on_gradient(weight)
        stream.done_ms += waits_ms / 2
        timer.end_backward()
    timer.end_step()


def test_a_gpus_own_time_leaves_out_its_waits_for_gradients(stream: Stream) -> None:
    timer = StepTimer(GPU)
    timer.begin()
    for number in range(100):
        step(timer, stream, ms=8 if number < 98 else 30, waits_ms=4)
    stream.host_s += 1.0
    timer.end(data_s=0.5)
    stream.host_s += 4.0
    timer.synchronized()
    assert timer.figures() == {
        "step_ms": 8,
        "step_p99_ms": 30,
        "rank_wait_ms": 4,
        "host_wait_percent": 10,
        "device_wait_percent": 80,
    }
    assert timer.figures() == {}, "no training since"


def test_only_the_last_steps_count(stream: Stream) -> None:
    timer = StepTimer(GPU)
    timer.begin()
    for number in range(3 * STEPS):
        step(timer, stream, ms=50 if number < 2 * STEPS else 5, waits_ms=0)
    stream.host_s += 1.0
    timer.synchronized()
    assert timer.figures()["step_p99_ms"] == 5


def ranks(*steps: tuple[float, float]) -> list[dict[str, float]]:
    return [{"step_ms": own, "step_p99_ms": 2 * own, "rank_wait_ms": wait} for own, wait in steps]


def test_the_slowest_rank_is_compared_with_the_median_of_the_others() -> None:
    found = over_ranks([{}, *ranks((70, 45), (90, 30), (115, 10), (80, 40))], ["a", "b", "b", "c", "c"])
    assert found == {"step_ms": 100, "step_p99_ms": 240, "slowest_rank_percent/c/3": pytest.approx(100 * 35 / 90)}
    assert over_ranks(ranks((80, 0)), ["a"]) == {"step_ms": 80, "step_p99_ms": 160}
    assert over_ranks([{}, {}], ["a", "b"]) == {}


def test_models_are_watched_in_the_block_only(stream: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, frozen = (torch.nn.Parameter(torch.ones(1), requires_grad=needed) for needed in (True, False))
    model: Any = SimpleNamespace(parameters=lambda: iter([frozen, weight]))
    monkeypatch.setattr(step_timer, "DDPModel", SimpleNamespace)

    def waited_ms() -> float:
        timer = timers[-1]
        timer.begin()
        weight.sum().backward()
        stream.host_s += 2.0
        timer.end_backward()
        timer.end_step()
        timer.synchronized()
        return timer.figures()["rank_wait_ms"]

    timers = [StepTimer(torch.device("cpu"))]
    with timers[0].watching([model]):
        assert waited_ms() == 2000
        with model.while_syncing():
            pass
    timers.append(StepTimer(torch.device("cpu")))
    assert waited_ms() == 0
    assert not hasattr(model, "while_syncing")


def work(cycles: int) -> None:
    torch.cuda._sleep(cycles)  # noqa: SLF001 - a kernel of a known length


@pytest.mark.gpu
def test_a_gpus_times_are_read_after_training_has_synchronized_with_it() -> None:
    work(1)
    torch.cuda.synchronize()
    timer = StepTimer(torch.device("cuda"))
    timer.begin()
    for _ in range(3):
        work(10_000_000)
        with timer.waiting():
            work(100_000_000)
        timer.end_step()
    timer.end(data_s=0.0)
    torch.cuda.synchronize()
    timer.synchronized()
    found = timer.figures()
    assert found["rank_wait_ms"] > 3 * found["step_ms"] > 0
    assert found["device_wait_percent"] > 50, "the host only queues"
