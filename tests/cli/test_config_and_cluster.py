"""Commands that need no experiment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from dray.config.json_schema import json_schema
from dray.records.numbering import take_number
from tests.cli.said import Said
from tests.ray.harness import DIGITS

Dray = Callable[..., Said]
ROOT = Path(__file__).parents[2]


def test_schema_is_printed(home: Path, dray: Dray) -> None:
    assert dray("config", "schema").value == json_schema()


def test_preview_is_also_json(home: Path, dray: Dray) -> None:
    found = dray("preview", ROOT / "examples" / "digits" / "asha.yaml", "--json").value
    [rungs] = found["brackets"]
    assert [rung["length"] for rung in rungs] == [1, 4, 16]
    assert rungs[0]["trials"] == found["trials"] == 64
    assert found["total"] == pytest.approx(sum(rung["length"] * rung["last"] for rung in rungs), abs=0.01)
    low, high = found["likely_total"]
    assert 100 < low < found["total"] < high < 320
    assert found["unit"] == "epochs"
    grid = dray("preview", ROOT / "examples" / "digits" / "grid.yaml", "--json").value
    # By hand: 8 points of 8 epochs.
    assert grid == {
        "trials": 8,
        "total": 64,
        "likely_total": None,
        "unit": "epochs",
        "brackets": [[{"length": 8, "trials": 8, "last": 8}]],
    }


def test_without_a_cluster_it_says_what_an_experiment_would_do(home: Path, dray: Dray) -> None:
    assert "RAY_ADDRESS is not set: an experiment starts its own Ray" in dray("cluster", "status").out
    assert dray("cluster", "status", "--json").value["address"] is None


def test_a_cluster_that_does_not_answer_is_an_error(home: Path, dray: Dray) -> None:
    said = dray("cluster", "status", "--address", "127.0.0.1:1")
    assert said.code == 1
    assert said.err.startswith("dray: no Ray cluster answers at 127.0.0.1:1")


@pytest.mark.slow
def test_an_experiment_on_a_cluster_that_does_not_answer_ends_at_once(
    home: Path, dray: Dray, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    said = dray("experiment", "create", str(DIGITS / "asha.yaml"), str(DIGITS))
    assert said.code == 1
    assert said.err.splitlines()[-1].startswith("dray: no Ray cluster answers at 127.0.0.1:1")
    assert "experiment 1: digits-asha, stored in" in said.out + said.err
    assert "Traceback" not in said.err


def test_an_experiment_is_named_before_its_model_is_imported(home: Path, dray: Dray, tmp_path: Path) -> None:
    (tmp_path / "slow_def.py").write_text("import sys\nprint('imported', file=sys.stderr)\nraise KeyError('end')\n")
    config = yaml.safe_load((DIGITS / "asha.yaml").read_text())
    (tmp_path / "asha.yaml").write_text(yaml.safe_dump({**config, "entrypoint": "slow_def:Trial"}))
    said = dray("experiment", "create", "asha.yaml", ".")
    assert said.code != 0
    assert said.err.splitlines()[:2] == ["digits-asha: importing slow_def:Trial ...", "imported"]


def test_a_shell_completes_experiments_and_trials(home: Path, dray: Dray, monkeypatch: pytest.MonkeyPatch) -> None:
    def completed(line: str) -> list[str]:
        monkeypatch.setenv("_DRAY_COMPLETE", "complete_bash")
        monkeypatch.setenv("COMP_WORDS", line)
        monkeypatch.setenv("COMP_CWORD", str(len(line.split(" ")) - 1))
        return dray().out.replace('"', " ").split()

    assert "digits-1" in completed("dray experiment describe d")
    assert "latest" in completed("dray e logs l")
    assert take_number(home / "digits-1") == 1
    assert "1" in completed("dray e logs 1")
    assert "7" in completed("dray trial logs digits-1 7")
    assert "best" in completed("dray t logs dig b")
    assert "experiment" in completed("dray exp")


@pytest.mark.ray
def test_cluster_status_lists_nodes_and_free_resources(tmp_path: Path) -> None:
    code = (
        "import ray, sys\n"
        "ray.init(address='local', num_cpus=3, num_gpus=1, include_dashboard=False, log_to_driver=False)\n"
        "@ray.remote(num_cpus=1)\n"
        "class Taker: pass\n"
        "taker = Taker.remote(); ray.get(taker.__ray_ready__.remote())\n"
        "print(ray.get_runtime_context().gcs_address, flush=True)\n"
        "sys.stdin.read()\n"
    )
    # As a cluster is without `ray get-auth-token`; one that Ray starts for a driver has a token of its own.
    environment = {**os.environ, "RAY_AUTH_MODE": "disabled"}
    command = [sys.executable, "-m", "dray.cli", "cluster", "status"]
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as cluster:
        assert cluster.stdout is not None
        environment["RAY_ADDRESS"] = cluster.stdout.readline().strip()
        found = json.loads(subprocess.check_output([*command, "--json"], env=environment))
        printed = subprocess.check_output(command, text=True, env=environment)
        cluster.communicate("")
    assert (found["address"], found["cpus"], found["gpus"]) == (environment["RAY_ADDRESS"], 3, 1)
    assert (found["cpus_free"], found["gpus_free"]) == (2, 1)
    [node] = found["nodes"]
    assert (node["is_alive"], node["cpus"], node["gpus"]) == (True, 3, 1)
    assert "2 of 3 CPUs and 1 of 1 GPUs free" in printed
