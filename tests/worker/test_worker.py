"""The worker processes of a group: what they see of their machine, what they import, and their share of a GPU."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias

import pytest
import torch
import torch.distributed as dist

from dray.errors import EntrypointError, ImportRaisedError
from dray.leases.messages import Departure, Unfit
from dray.training.parallel import ddp
from dray.training.parallel.distributed import DistributedContext
from dray.worker import entry, gpu_share, lease_loop
from dray.worker.gpu_share import CONTEXT_BYTES, limit_gpu_memory, wait_for_gpu_memory
from dray.worker.isolation.leaks import group_names
from dray.worker.isolation.snapshot import ProcessSnapshot
from dray.worker.ranks import Place, assign
from dray.worker.unfit import unloaded
from tests.core.test_distributed import nodes
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
        loaded = lease_loop.Loaded(spec.experiment, type("Trial", (), {}), None)
        given = spec, connected(Desk(tmp_path)), loaded, DistributedContext(), Place("a", "1", gpus), ProcessSnapshot()
        lease_loop.serve_joined(*given, run_trial=trial)
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


class ArrivalsDesk:
    """Keeps why groups are broken, and on which nodes their processes arrive."""

    def __init__(self) -> None:
        self.causes: list[str] = []
        self.arrivals: list[tuple[object, ...]] = []

    def broken(self, owner: str, group: str, why: Unfit) -> None:
        self.causes.append(why.message)

    def arrived(self, *arrival: object) -> None:
        self.arrivals.append(arrival)


def enter(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str | None], *gpus: str) -> list[str]:
    """Enter a worker that can't import what it runs; returns the errors that it reports."""
    labels = {"ray.io/accelerator-type": "L4", "ray.io/market-type": "spot"}
    here = SimpleNamespace(get_node_id=lambda: "node-7", get_node_labels=lambda: labels)
    monkeypatch.setattr("ray.get_runtime_context", lambda: here)
    monkeypatch.setattr(entry, "name_of_this_node", lambda: "10.0.0.7 (gpu-1)")
    monkeypatch.setattr(entry, "skip_rays_exit_handlers", lambda: None)
    monkeypatch.setitem(sys.modules, "dray.worker.lease_loop", None)  # as if it were not there
    desk = ArrivalsDesk()
    monkeypatch.setattr(entry, "Connection", connected)
    [ranks] = assign([Place("node-7", "10.0.0.7", gpus)])
    entry.serve_leases(worker_spec(desk, SimpleNamespace(environment=environment)), ranks)
    assert desk.arrivals == [("run", "group-0", 1, "node-7", "L4", "L4-spot" if gpus else "CPU-spot")]
    return desk.causes


def test_a_worker_that_can_not_import_what_it_runs_reports_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise Ray would start it again and again."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert enter(monkeypatch, {}, "0") == [
        "node 10.0.0.7 (gpu-1) can't import what workers run: ModuleNotFoundError: import of dray.worker.lease_loop "
        "halted; None in sys.modules; install the driver's packages there"
    ]


