"""A Tune handle that can't work: the search ends, and says why."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from dray.experiment.tune_handle import results_of
from dray.rpc.connection import Endpoint
from searchers import ray_tune
from searchers.ray_tune import TuneDriver

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.usefixtures("ray_is_up")]


@pytest.mark.long
def test_a_handle_that_never_starts_ends_the_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_tune, "MAX_HANDLE_DEATHS", 2)
    nobody = Endpoint(host="127.0.0.1", port=1, key=b"key")
    driver = TuneDriver(source=functools.partial(results_of, nobody), directory=tmp_path / "tune")
    driver.start()
    driver.ended.result()
    assert "127.0.0.1:1" in str(driver.error)
    assert "died 2 times in a row" in str(driver.error)
