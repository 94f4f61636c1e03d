"""The programs of docs/tune.md on a real Ray; test_tune_trainer.py runs the one with a TorchTrainer."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from ray import tune

from tests.docs.pages import files

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.usefixtures("ray_is_up")]

PAGE = "tune.md"


def program(name: str) -> Any:
    module = ModuleType(name.removesuffix(".py"))
    exec(files(PAGE)[name], vars(module))
    return module


def epochs(results: tune.ResultGrid) -> list[int]:
    assert len(results.errors) == 0
    return sorted(result.metrics["training_iteration"] for result in results)


def test_the_search_runs_and_a_finished_one_has_nothing_left_to_do(tmp_path: Path) -> None:
    search, path = program("search.py"), tmp_path / "run"
    continued = program("continue.py").continued
    found = epochs(continued(path, search.train, search.new_tuner).fit())
    assert len(found) == 12
    assert set(found) == {1, 3, 9}, "trials end at rungs"
    assert epochs(continued(path, search.train, search.new_tuner).fit()) == found


@pytest.mark.long
def test_a_callback_adds_a_trial(tmp_path: Path) -> None:
    page = program("side_by_side.py")
    config = page.drays()
    config.reuse_actors = True
    callbacks = [program("steer.py").AddLargeRate(config.search_alg)]
    run_config = tune.RunConfig(name="run", storage_path=str(tmp_path), callbacks=callbacks)
    train = program("search.py").train
    results = tune.Tuner(train, param_space=page.SPACE, tune_config=config, run_config=run_config).fit()
    assert len(epochs(results)) == 13
    assert set(epochs(results)) == {1, 3, 9}
    assert 0.5 in [result.config["lr"] for result in results]


@pytest.mark.long
def test_rays_side_trains_as_long(tmp_path: Path) -> None:
    page = program("side_by_side.py")
    config = page.rays()
    config.reuse_actors = True
    run_config = tune.RunConfig(name="run", storage_path=str(tmp_path), verbose=0)
    train = program("search.py").train
    found = epochs(tune.Tuner(train, param_space=page.SPACE, tune_config=config, run_config=run_config).fit())
    assert (len(found), set(found)) == (12, {1, 3, 9})
