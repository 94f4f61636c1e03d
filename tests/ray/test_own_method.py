"""A user's own search method on a real Ray: named by a YAML file, rebuilt by another driver; and given from Python."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

import dray
from dray.records.result import Result
from searchers import RandomSearch
from tests.ray.harness import ROOT, TRIALS, Driver, decided, ends, journal, recorded, write_config

pytestmark = pytest.mark.ray

EXAMPLES = ROOT / "examples"


def below_the_median(path: Path, rungs: list[int]) -> list[int]:
    """Whom the median rule stops, in order, by counting over the journal's reports."""
    values: dict[int, list[float]] = {rung: [] for rung in rungs}
    stopped: list[int] = []
    for record in journal(path):
        if record["event"] == "reported" and record["step"] in rungs and record["trial"] not in stopped:
            seen = values[record["step"]]
            insort(seen, record["value"])
            if record["value"] > seen[len(seen) // 2] and record["step"] != rungs[-1]:
                stopped.append(record["trial"])
    return stopped


def test_the_examples_yaml_runs_and_is_extended_by_a_driver_that_imports_the_method_anew(
    tmp_path: Path, drive: Callable[..., Driver]
) -> None:
    config = yaml.safe_load((EXAMPLES / "own_method" / "digits.yaml").read_text())
    config["searcher"]["options"] |= {"max_trials": 6, "rungs": [1, 2, 4]}
    config["searcher"]["max_length"] = {"epochs": 4}
    path = tmp_path / "experiment"
    driver = drive("create", write_config(tmp_path, config), EXAMPLES, "--path", path)
    assert driver.wait() == 0, driver.log.read_text()
    assert ends(path) == dict.fromkeys(range(6), 1)
    driver = drive("extend", path, "--max-trials", 8)
    assert driver.wait() == 0, driver.log.read_text()
    assert ends(path) == dict.fromkeys(range(8), 1)
    stopped = below_the_median(path, [1, 2, 4])
    assert decided(path, "stop") == stopped
    assert stopped, "of 8 trials the first rung stops some"
    trials = Result(path).trials
    assert (trials["state"] == "STOPPED").sum() == len(stopped)
    assert (trials["state"] == "COMPLETED").sum() == 8 - len(stopped)


class HalfWay(RandomSearch):
    """Random search whose trials validate at half of their length too."""

    def __init__(self, **fields: Any) -> None:
        super().__init__(**fields)
        self.rungs = (self.rungs[0] // 2, self.rungs[0])


def test_a_method_and_a_sampler_are_given_from_python(tmp_path: Path) -> None:
    class Tenths:
        def ask(self, trial: int) -> dict[str, object]:
            return {**constants, "lr": 0.01 + trial / 1000}

        def tell(self, event: object, hparams: object) -> None:
            """Nothing is learned."""

    config = recorded(tmp_path / "record", trials=1, batches=20)
    constants = {name: config["hyperparameters"][name] for name in ("global_batch_size", "record", "pause_s")}
    config["searcher"] = {"name": "custom", "metric": "error", "max_length": {"batches": 20}}
    method = HalfWay(max_trials=3, max_length=20)
    result = dray.Experiment(
        config, model_dir=TRIALS, path=tmp_path / "experiment", method=method, sampler=Tenths()
    ).run()
    assert result.trials["state"].tolist() == ["COMPLETED"] * 3
    assert result.trials["hparams.lr"].tolist() == [0.01, 0.011, 0.012]
    assert result.trials["batches"].tolist() == [20] * 3
    opened = journal(result.path)[0]
    assert (opened["method"], opened["constraint"]) == ("HalfWay", None)
