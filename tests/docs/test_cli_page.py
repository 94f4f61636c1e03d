"""docs/json.md has every field of JSON, docs/commands.md every command and option; the code of docs/cli.md runs."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import typer.main
from torch import nn

from dray.cli import app
from tests.cli.conftest import dray, home, simulated_once  # noqa: F401 - fixtures
from tests.cli.said import Said
from tests.cli.test_commands import HAS, READING
from tests.docs.pages import JSON, PAGES, blocks

Dray = Callable[..., Said]

USERS = ("hparams", "best_hparams", "drawn", "config", "states", "metrics")
COMMANDS = re.split(r"^## dray ", PAGES["commands.md"], flags=re.MULTILINE)[1:]


def test_every_command_and_option_is_on_the_page() -> None:
    assert {each.partition("\n")[0] for each in COMMANDS} == HAS
    whole = typer.main.get_command(app)
    for section in COMMANDS:
        command = whole
        for word in section.partition("\n")[0].split():
            command = command.commands[word]  # type: ignore[attr-defined]
        options = {option for each in command.params for option in each.opts if option.startswith("-")}
        cells = " ".join(re.findall(r"^\| `(-[^`]*)`", section, flags=re.MULTILINE))
        assert options == set(re.findall(r"(?<!\S)--?[a-z-]+", cells)), section


def fields(value: Any) -> set[str]:
    if isinstance(value, list):
        return set().union(*map(fields, value))
    if not isinstance(value, dict):
        return set()
    # What these map are names of the user's, or the journal's.
    inner = [item for name, item in value.items() if name not in USERS]
    return set(value) | set().union(*map(fields, inner))


@pytest.mark.parametrize("command", [name for name in READING if name not in ("experiment logs", "report")])
def test_every_field_of_json_is_on_the_page(command: str, home: Path, dray: Dray) -> None:  # noqa: F811
    found = fields(dray(*command.split(), "digits", *READING[command][0], "--json").value)
    named = JSON[command] | JSON[command.replace("describe", "list")]
    if command != "trial logs":
        assert found
    assert found <= named, command


@pytest.mark.usefixtures("few_simulations")
def test_fields_of_a_preview_are_on_the_page(home: Path, dray: Dray) -> None:  # noqa: F811
    config = Path(__file__).parents[2] / "examples" / "digits" / "asha.yaml"
    found = fields(dray("preview", config, "--json").value) | fields(dray("cluster", "status", "--json").value)
    assert found <= JSON["preview"] | JSON["cluster status"]


def test_code_loads_exported_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [code] = blocks("python", page="cli.md")
    monkeypatch.chdir(tmp_path)
    Path("model").mkdir()
    trained = nn.Sequential(nn.Linear(64, 3), nn.ReLU(), nn.Linear(3, 10))
    torch.save(trained.state_dict(), "model/model.pt")
    Path("model/hparams.json").write_text(json.dumps({"hidden": 3}))
    scope: dict[str, Any] = {}
    exec(code.text, scope)
    assert torch.equal(scope["model"][2].weight, trained[2].weight)
