"""Commands that need no experiment."""

from __future__ import annotations

import json
import os
import re
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


def test_schema_is_printed(home: Path, dray: Dray) -> None:
    assert dray("config", "schema").value == json_schema()


@pytest.mark.usefixtures("few_simulations")
def test_preview_is_also_json(home: Path, dray: Dray) -> None:
    found = dray("preview", DIGITS / "asha.yaml", "--json").value
    [rungs] = found["brackets"]
    assert [rung["length"] for rung in rungs] == [1, 4, 16]
    assert rungs[0]["trials"] == found["trials"] == 64
    assert found["total"] == pytest.approx(sum(rung["length"] * rung["last"] for rung in rungs), abs=0.01)
    low, high = found["likely_total"]
    assert 100 < low < found["total"] < high < 320
    assert found["unit"] == "epochs"
    grid = dray("preview", DIGITS / "grid.yaml", "--json").value
    # By hand: 8 points of 8 epochs.
    assert grid == {
        "trials": 8,
        "likely_trials": None,
        "total": 64,
        "likely_total": None,
        "likely_hours": None,
        "likely_slot_hours": None,
        "likely_usd": None,
        "unit": "epochs",
        "brackets": [[{"length": 8, "trials": 8, "last": 8}]],
        "repeats": None,
    }


@pytest.mark.usefixtures("few_simulations")
def test_times_of_a_preview_are_those_given(home: Path, dray: Dray) -> None:
    """A grid of 8 trials with 8 epochs, all at a time."""
    said = dray("preview", DIGITS / "grid.yaml", "--seconds-per-epoch", 450, "--price", 2.9).out
    _, hours, slots, rate = said.strip().rsplit("\n", 3)
    assert re.fullmatch(r"about .* \(.* to .* in 9 of 10 simulated searches\) with 8 trials at a time", hours)
    assert re.fullmatch(r"about [\d.]+ slot-hours \([\d.]+ to [\d.]+\), \$\d+ \(\$\d+ to \$\d+\)", slots)
    assert rate == "at 450 s per epoch"
    by_trial = dray("preview", DIGITS / "grid.yaml", "--seconds-per-trial", 3600, "--price", 2.9, "--json").value
    low, high = by_trial["likely_slot_hours"]
    assert 4 < low < 8 < high < 16
    assert by_trial["likely_usd"] == pytest.approx([2.9 * low, 2.9 * high])
    assert f"({low:.3g} to {high:.3g})" in slots


@pytest.mark.usefixtures("few_simulations")
def test_times_of_a_preview_are_those_of_another_experiment(home: Path, dray: Dray) -> None:
    said = dray("preview", DIGITS / "asha.yaml", "--like", "digits-1").out
    assert said.strip().endswith("at 1 s per epoch (8 trials), 0.5 s to start a trial, 0 s to start its workers")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--seconds-per-batch", "1"], "this search has its length in epochs, so --seconds-per-batch does not fit"),
        (["--seconds-per-epoch", "0"], "--seconds-per-epoch must be a number > 0, at most 1e+09, got 0"),
        (["--seconds-per-epoch", "1e308"], "--seconds-per-epoch must be a number > 0, at most 1e+09, got 1e+308"),
        (["--like", "digits-1", "--seconds-per-trial", "9"], "give only one of --like and --seconds-per-trial"),
        (["--price", "2.9"], "--price needs the time that training takes: give --seconds-per-epoch, or --like"),
    ],
)
def test_times_of_a_preview_that_do_not_fit_are_errors(arguments: list[str], told: str, home: Path, dray: Dray) -> None:
    said = dray("preview", DIGITS / "asha.yaml", *arguments)
    assert (said.code, said.out) == (2, "")
    assert said.err.startswith(f"dray: {told}")


def test_without_a_cluster_it_says_what_an_experiment_would_do(home: Path, dray: Dray) -> None:
    assert "RAY_ADDRESS is not set: an experiment starts its own Ray" in dray("cluster", "status").out
    assert dray("cluster", "status", "--json").value["address"] is None


def test_a_cluster_that_does_not_answer_is_an_error(home: Path, dray: Dray) -> None:
    said = dray("cluster", "status", "--address", "127.0.0.1:1")
    assert said.code == 1
    assert said.err.startswith("dray: no Ray cluster answers at 127.0.0.1:1")


@pytest.mark.ray
def test_an_experiment_whose_model_no_worker_can_import_leaves_nothing(
    home: Path, tmp_path: Path, shared_cluster: str
) -> None:
    (tmp_path / "bad_def.py").write_text("raise KeyError('end')\nclass Trial(Base): pass\n")
    config = yaml.safe_load((DIGITS / "asha.yaml").read_text())
    (tmp_path / "asha.yaml").write_text(yaml.safe_dump({**config, "entrypoint": "bad_def:Trial"}))
    before = set(home.iterdir())
    # In a process of its own: it connects to Ray, which leaves its settings to the process.
    command = [sys.executable, "-m", "dray.cli", "experiment", "create", "asha.yaml", "."]
    environment = {**os.environ, "RAY_ADDRESS": shared_cluster}
    said = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert said.returncode == 2
    assert said.stderr.splitlines()[0] == "digits-asha: importing bad_def:Trial ..."
    assert f"importing bad_def from {tmp_path} raised KeyError" in said.stderr
    assert "stored in" not in said.stderr
    assert set(home.iterdir()) == before


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
def test_cluster_status_lists_nodes_and_free_resources(shared_cluster: str) -> None:
    code = (
        "import sys\nfrom dray.cli import main\n"
        "for more in ([], ['--json']):\n"
        "    try: main(['cluster', 'status', '--address', sys.argv[1], *more])\n"
        "    except SystemExit as ended: assert not ended.code"
    )
    out = subprocess.check_output([sys.executable, "-c", code, shared_cluster], text=True)
    printed, found = out[: out.index("{\n")], json.loads(out[out.index("{\n") :])
    assert (found["address"], found["cpus"], found["gpus"]) == (shared_cluster, 2, 0)
    assert found["cpus_free"] <= 2
    [node] = found["nodes"]
    assert (node["is_alive"], node["cpus"], node["gpus"]) == (True, 2, 0)
    assert printed.splitlines()[1].split()[1:4] == ["alive", "2", "0"]
    assert "of 2 CPUs and 0 of 0 GPUs free" in printed