@pytest.mark.parametrize(
    ("gpus", "environment", "visible"),
    [
        (["3", "2"], {}, "2,3"),
        ([], {}, ""),
        ([], {"CUDA_VISIBLE_DEVICES": "1"}, "1"),  # the config's environment_variables
    ],
)
def test_a_worker_sees_the_gpus_of_its_group_and_on_a_cpu_slot_none(
    gpus: list[str], environment: dict[str, str | None], visible: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "3")  # as Ray does on a node of AMD's
    enter(monkeypatch, environment, *gpus)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == visible
    assert os.environ["HIP_VISIBLE_DEVICES"] == ("" if environment else visible)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("modules", "without"),
    [
        # Each worker before it comes to its own code.
        ("dray.worker.entry, dray.worker.lease", {"ray.tune", "rich", "searchers.search", "torch"}),
        pytest.param(
            "dray.worker.lease_loop",
            {"ray.tune", "rich", "searchers.search", "ray.train.v2._internal.execution.controller"},
            marks=pytest.mark.long,
        ),
    ],
    ids=["before its code", "worker"],
)
def test_processes_of_a_group_import_little(modules: str, without: set[str]) -> None:
    """Every import delays the first batch."""
    program = f"import sys, {modules}; print({without} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, timeout=240)
    assert done.stdout == "set()\n"


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's on_exit")
def test_a_worker_ends_although_an_exit_handler_of_ray_hangs_and_later_ones_run() -> None:
    code = """
import atexit, ctypes, sys
libc = ctypes.CDLL(None)
libc["__cxa_atexit"](libc.pause, None, None)  # as Ray does
from dray.worker.entry import skip_rays_exit_handlers
skip_rays_exit_handlers()
libc.strdup.restype = ctypes.c_void_p  # Python's own memory is freed by then
libc["__cxa_atexit"](libc.puts, ctypes.c_void_p(libc.strdup(b"a library's")), None)
atexit.register(print, "Python's", flush=True)
libc.puts(b"buffered")
sys.exit(3)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 3
    assert sorted(done.stdout.splitlines()) == ["Python's", "a library's", "buffered"]


DESK: Any = None  # it is told of what concerns other trials, too
LEASE: Any = SimpleNamespace(client="run", code="0123456789ab")
RAISED = ImportRaisedError([("trial", "model_def.py:3 raised ValueError: no")])


@pytest.mark.parametrize(
    ("error", "is_reused", "is_tried_again"),
    [(RAISED, True, True), (RAISED, False, False), (EntrypointError([("trial", "there is no class")]), True, False)],
)
def test_only_an_import_that_fails_in_a_process_with_other_code_is_tried_in_a_new_one(
    error: EntrypointError, is_reused: bool, is_tried_again: bool
) -> None:
    departure = unloaded(DESK, "g", LEASE, error, is_reused=is_reused)
    if is_tried_again:
        assert departure == Departure(outcome="unloaded", alone=True)
    else:
        why = f"its code can't be loaded: trial: {error.faults[0].what}"
        assert departure == Departure(outcome="errored", error=why, fatal=True), "it would fail again"


Run = Callable[..., tuple[Any, list[str]]]


@pytest.fixture
def run(group: None) -> Run:
    """Run a trial on the only rank of a process group."""
    return ProcessSnapshot().run


def descriptors() -> int:
    return len(os.listdir("/dev/fd"))


def use_mesh() -> None:
    from torch.distributed.tensor import DeviceMesh, Shard, distribute_tensor

    group: Any = dist.new_group([0])
    mesh = DeviceMesh.from_group(group, "cpu")
    tensor = distribute_tensor(torch.ones(2, 2), mesh, [Shard(0)])
    dist.all_reduce((tensor @ tensor).full_tensor(), group=group)


def test_groups_of_trials_end_with_them(run: Run) -> None:
    assert run(use_mesh) == (None, [])  # this imports and connects for the first time
    before = descriptors()
    for _ in range(3):
        assert run(use_mesh) == (None, [])
    assert len(group_names()) == 1
    assert descriptors() <= before


def test_a_group_that_the_next_trial_would_find_is_a_reason_for_a_new_process(run: Run) -> None:
    kept: list[Any] = []
    _, [reason] = run(lambda: kept.append(dist.new_group([0])))
    assert reason == "1 process group that its trial made can't be freed"
    assert run(lambda: None) == (None, []), "it has ended"


def test_groups_that_a_failed_trial_leaves_are_a_reason_and_stay(run: Run) -> None:
    def trial() -> str:
        dist.new_group([0])
        return "failed"

    _, [reason] = run(trial, lambda result: result == "failed")
    assert reason == "its failed trial has left 1 process group"
    assert len(group_names()) == 2


def test_the_groups_that_dray_keeps_stay(run: Run) -> None:
    def total() -> float:
        ones = torch.ones(1)
        dist.all_reduce(ones, group=ddp.gradients_group().group)
        return ones.item()

    assert [run(total) for _ in range(2)] == [(1.0, [])] * 2
    assert len(group_names()) == 2


def test_a_rank_names_groups_as_the_others_do_although_it_left_the_trial_before_with_fewer(
    run: Run, tmp_path: Path
) -> None:
    """Ranks find each other by the name."""

    def name_after(made: int) -> str:
        trials: list[list[str]] = []

        def trial(*_: object, **__: object) -> Departure:
            trials.append([dist.new_group([0]).group_name for _ in range(1 if trials else made)])
            return Departure(outcome="invalid_hp")

        spec = worker_spec(None, SimpleNamespace(reuse_workers=True, secrets=[], collective_timeout_s=60))
        loaded = lease_loop.Loaded(spec.experiment, type("Trial", (), {}), None)
        peers: Any = SimpleNamespace(close=lambda: None)
        rank = DistributedContext(**nodes(2)[0], transport=peers)
        given = spec, connected(Desk(tmp_path)), loaded, rank, Place("a", "1"), ProcessSnapshot()
        lease_loop.serve_joined(*given, run_trial=trial)
        return trials[1][0]

    assert name_after(0) == name_after(2)
