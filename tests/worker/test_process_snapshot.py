"""A worker's process is restored after each trial, or the reasons to replace it are returned."""

from __future__ import annotations

import atexit
import gc
import logging
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dray import memory, pytorch
from dray.memory import give_back
from dray.pytorch.cached import drop_all
from dray.worker import children as children_module
from dray.worker.children import is_alive
from dray.worker.isolation import leaks
from dray.worker.isolation import snapshot as snapshot_module
from dray.worker.isolation.handlers import redirect_handlers
from dray.worker.isolation.leaks import MAX_NAMED, Leaks
from dray.worker.isolation.settings import float32_precision
from dray.worker.isolation.snapshot import ProcessSnapshot
from tests.ray.trials.changes import CHANGES


def look(what: str) -> Any:
    """In a new thread, as a trial does."""
    seen: list[Any] = []
    thread = threading.Thread(target=lambda: seen.append(CHANGES[what][0]()))
    thread.start()
    thread.join()
    return seen[0]


@pytest.mark.parametrize("what", CHANGES)
def test_a_setting_is_restored_after_the_trial(what: str, tmp_path: Path) -> None:
    if what == "start method":  # another test may have set it, which can be done but once
        multiprocessing.set_start_method(None, force=True)
    before = look(what)
    seen = []

    def trial() -> None:
        CHANGES[what][1](tmp_path)
        seen.append(CHANGES[what][0]())

    assert ProcessSnapshot().run(trial) == (None, [])
    if what == "determinism of compiled code" and not hasattr(import_module("torch._inductor.config"), "deterministic"):
        pytest.skip("this torch has no such setting")
    assert seen != [before], "the change is one"
    assert look(what) == before


@pytest.mark.parametrize("newer", ["generic", "conv"])
@pytest.mark.skipif(not hasattr(torch.backends, "fp32_precision"), reason="this torch has the older settings only")
def test_float32_precision_is_restored_after_a_change_by_torchs_newer_api(newer: str) -> None:
    def trial() -> None:
        if newer == "generic":
            torch.backends.fp32_precision = "tf32"
        else:
            torch.backends.cudnn.conv.fp32_precision = "ieee"  # torch then refuses to tell cudnn.allow_tf32
        assert float32_precision() != before

    before = float32_precision()
    assert ProcessSnapshot().run(trial) == (None, [])
    assert float32_precision() == before


def test_a_setting_that_cannot_be_restored_is_a_reason_for_a_new_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    _, [reason] = ProcessSnapshot().run(lambda: shutil.rmtree(tmp_path))
    assert reason == f"can't restore the working directory: [Errno 2] No such file or directory: '{tmp_path}'"


def test_a_warning_is_shown_to_each_trial() -> None:
    def trial() -> list[warnings.WarningMessage]:
        with warnings.catch_warnings(record=True) as shown:
            warnings.simplefilter("once")
            for _ in range(3):
                warnings.warn("look out", stacklevel=1)
        return shown

    snapshot = ProcessSnapshot()
    for _ in range(2):
        shown, _ = snapshot.run(trial)
        assert len(shown) == 1


def test_loggers_that_a_library_sets_up_when_it_is_imported_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a_library.py").write_text(
        "import logging\nlogging.getLogger(__name__).addHandler(logging.NullHandler())"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("dray.imports._INSTALLED_TEXT", (str(tmp_path),))
    ProcessSnapshot().run(lambda: __import__("a_library"))
    del sys.modules["a_library"]
    assert len(logging.getLogger("a_library").handlers) == 1


def test_a_trials_error_is_raised_after_the_process_is_restored() -> None:
    def trial() -> None:
        os.environ["LEFT"] = "1"
        raise SystemExit(3)

    with pytest.raises(SystemExit):
        ProcessSnapshot().run(trial)
    assert "LEFT" not in os.environ


