"""README.md: its trial trains, its search is the example's, its commands exist."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

import dray
from dray.cli import app
from dray.config.load import load_config
from dray.errors import ConfigError
from tests.docs.pages import ROOT, blocks
from tests.model_code import imports_undone

TRIAL, DRIVER = (block.text for block in blocks("python", page="README.md"))
[SEARCH] = (block.text for block in blocks("yaml", page="README.md"))
[FAULTS] = (block.text for block in blocks("text", page="README.md"))


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory with the README's files."""
    monkeypatch.setenv("DRAY_HOME", str(tmp_path / "results"))
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "model_def.py").write_text(TRIAL)
    (tmp_path / "code" / "auto.yaml").write_text(SEARCH)
    with imports_undone():
        yield tmp_path / "code"


def test_search_is_the_examples() -> None:
    example = yaml.safe_load((ROOT / "examples" / "digits" / "auto.yaml").read_text())
    assert yaml.safe_load(SEARCH) == example


@pytest.mark.slow
def test_trial_trains_in_this_process(project: Path) -> None:
    result = CliRunner().invoke(
        app, ["experiment", "create", str(project / "auto.yaml"), str(project), "--local"], catch_exceptions=False
    )
    assert result.exit_code == 0, result.output
    [run] = (project.parent / "results" / "local").iterdir()
    assert f"results: {run}" in result.stdout
    assert list(run.glob("checkpoint_*/manifest.json"))


def test_driver_uses_public_names() -> None:
    used = {
        node.attr
        for node in ast.walk(ast.parse(DRIVER))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "dray"
    }
    assert used == {"Experiment"}
    assert used <= set(dray.__all__)


def test_config_errors_are_as_shown(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project)
    broken = SEARCH.replace("max_trials: 64", "max_trials: 0").replace("slots_per_trial", "slots_per_trail")
    Path("auto.yaml").write_text(broken)
    with pytest.raises(ConfigError) as caught:
        load_config("auto.yaml")
    assert f"dray: {caught.value}\n" == FAULTS
