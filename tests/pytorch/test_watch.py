"""A host sees how far a rank is, whenever it looks, and keeps nothing of it afterwards."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest

from dray.pytorch import Batch
from dray.training.executor import Executor
from tests.pytorch.conftest import Fit
from tests.pytorch.fakes import FakeHost, fails, trial


def test_progress_is_another_with_each_batch_that_is_trained_or_validated(fit: Fit, host: FakeHost) -> None:
    seen: list[tuple[str, tuple[int, int]]] = []

    watched = trial(
        at_batch=lambda self, _: seen.append(("train", host.progress())),
        at_validation=lambda self, _: seen.append(("validate", host.progress())),
    )
    fit(watched, max_length=Batch(3), validation_period=Batch(2))
    trained = [progress[0] for kind, progress in seen if kind == "train"]
    validated = [progress[0] for kind, progress in seen if kind == "validate"]
    assert trained == [0, 1, 2]
    assert sorted(set(validated)) == [2, 3]
    assert len(set(seen)) == len(seen), "none is seen twice"
    assert host.progress()[0] == 3


def test_a_failure_names_its_batch_and_the_executor_is_not_kept(
    fit: Fit, host: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    executors: list[weakref.ref[Executor]] = []
    init = Executor.__init__

    def remembered(self: Executor, **arguments: Any) -> None:
        init(self, **arguments)
        executors.append(weakref.ref(self))

    monkeypatch.setattr(Executor, "__init__", remembered)

    with pytest.raises(ArithmeticError) as error:
        fit(fails(ArithmeticError("it always ends so"), at=4), max_length=Batch(6))
    assert host.progress()[0] == 4
    del error
    gc.collect()
    assert [executor() for executor in executors] == [None]
