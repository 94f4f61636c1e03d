"""Between two trials a process is put back into the state that it was in."""

from __future__ import annotations

import atexit
import contextlib
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
from pathlib import Path
from typing import Any

import pytest
import torch

from dray import memory, pytorch
from dray.memory import give_back
from dray.pytorch.cached import drop_all
from dray.worker import children as children_module
from dray.worker.children import lives
from dray.worker.isolation import baseline as baseline_module
from dray.worker.isolation import leftovers
from dray.worker.isolation.baseline import Baseline
from dray.worker.isolation.handlers import handlers_of_a_trial
from dray.worker.isolation.leftovers import Leftovers
from tests.ray.trials.changes import CHANGES


def look(what: str) -> Any:
    """In a new thread, as a trial does."""
    seen: list[Any] = []
    thread = threading.Thread(target=lambda: seen.append(CHANGES[what][0]()))
    thread.start()
    thread.join()
    return seen[0]


@pytest.mark.parametrize("what", CHANGES)
def test_what_a_trial_changes_is_undone(what: str, tmp_path: Path) -> None:
    if what == "start method":  # another test may have set it, which can be done but once
        multiprocessing.set_start_method(None, force=True)
    before = look(what)
    seen = []

    def trial() -> None:
        CHANGES[what][1](tmp_path)
        seen.append(CHANGES[what][0]())

    assert Baseline().run(trial) == (None, [])
    assert seen != [before], "the change is one"
    assert look(what) == before


def test_all_of_them_at_once_are_undone(tmp_path: Path) -> None:
    before = {what: look(what) for what in CHANGES}

    def trial() -> None:
        for _, change in CHANGES.values():
            change(tmp_path)

    baseline = Baseline()
    assert baseline.run(trial) == (None, [])
    assert {what: look(what) for what in CHANGES} == before
    assert baseline.run(trial) == (None, []), "and once more"
    assert {what: look(what) for what in CHANGES} == before


@pytest.mark.parametrize("newer", ["generic", "conv"])
@pytest.mark.skipif(not hasattr(torch.backends, "fp32_precision"), reason="this torch has the older settings only")
def test_older_and_newer_settings_of_precision_are_undone_together(newer: str) -> None:
    from dray.worker.isolation.settings import _precision

    def trial() -> None:
        if newer == "generic":
            torch.backends.fp32_precision = "tf32"
        else:
            torch.backends.cudnn.conv.fp32_precision = "ieee"  # torch then refuses to tell cudnn.allow_tf32
        assert _precision() != before

    before = _precision()
    assert Baseline().run(trial) == (None, [])
    assert _precision() == before


def test_flags_that_a_trial_has_frozen_are_undone() -> None:
    before = torch.backends.cudnn.benchmark

    def trial() -> None:
        torch.backends.cudnn.benchmark = not before
        torch.backends.disable_global_flags()

    assert Baseline().run(trial) == (None, [])
    assert torch.backends.cudnn.benchmark == before


def test_what_can_not_be_put_back_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(count: int) -> None:
        raise RuntimeError("cannot set number of interop threads after parallel work has started")

    counts = [2]
    monkeypatch.setattr(torch, "get_num_interop_threads", lambda: counts[0])
    monkeypatch.setattr(torch, "set_num_interop_threads", refuse)
    baseline = Baseline()
    assert baseline.run(lambda: None) == (None, [])
    _, [reason] = baseline.run(lambda: counts.__setitem__(0, 3))
    assert reason.startswith("can't restore torch's inter-op threads: cannot set number")


def test_a_warning_is_shown_to_each_trial() -> None:
    def trial() -> list[warnings.WarningMessage]:
        with warnings.catch_warnings(record=True) as shown:
            warnings.simplefilter("once")
            for _ in range(3):
                warnings.warn("look out", stacklevel=1)
        return shown

    baseline = Baseline()
    for _ in range(2):
        shown, _ = baseline.run(trial)
        assert len(shown) == 1


def test_modules_and_set_up_loggers_of_libraries_that_a_trial_imports_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a_library.py").write_text(
        "import logging\nlogging.getLogger(__name__).addHandler(logging.NullHandler())"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("dray.imports._INSTALLED_TEXT", (str(tmp_path),))
    baseline = Baseline()
    imported, _ = baseline.run(lambda: __import__("a_library"))
    assert sys.modules.pop("a_library") is imported
    assert len(logging.getLogger("a_library").handlers) == 1
    baseline.run(lambda: None)
    assert sys.modules.pop("a_library") is imported, "a later trial has it, whatever became of it meanwhile"


def test_error_of_a_trial_is_raised_once_all_is_undone() -> None:
    def trial() -> None:
        os.environ["LEFT"] = "1"
        raise SystemExit(3)

    with pytest.raises(SystemExit):
        Baseline().run(trial)
    assert "LEFT" not in os.environ


