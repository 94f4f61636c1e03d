"""Each of several trials on one GPU is limited to its share of the memory, also the later ones of a process."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias

import pytest
import torch

from dray.desk.messages import Departure
from dray.training.parallel.distributed import DistributedContext
from dray.worker import gpu_share
from dray.worker import serve as worker
from dray.worker.gpu_share import CONTEXT_BYTES, limit_gpu_memory, wait_for_gpu_memory
from dray.worker.isolation.snapshot import ProcessSnapshot
from dray.worker.ranks import Place
from tests.workers import connected, worker_spec

Serve: TypeAlias = Callable[[int, tuple[str, ...]], list[int]]

GB = 1 << 30
H100_CONTEXT = 534 << 20


class FakeGPU:
    """Has torch.cuda's interface."""

    def __init__(self, total: int = 80 * GB) -> None:
        self.total, self.fraction = total, 1.0

    def current_device(self) -> int:
        return 2

    def get_device_properties(self, device: int) -> Any:
        assert device == 2
        return SimpleNamespace(total_memory=self.total)

    def set_per_process_memory_fraction(self, fraction: float, device: int) -> None:
        assert isinstance(fraction, float), "torch accepts nothing else"
        assert device == 2
        self.fraction = fraction

    @property
    def limit(self) -> int:
        """As torch calculates it."""
        return int(self.fraction * self.total)


def with_gpu(gpu: FakeGPU, patch: pytest.MonkeyPatch) -> FakeGPU:
    patch.setattr(gpu_share, "torch", SimpleNamespace(cuda=gpu))
    return gpu


@pytest.mark.parametrize("trials", [2, 3, 4, 7, 50])
@pytest.mark.parametrize("total", [8 * GB, 16 * GB, 80 * GB, 141 * GB])
def test_the_shares_and_contexts_of_all_trials_fit(trials: int, total: int, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = with_gpu(FakeGPU(total), monkeypatch)
    limit_gpu_memory(trials)
    assert gpu.limit >= total // trials // 2, "CUDA's context takes at most half of a share"
    if total // trials > 2 * CONTEXT_BYTES:
        assert trials * (gpu.limit + CONTEXT_BYTES) <= total
        assert gpu.limit + H100_CONTEXT < total // trials, "and some room for kernels"
        assert trials * (gpu.limit + CONTEXT_BYTES) > total - 2 * trials, "no memory is left unused"


@pytest.mark.parametrize(
    ("trials", "free", "waits"),
    [
        (1, [75], 0),
        (1, [0, 3, 3, 79], 3),  # 0: not even room for a context
        (4, [10, 19], 1),  # the others have their shares
        (1, [40] * 1000, 150),  # another program is there to stay
    ],
)
def test_a_process_waits_for_the_memory_of_one_that_has_died(
    trials: int, free: list[int], waits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    clock = SimpleNamespace(sleep=slept.append, monotonic=lambda: sum(slept))
    amounts = iter(free)

    def mem_get_info(device: torch.device) -> tuple[int, int]:
        assert device.index == 2
        if amount := next(amounts):
            return amount * GB, 80 * GB
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(gpu_share, "torch", SimpleNamespace(cuda=SimpleNamespace(mem_get_info=mem_get_info)))
    monkeypatch.setattr(gpu_share, "time", clock)
    wait_for_gpu_memory(torch.device("cuda", 2), trials)
    assert len(slept) == pytest.approx(waits, abs=1 if waits > 100 else 0)


class Desk:
    """Grants two leases to one rank, then no more."""

    def __init__(self, directory: Path) -> None:
        leases = [SimpleNamespace(number=number, store=None, trial_dir=directory, code=None) for number in (1, 2)]
        self._leases = iter([("run", None, pickle.dumps(lease)) for lease in leases])

    def next_lease(self, *_: object) -> object:
        return next(self._leases, None)

    def begun(self, lease: int) -> None:
        """Nothing."""

    def leave(self, lease: int, rank: int, departure: Departure) -> None:
        """Nothing."""


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Serve:
    """Serve two leases; returns the memory limit that each trial sees."""
    gpu = with_gpu(FakeGPU(), monkeypatch)
    found: list[int] = []

    def trial(*_: object, **__: object) -> Departure:
        found.append(gpu.limit)
        gpu.fraction = 1.0  # a trial can do that
        return Departure(outcome="completed")

    def serve(shared_by: int, gpus: tuple[str, ...]) -> list[int]:
        settings = SimpleNamespace(reuse_workers=True, secrets=[])
        spec = worker_spec(None, settings, shared_by=shared_by)
        loaded = worker.Loaded(spec.experiment, type("Trial", (), {}), None)
        given = spec, connected(Desk(tmp_path)), loaded, DistributedContext(), Place("a", "1", gpus), ProcessSnapshot()
        worker.serve_joined(*given, run_trial=trial)
        return found

    return serve


def test_every_trial_of_a_process_starts_with_the_limit(limits: Serve) -> None:
    assert limits(4, ("0",)) == [20 * GB - CONTEXT_BYTES] * 2


@pytest.mark.parametrize(("shared_by", "gpus"), [(1, ("0",)), (4, ())])
def test_without_a_shared_gpu_there_is_no_limit(shared_by: int, gpus: tuple[str, ...], limits: Serve) -> None:
    assert limits(shared_by, gpus) == [80 * GB] * 2


# ---------------------------------------------------------------------------------------------------------- on a GPU
@pytest.mark.gpu
def test_memory_beyond_the_share_is_an_error_here_and_a_smaller_tensor_is_not() -> None:
    share = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory // 4
    try:
        limit_gpu_memory(4)
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(share, dtype=torch.uint8, device="cuda")
        assert torch.empty(share // 4, dtype=torch.uint8, device="cuda").numel() == share // 4
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch.cuda.empty_cache()
