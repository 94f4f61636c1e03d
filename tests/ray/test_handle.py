"""A Tune handle that can't work: the search ends, and says why."""

from __future__ import annotations

import contextlib
import functools
import threading
from pathlib import Path

import pytest
import ray

from dray.desk.actor import results_of
from searchers import ray_tune
from searchers.random_search import RandomSearch
from searchers.ray_tune import TuneDriver
from searchers.search import Search
from searchers.space import parse

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.usefixtures("ray_is_up")]


def test_a_handle_that_never_starts_ends_the_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_tune, "MAX_HANDLE_DEATHS", 2)
    search = Search(
        RandomSearch(max_trials=1, max_length=1), parse({}), seed=0, smaller_is_better=True, log=lambda record: None
    )
    driver = TuneDriver(
        source=functools.partial(results_of, "nobody", ray.get_runtime_context().namespace, "search"),
        directory=tmp_path / "tune",
    )
    driver.attach(search, lock=threading.RLock(), together=contextlib.nullcontext, act=lambda answer: None)
    driver.start()
    driver.ended.result()
    assert "nobody" in str(driver.error)
    assert "died 2 times in a row" in str(driver.error)
