"""A user's own search method on a real Ray: named by a YAML file, imported and rebuilt from its journal."""

from __future__ import annotations

import shutil
from bisect import insort
from pathlib import Path

import pytest
import yaml

from dray.records.result import Result
from tests.ray.harness import ROOT, decided, ends, journal, run_here, write_config

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.long, pytest.mark.usefixtures("ray_is_up")]

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


def test_the_examples_yaml_runs_and_is_extended_with_the_experiments_copy_of_the_method(tmp_path: Path) -> None:
    config = yaml.safe_load((EXAMPLES / "own_method" / "digits.yaml").read_text())
    config["searcher"]["options"] |= {"max_trials": 6, "rungs": [1, 2, 4]}
    config["searcher"]["max_length"] = {"epochs": 4}
    config["resources"] = {"slot": "cpu", "max_slots": 1}
    path, code = tmp_path / "experiment", tmp_path / "code"
    for package in ("digits", "own_method"):
        shutil.copytree(EXAMPLES / package, code / package)
    said = run_here("create", write_config(tmp_path, config), code, "--path", path)
    assert said.code == 0, said.err
    assert ends(path) == dict.fromkeys(range(6), 1)
    shutil.rmtree(code)
    said = run_here("extend", path, "--max-trials", 8)
    assert said.code == 0, said.err
    assert ends(path) == dict.fromkeys(range(8), 1)
    stopped = below_the_median(path, [1, 2, 4])
    assert decided(path, "stop") == stopped
    assert stopped, "of 8 trials the first rung stops some"
    trials = Result(path).trials
    assert (trials["state"] == "PRUNED").sum() == len(stopped)
    assert (trials["state"] == "COMPLETED").sum() == 8 - len(stopped)