# ------------------------------------------------------------------------------------------------------- what runs on
def test_a_thread_in_the_users_code_is_a_reason_with_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaks, "END_S", 0.05)
    begun, over = threading.Event(), threading.Event()
    snapshot = ProcessSnapshot()

    def prefetch() -> None:
        begun.set()
        over.wait()

    def trial() -> None:
        threading.Thread(target=prefetch, name="prefetch").start()
        begun.wait()

    try:
        _, [reason] = snapshot.run(trial)
        assert reason.startswith(f"thread prefetch is still running, at {__file__}:")
    finally:
        over.set()


def test_a_thread_that_ends_and_a_waiting_thread_of_a_library_are_no_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    from concurrent.futures import ThreadPoolExecutor

    monkeypatch.setattr(leaks, "END_S", 30.0)
    pool = ThreadPoolExecutor(1)
    try:
        assert ProcessSnapshot().run(lambda: threading.Timer(0.05, lambda: time.sleep(0.05)).start()) == (None, [])
        assert ProcessSnapshot().run(lambda: pool.submit(sum, [1]).result()) == (1, [])
    finally:
        pool.shutdown()


def test_child_processes_are_ended_even_if_they_ignore_sigterm() -> None:
    children: list[subprocess.Popen[bytes]] = []

    def trial() -> None:
        stubborn = "import signal, sys; signal.signal(15, signal.SIG_IGN); print(flush=True); sys.stdin.read()"
        for code in ("import sys; print(flush=True); sys.stdin.read()", stubborn):
            child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            assert child.stdout is not None
            child.stdout.readline()
            children.append(child)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(children_module, "END_S", 0.2)
        _, reasons = ProcessSnapshot().run(trial)
    assert reasons == [f"process {child.pid} was still running: {' '.join(child.args)}" for child in children]
    assert [child.wait(30) for child in children] == [-signal.SIGTERM, -signal.SIGKILL]


def test_few_of_many_child_processes_are_named() -> None:
    children: list[subprocess.Popen[bytes]] = []
    _, reasons = ProcessSnapshot().run(
        lambda: children.extend(subprocess.Popen(["sleep", "1000"]) for _ in range(MAX_NAMED + 2))
    )
    assert len(reasons) == MAX_NAMED + 1
    assert reasons[-1] == "2 more processes were still running"
    for child in children:
        child.wait(30)


def test_earlier_child_processes_and_those_of_torch_survive() -> None:
    from multiprocessing import resource_tracker

    with subprocess.Popen(["sleep", "1000"]) as before:
        try:
            resource_tracker.ensure_running()
            assert ProcessSnapshot().run(lambda: None) == (None, [])
            assert before.poll() is None
            with warnings.catch_warnings():
                warnings.simplefilter("error")  # that it died
                resource_tracker.ensure_running()
        finally:
            before.kill()


