"""`pytorch.cached` keeps what a function made for the next trial, and nothing else."""

from __future__ import annotations

import gc
import importlib
import pickle
import random
import sys
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dray import memory, pytorch
from dray.imports import use_model_dir
from tests.model_code import imports_undone
from tests.pytorch.fakes import OneWeight

MODULE: Any = sys.modules["dray.pytorch.cached"]
made: list[Any] = []


@pytest.fixture(autouse=True)
def _nothing_kept() -> Iterator[None]:
    gc.freeze()  # what earlier tests left would be visited by each collection below
    made.clear()
    yield
    MODULE.drop_all()


class Value:
    """A value that supports weak references."""


@pytest.fixture
def available(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes that are available, of 100."""
    free = [100]
    monkeypatch.setattr(memory, "MACHINE_MEMORY", 100)
    monkeypatch.setattr(memory, "available_memory", lambda: free[0])
    return free


@pytorch.cached
def value_of(name: str, count: float = 1, *, kind: Any = None) -> Value:
    made.append(name)
    return Value()


@pytorch.cached
def drawn() -> tuple[float, float, torch.Tensor]:
    return random.random(), float(np.random.rand()), torch.rand(2)


@pytorch.cached
def failing() -> None:
    made.append("failing")
    raise OSError("the disk is gone")


@pytorch.cached
def outer() -> tuple[Value, torch.Tensor]:
    return value_of("inner"), torch.ones(8 << 18)


@pytorch.cached
def ones(mebibytes: int) -> torch.Tensor:
    return torch.ones(mebibytes << 18)


def test_a_value_is_made_once_for_equal_arguments_however_they_are_passed() -> None:
    first = value_of("a")
    assert value_of(name="a", kind=None) is first
    assert value_of("a", 1) is first
    assert value_of("b") is not first
    assert value_of("a", 1.0) is not first  # equal to 1, but another type
    assert value_of("a", kind="x") is not value_of("a", kind="y")
    assert made == ["a", "b", "a", "a", "a"]


def test_a_value_does_not_depend_on_the_trials_random_numbers_nor_they_on_it() -> None:
    def numbers() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    seen, after = [], []
    for seed in (1, 2):
        for kept in (False, True):
            if not kept:
                MODULE.drop_all()
            random.seed(seed)
            np.random.seed(seed)
            torch.manual_seed(seed)
            seen.append([float(x) for x in (*drawn()[:2], *drawn()[2])])
            after.append(numbers())
    assert seen == [seen[0]] * 4
    assert after[0] == after[1] != after[2] == after[3]


def test_local_functions_and_arguments_that_belong_to_a_trial_are_refused() -> None:
    with pytest.raises(ValueError, match="define it at the top level of a module"):
        pytorch.cached(lambda: 1)
    with pytest.raises(TypeError, match=r"value_of\(\) is cached .* got a Linear, which belongs to one trial"):
        value_of(torch.nn.Linear(1, 1))  # type: ignore[arg-type]
    with pytorch.init() as context, pytest.raises(TypeError, match="got a PyTorchTrialContext"):
        value_of("a", kind=context)
    with pytest.raises(TypeError, match=r"one can't be hashed .*; pass plain values, such as a tuple"):
        value_of("a", kind=[1])
    with pytest.raises(TypeError, match="missing a required argument: 'name'"):
        value_of()  # type: ignore[call-arg]
    assert made == []


def test_an_error_is_not_kept() -> None:
    for _ in range(2):
        with pytest.raises(OSError, match="the disk is gone"):
            failing()
    assert made == ["failing"] * 2


def test_the_longest_unused_are_dropped_until_enough_memory_is_available(
    available: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = {name: weakref.ref(value_of(name)) for name in "abcd"}
    value_of("a")
    living = lambda: "".join(name for name, value in kept.items() if value() is not None)  # noqa: E731
    monkeypatch.setattr(memory, "available_memory", lambda: 5 + 4 * ("b" not in living()) + 4 * ("c" not in living()))
    with pytorch.init():  # as a trial begins
        assert living() == "ad"
    monkeypatch.setattr(memory, "available_memory", lambda: 5)
    value_of("e")  # and as another is to be made
    assert living() == ""
    assert made == [*"abcde"]


def test_garbage_is_collected_before_a_value_is_dropped(available: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    value_of("a")
    available[0] = 5
    monkeypatch.setattr(memory, "give_back", lambda: available.__setitem__(0, 50))
    MODULE.drop_if_low()
    value_of("a")
    assert made == ["a"]


def test_a_module_that_is_forgotten_takes_its_values_along(tmp_path: Path) -> None:
    """As when a process goes from one experiment's code to another's."""
    kept = []
    with imports_undone():
        for text in ("one", "other"):
            (tmp_path / text).mkdir()
            (tmp_path / text / "some_data.py").write_text(
                "from dray import pytorch\n"
                "class Value(str): pass\n"
                f"@pytorch.cached\ndef load(name): return Value({text!r} + name)\n"
            )
            use_model_dir(tmp_path / text)
            load = importlib.import_module("some_data").load
            assert [load("s"), load("s") is load("s")] == [f"{text}s", True]
            kept.append(weakref.ref(load("s")))
        del load
        gc.collect()
        assert [value() for value in kept] == [None, "others"]


def test_threads_that_ask_at_the_same_time_get_the_same() -> None:
    got: list[Value] = []
    barrier = threading.Barrier(4)

    def ask() -> None:
        barrier.wait()
        got.append(value_of("a"))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made == ["a"]
    assert len({id(value) for value in got}) == 1


class Reading(torch.utils.data.Dataset[int]):
    """Says how many values had been made by the time that it had one."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        value_of("a")
        return len(made)


@pytorch.cached
def read_by_a_worker() -> list[int]:
    seen: list[int] = []
    loader = torch.utils.data.DataLoader(Reading(), batch_size=None, num_workers=1, multiprocessing_context="fork")
    thread = threading.Thread(target=lambda: seen.extend(loader), daemon=True)  # which forks
    thread.start()
    thread.join()
    return seen


def test_workers_of_a_loader_inherit_the_values_also_while_another_thread_makes_one() -> None:
    value_of("a")
    assert read_by_a_worker() == [1, 1]


def test_it_is_pickled_by_its_name_without_its_values() -> None:
    value_of("a")
    assert pickle.loads(pickle.dumps(value_of)) is value_of


def test_memory_that_is_held_is_known_and_counted_once() -> None:
    memory.give_back()  # a tensor in memory that earlier tests have freed would not make the process grow
    before = MODULE.kept_bytes()[0]
    outer()
    assert MODULE.kept_bytes()[0] - before == pytest.approx(8 << 20, abs=1 << 20)


class Line(OneWeight):
    """Trains on cached data, which it makes with random numbers."""

    def build_training_data_loader(self) -> pytorch.DataLoader:
        return pytorch.DataLoader(torch.utils.data.TensorDataset(points(16)), batch_size=4, shuffle=True)

    build_validation_data_loader = build_training_data_loader

    def loss(self, batch: Any) -> torch.Tensor:
        return super().loss(batch[0])


@pytorch.cached
def points(count: int) -> torch.Tensor:
    made.append(count)
    return torch.randn(count, 1)


def test_a_local_run_trains_the_same_whether_its_data_were_made_or_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRAY_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    weights = []
    for _ in range(2):
        with pytorch.init(exp_conf={"reproducibility": {"experiment_seed": 3}}) as context:
            trial = Line(context)
            pytorch.Trainer(trial, context).fit(max_length=pytorch.Batch(6))
            weights.append(trial.weight)
    assert weights[0] == weights[1]
    assert made == [16]


def test_available_memory_is_that_of_the_machine_and_of_its_container(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:  4000 kB\nMemAvailable:    3000 kB\nHugePages_Total:  0\n")
    assert memory.available_memory(tmp_path, meminfo) == 3000 << 10
    (tmp_path / "memory.max").write_text("2000000\n")
    (tmp_path / "memory.current").write_text("1500000\n")
    (tmp_path / "memory.stat").write_text("anon 1100000\ninactive_file 400000\n")
    assert memory.available_memory(tmp_path, meminfo) == 900_000
    (tmp_path / "memory.max").write_text("max\n")
    older = tmp_path / "memory"
    older.mkdir()
    (older / "memory.limit_in_bytes").write_text("1000000")
    (older / "memory.usage_in_bytes").write_text("950000")
    (older / "memory.stat").write_text("cache 9\ntotal_inactive_file 10000\n")
    assert memory.available_memory(tmp_path, meminfo) == 60_000
    assert memory.available_memory(tmp_path / "none", tmp_path / "none") == memory.MACHINE_MEMORY