@pytest.mark.slow
def test_trials_of_ever_other_shapes_are_all_compiled() -> None:
    calls = 0

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        nonlocal calls
        calls += 1
        return graph.forward

    def square(x: torch.Tensor, name: str) -> torch.Tensor:
        return x * len(name)

    baseline = Baseline()
    # More than torch keeps of one function (8): without a reset the last ones would not reach the backend.
    for number in range(12):
        baseline.run(lambda number=number: torch.compile(square, backend=backend)(torch.ones(2), "x" * number))  # type: ignore[misc]
    assert calls == 12


# ------------------------------------------------------------------------------------------------------- what runs on
def test_a_thread_in_a_trials_code_is_told_with_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leftovers, "END_S", 0.05)
    begun, over = threading.Event(), threading.Event()
    baseline = Baseline()

    def prefetch() -> None:
        begun.set()
        over.wait()

    def trial() -> None:
        threading.Thread(target=prefetch, name="prefetch").start()
        begun.wait()

    try:
        _, [reason] = baseline.run(trial)
        assert reason.startswith(f"thread prefetch is still running, at {__file__}:")
    finally:
        over.set()


def test_a_thread_that_ends_and_a_librarys_that_waits_are_no_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    from concurrent.futures import ThreadPoolExecutor

    monkeypatch.setattr(leftovers, "END_S", 30.0)
    pool = ThreadPoolExecutor(1)
    try:
        assert Baseline().run(lambda: threading.Timer(0.05, lambda: time.sleep(0.05)).start()) == (None, [])
        assert Baseline().run(lambda: pool.submit(sum, [1]).result()) == (1, [])
    finally:
        pool.shutdown()


def test_child_processes_are_ended_and_told_also_those_that_will_not_end() -> None:
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
        _, reasons = Baseline().run(trial)
    assert reasons == [f"process {child.pid} was still running: {' '.join(child.args)}" for child in children]
    assert [child.wait(30) for child in children] == [-signal.SIGTERM, -signal.SIGKILL]


def test_child_processes_that_were_there_before_and_torchs_own_stay() -> None:
    from multiprocessing import resource_tracker

    with subprocess.Popen(["sleep", "1000"]) as before:
        try:
            resource_tracker.ensure_running()
            assert Baseline().run(lambda: None) == (None, [])
            assert before.poll() is None
            assert resource_tracker._resource_tracker._check_alive()  # type: ignore[attr-defined]
        finally:
            before.kill()


@pytest.mark.slow
def test_workers_of_a_loader_that_a_trial_leaves_in_a_cycle_end() -> None:
    def trial() -> list[int]:
        loader = torch.utils.data.DataLoader(range(4), num_workers=1, persistent_workers=True)  # type: ignore[arg-type]
        batches: Any = iter(loader)
        next(batches)
        cycle: dict[str, Any] = {"batches": batches}
        cycle["itself"] = cycle
        return [worker.pid for worker in batches._workers]

    workers, reasons = Baseline().run(trial)
    assert reasons == []
    assert not any(lives(worker) for worker in workers)