class Pids(torch.utils.data.Dataset[int]):
    """The process that loads each record."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return os.getpid()


@pytest.mark.slow
def test_workers_of_a_loader_in_a_reference_cycle_end() -> None:
    def trial() -> int:
        batches: Any = iter(torch.utils.data.DataLoader(Pids(), num_workers=1, persistent_workers=True))
        worker = int(next(batches))
        cycle: dict[str, Any] = {"batches": batches}
        cycle["itself"] = cycle
        return worker

    worker, reasons = ProcessSnapshot().run(trial)
    assert reasons == []
    assert not is_alive(worker)


@pytest.mark.slow
def test_memory_kept_since_the_first_trial_is_a_leak(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Any] = []
    size = 64 << 20
    monkeypatch.setattr(leaks, "MACHINE_MEMORY", 1.5 * size / leaks.MAX_GROWTH)

    def keep() -> None:
        kept.append(torch.ones(size // 4))

    give_back()  # of tests before this one: it would make up for what is kept here
    snapshot = ProcessSnapshot()
    assert [bool(snapshot.run(keep)[1]) for _ in range(3)] == [False, False, True]
    _, [reason] = snapshot.run(keep)
    grown = re.match(r"its memory has grown by ([\d.]+) MiB since its first trial", reason)
    assert grown is not None
    assert float(grown[1]) == pytest.approx(3 * 64, abs=25)
    kept.clear()
    assert snapshot.run(lambda: None) == (None, [])


def test_reference_cycles_are_collected_before_their_memory_counts_as_a_leak(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    size = 64 << 20
    monkeypatch.setattr(leaks, "MACHINE_MEMORY", 1.5 * size / leaks.MAX_GROWTH)
    monkeypatch.setattr(snapshot_module, "COLLECT_EVERY", 1e9)

    def cycle() -> None:
        it: dict[str, Any] = {"much": torch.ones(size // 4)}
        it["itself"] = it

    snapshot = ProcessSnapshot()
    gc.disable()
    try:
        assert [snapshot.run(cycle)[1] for _ in range(6)] == [[]] * 6
    finally:
        gc.enable()


def test_a_lost_gpu_is_a_reason_for_a_new_process_and_the_trials_result_is_returned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def lost() -> None:
        raise RuntimeError("CUDA error: device lost")

    snapshot = ProcessSnapshot()
    assert snapshot.run(lambda: "first") == ("first", [])
    monkeypatch.setattr(memory, "gpu_in_use", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lost)
    assert snapshot.run(lambda: "done") == ("done", ["the GPU fails: CUDA error: device lost"])


@pytest.mark.gpu
def test_freed_pinned_memory_is_returned_to_the_system() -> None:
    torch.ones(1, device="cuda")
    torch.empty(64 << 20, dtype=torch.uint8, pin_memory=True)
    before = torch.cuda.host_memory_stats()["allocated_bytes.current"]
    give_back()
    assert torch.cuda.host_memory_stats()["allocated_bytes.current"] <= before - (64 << 20)


@pytorch.cached
def data(grow: Callable[[], None]) -> str:
    grow()
    return "data"


def test_cached_values_are_no_leak_and_are_dropped_if_they_grow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    used = {"data": 0, "other": 1000}

    def drop() -> bool:
        used["data"] = 0
        return drop_all()

    monkeypatch.setattr(memory, "own_memory", lambda: sum(used.values()))
    monkeypatch.setattr(leaks, "MACHINE_MEMORY", 100 / leaks.MAX_GROWTH)
    monkeypatch.setattr(leaks, "drop_all", drop)

    def load() -> str:
        return data(grow)

    def grow() -> None:
        used["data"] = 700

    snapshot = ProcessSnapshot()
    assert snapshot.run(lambda: None) == (None, [])
    assert snapshot.run(load) == ("data", [])
    assert used["data"] == 700, "it is kept"
    used["data"] = 950  # as a data set that keeps what it has read
    assert snapshot.run(lambda: None) == (None, [])
    assert used["data"] == 0
    assert snapshot.run(load) == ("data", [])
    assert used["data"] == 700, "it is made again"
    used["other"] = 1101
    [reason] = snapshot.run(lambda: None)[1]
    assert reason.startswith("its memory has grown by ")


@pytest.mark.parametrize("owns_gpu", [True, False])
def test_gpu_memory_outside_torchs_allocator_counts_unless_other_trials_may_use_it(
    owns_gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    free, reserved, total = 70, 5, 80
    gpu = {
        "is_initialized": lambda: True,
        "memory_allocated": lambda: 1,
        "memory_reserved": lambda: reserved << 30,
        "mem_get_info": lambda: (free << 30, total << 30),
        "current_device": lambda: 0,
        "get_device_properties": lambda _: SimpleNamespace(total_memory=total << 30),
    }
    for name, value in gpu.items():
        monkeypatch.setattr(torch.cuda, name, value)
    clean_up = Leaks(owns_gpu=owns_gpu).clean_up
    assert clean_up() == []
    free, reserved = 50, 25
    assert clean_up() == [], "torch's allocator has it"
    free = 45  # as after a trial's NCCL communicators
    grown = "5.0 GiB more of its GPU's memory is in use than after its first trial"
    assert clean_up() == ([grown] if owns_gpu else [])


@pytest.mark.gpu
def test_gpu_memory_is_freed_and_a_leak_of_it_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[torch.Tensor] = []
    total = torch.cuda.get_device_properties(0).total_memory
    monkeypatch.setattr(leaks, "MAX_GROWTH", (96 << 20) / total)
    monkeypatch.setattr(leaks, "MACHINE_MEMORY", 1 << 60)  # a share as small of that may well be in use
    # What tests before this one have left on the GPU goes now, and not in the first trial.
    gc.collect()
    torch.cuda.empty_cache()
    kept.append(torch.ones(1, device="cuda"))
    snapshot, before = ProcessSnapshot(), torch.cuda.memory_reserved()

    def cycle() -> None:
        it: dict[str, Any] = {"much": torch.ones(256 << 18, device="cuda")}
        it["itself"] = it

    assert snapshot.run(cycle) == (None, [])
    assert torch.cuda.memory_reserved() == before
    told = [snapshot.run(lambda: kept.append(torch.ones(64 << 18, device="cuda")))[1] for _ in range(2)]
    assert told == [[], ["128.0 MiB more of its GPU's memory is in use than after its first trial"]]


# ---------------------------------------------------------------------------------------------------------- handlers
def test_signal_handlers_are_accepted_with_a_warning_and_not_installed(caplog: pytest.LogCaptureFixture) -> None:
    real = signal.getsignal(signal.SIGTERM)

    def trial() -> list[Any]:
        with redirect_handlers():
            return [
                signal.signal(signal.SIGTERM, print),
                signal.signal(signalnum=signal.SIGTERM, handler=signal.SIG_IGN),
            ]

    assert ProcessSnapshot().run(trial) == ([real, real], [])
    assert signal.getsignal(signal.SIGTERM) is real
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        "the handler of SIGTERM will not be called"
    ]


def test_a_handler_of_sigalrm_is_refused() -> None:
    def trial() -> None:
        with redirect_handlers():
            signal.signal(signal.SIGALRM, print)

    with pytest.raises(ValueError, match="signal only works in main thread"):
        ProcessSnapshot().run(trial)


def test_exit_handlers_of_the_users_code_are_called_at_the_end_of_the_trial() -> None:
    called: list[object] = []
    library = {"atexit": atexit, "called": called}

    def trial() -> None:
        with redirect_handlers():
            atexit.register(called.append, 1)
            atexit.register(called.clear)
            atexit.unregister(called.clear)
            atexit.register(lambda: 1 / 0)
            atexit.register(called.append, 2)
            exec(compile("atexit.register(called.append, 3)", os.__file__, "exec"), library)
            called.append("end")
        called.append("after")

    before = atexit.register
    ProcessSnapshot().run(trial)
    assert called == ["end", 2, 1, "after"]
    assert atexit.register is before
    atexit.unregister(called.append)


def test_other_code_begins_with_the_settings_before_any_code_and_keeps_those_of_its_import() -> None:
    snapshot = ProcessSnapshot()
    try:
        snapshot.load(
            lambda: (torch.set_default_dtype(torch.float64), sys.path.insert(0, "/a"), os.environ.update(A="1"))
        )
        for _ in range(2):
            assert snapshot.run(lambda: sys.path.clear()) == (None, [])
            assert (torch.get_default_dtype(), sys.path[0]) == (torch.float64, "/a")
        snapshot.load(lambda: sys.path.insert(0, "/b"))
        assert (torch.get_default_dtype(), "/a" in sys.path, "A" in os.environ) == (torch.float32, False, False)
        assert snapshot.run(lambda: sys.path.clear()) == (None, [])
        assert sys.path[0] == "/b"
        with pytest.raises(ZeroDivisionError):
            snapshot.load(lambda: 1 / 0)
        assert "/b" not in sys.path
    finally:
        snapshot.load(lambda: None)
