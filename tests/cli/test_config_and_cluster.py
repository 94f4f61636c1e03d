"""Commands that need no experiment."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from dray.experiment.json_schema import json_schema
from tests.cli.said import Said

Dray = Callable[..., Said]
ROOT = Path(__file__).parents[2]


def test_schema_is_printed(home: Path, dray: Dray) -> None:
    assert dray("config", "schema").value == json_schema()


def test_preview_is_also_json(home: Path, dray: Dray) -> None:
    found = dray("preview", ROOT / "examples" / "digits" / "asha.yaml", "--json").value
    # By hand: of 64, 16 go on after 1 epoch; of these, 4 after 4.
    assert found["brackets"] == [
        [
            {"length": 1, "trials": 64, "last": 48},
            {"length": 4, "trials": 16, "last": 12},
            {"length": 16, "trials": 4, "last": 4},
        ]
    ]
    assert (found["trials"], found["total"], found["unit"]) == (64, 160, "epochs")


def test_without_a_cluster_it_says_what_an_experiment_would_do(home: Path, dray: Dray) -> None:
    assert "RAY_ADDRESS is not set: an experiment starts a Ray of its own" in dray("cluster", "status").out
    assert dray("cluster", "status", "--json").value["address"] is None


def test_a_cluster_that_does_not_answer_is_told_of(home: Path, dray: Dray) -> None:
    said = dray("cluster", "status", "--address", "127.0.0.1:1")
    assert said.code == 1
    assert said.err.startswith("dray: no Ray cluster answers at 127.0.0.1:1")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_completes_experiments_and_trials(
    shell: str, home: Path, dray: Dray, monkeypatch: pytest.MonkeyPatch
) -> None:
    def completed(line: str) -> list[str]:
        monkeypatch.setenv("_DRAY_COMPLETE", f"complete_{shell}")
        monkeypatch.setenv("COMP_WORDS", line)
        monkeypatch.setenv("COMP_CWORD", str(len(line.split(" ")) - 1))
        monkeypatch.setenv("_TYPER_COMPLETE_ARGS", line)
        monkeypatch.setenv("_TYPER_COMPLETE_FISH_ACTION", "get-args")
        return dray().out.replace('"', " ").split()

    assert "digits-1" in completed("dray experiment describe d")
    assert "latest" in completed("dray e logs l")
    assert "7" in completed("dray trial logs digits-1 7")
    assert "best" in completed("dray t logs dig b")
    assert "experiment" in completed("dray exp")