@pytest.mark.slow
def test_a_leak_of_memory_is_told_and_what_the_first_trial_keeps_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Any] = []
    size = 64 << 20
    monkeypatch.setattr(leftovers, "MACHINE_MEMORY", 1.5 * size / leftovers.LEAK)

    def keep() -> None:
        kept.append(torch.ones(size // 4))

    give_back()  # of tests before this one: it would make up for what is kept here
    baseline = Baseline()
    assert [bool(baseline.run(keep)[1]) for _ in range(3)] == [False, False, True]
    _, [reason] = baseline.run(keep)
    grown = re.match(r"its memory has grown by (\d+) MiB since its first trial", reason)
    assert grown is not None
    assert int(grown[1]) == pytest.approx(3 * 64, abs=25)
    kept.clear()
    assert baseline.run(lambda: None) == (None, [])


def test_cycles_are_freed_at_the_latest_when_their_memory_would_count_as_a_leak(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    size = 64 << 20
    monkeypatch.setattr(leftovers, "MACHINE_MEMORY", 1.5 * size / leftovers.LEAK)
    monkeypatch.setattr(baseline_module, "COLLECTS_EVERY", 1e9)

    def cycle() -> None:
        it: dict[str, Any] = {"much": torch.ones(size // 4)}
        it["itself"] = it

    baseline = Baseline()
    gc.disable()
    try:
        assert [baseline.run(cycle)[1] for _ in range(6)] == [[]] * 6
    finally:
        gc.enable()


def test_after_a_lost_gpu_a_process_runs_no_other_trial_but_says_how_this_one_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def lost() -> None:
        raise RuntimeError("CUDA error: device lost")

    baseline = Baseline()
    assert baseline.run(lambda: "first") == ("first", [])
    monkeypatch.setattr(memory, "gpu_in_use", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lost)
    assert baseline.run(lambda: "done") == ("done", ["the GPU fails: CUDA error: device lost"])


def test_memory_that_torch_keeps_for_copies_to_gpus_is_no_leak(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch keeps the pinned memory that a trial has freed (a loader's, a checkpoint's) for the next one."""
    used, kept = 1, 0

    def empty_cache() -> None:
        nonlocal kept
        kept = 0

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(leftovers, "unheld", lambda: (used + kept, 0))
    monkeypatch.setattr(torch._C, "_host_emptyCache", empty_cache, raising=False)
    found = Leftovers().found
    assert found() == []
    kept = leftovers.MACHINE_MEMORY
    assert found() == []
    used = leftovers.MACHINE_MEMORY
    assert len(found()) == 1


@pytest.mark.gpu
def test_pinned_memory_that_trials_have_freed_can_be_given_back() -> None:
    torch.ones(1, device="cuda")
    torch.empty(64 << 20, dtype=torch.uint8, pin_memory=True)
    before = torch.cuda.host_memory_stats()["allocated_bytes.current"]
    give_back()
    assert torch.cuda.host_memory_stats()["allocated_bytes.current"] <= before - (64 << 20)


@pytorch.cached
def data(grow: Callable[[], None]) -> str:
    grow()
    return "data"


def test_what_is_cached_for_later_trials_is_no_leak_and_is_dropped_if_it_grows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    used = {"data": 0, "other": 1000}

    def drop() -> bool:
        used["data"] = 0
        return drop_all()

    monkeypatch.setattr(memory, "own_memory", lambda: sum(used.values()))
    monkeypatch.setattr(leftovers, "MACHINE_MEMORY", 100 / leftovers.LEAK)
    monkeypatch.setattr(leftovers, "drop_all", drop)

    def load() -> str:
        return data(grow)

    def grow() -> None:
        used["data"] = 700

    baseline = Baseline()
    assert baseline.run(lambda: None) == (None, [])
    assert baseline.run(load) == ("data", [])
    assert used["data"] == 700, "it is kept"
    used["data"] = 950  # as a data set that keeps what it has read
    assert baseline.run(lambda: None) == (None, [])
    assert used["data"] == 0
    assert baseline.run(load) == ("data", [])
    assert used["data"] == 700, "it is made again"
    used["other"] = 1101
    [reason] = baseline.run(lambda: None)[1]
    assert reason.startswith("its memory has grown by ")


@pytest.mark.gpu
def test_memory_of_a_gpu_is_given_back_and_a_leak_of_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[torch.Tensor] = []
    total = torch.cuda.get_device_properties(0).total_memory
    monkeypatch.setattr(leftovers, "LEAK", (96 << 20) / total)
    monkeypatch.setattr(leftovers, "MACHINE_MEMORY", 1 << 60)  # a share as small of that may well be in use
    # What tests before this one have left on the GPU goes now, and not in the first trial.
    gc.collect()
    torch.cuda.empty_cache()
    kept.append(torch.ones(1, device="cuda"))
    baseline, before = Baseline(), torch.cuda.memory_reserved()

    def cycle() -> None:
        it: dict[str, Any] = {"much": torch.ones(256 << 18, device="cuda")}
        it["itself"] = it

    assert baseline.run(cycle) == (None, [])
    assert torch.cuda.memory_reserved() == before
    told = [baseline.run(lambda: kept.append(torch.ones(64 << 18, device="cuda")))[1] for _ in range(2)]
    assert told == [[], ["128 MiB more of its GPU memory is in use than after its first trial"]]


# ---------------------------------------------------------------------------------------------------------- handlers
@pytest.fixture
def in_a_thread() -> Callable[[Callable[[], Any]], Any]:
    return lambda work: Baseline().run(work)[0]


def test_handlers_of_signals_are_remembered_told_and_not_installed(
    in_a_thread: Callable[[Callable[[], Any]], Any], caplog: pytest.LogCaptureFixture
) -> None:
    real = signal.getsignal(signal.SIGTERM)

    def trial() -> list[Any]:
        with handlers_of_a_trial():
            return [
                signal.signal(signal.SIGTERM, print),
                signal.getsignal(signal.SIGTERM),
                signal.signal(signalnum=signal.SIGTERM, handler=signal.SIG_IGN),
            ]

    assert in_a_thread(trial) == [real, print, print]
    assert signal.getsignal(signal.SIGTERM) is real
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        "the handler of SIGTERM will not be called"
    ]


def test_handler_of_an_alarm_is_refused_with_what_to_do(in_a_thread: Callable[[Callable[[], Any]], Any]) -> None:
    def trial() -> None:
        with handlers_of_a_trial():
            signal.signal(signal.SIGALRM, print)

    with pytest.raises(ValueError, match=r"a handler of SIGALRM .* use threading\.Timer"):
        in_a_thread(trial)


def test_exit_handlers_of_the_trial_are_called_at_its_end_and_those_of_libraries_are_not(tmp_path: Path) -> None:
    called: list[object] = []
    libraries = {"atexit": atexit, "called": called}

    def trial() -> None:
        with handlers_of_a_trial():
            atexit.register(called.append, 1)
            atexit.register(called.append, "unregistered")
            atexit.register(lambda: 1 / 0)
            atexit.register(called.append, 2)
            exec(compile("atexit.register(called.append, 3)", f"{os.__file__}", "exec"), libraries)
            called.append("end")
        called.append("after")

    before = atexit.register
    Baseline().run(trial)
    assert called == ["end", 2, "unregistered", 1, "after"]
    assert atexit.register is before
    atexit.unregister(called.append)
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(tmp_path)
