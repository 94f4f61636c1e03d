"""docs/migration.md: `dray migrate` prints what the page shows, its code runs, its tables are those of the code."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dray.compat.names import COMMANDS, missing
from tests.cli.conftest import dray, home, simulated_once  # noqa: F401 - fixtures
from tests.cli.said import Said
from tests.docs.pages import PAGES, blocks, files


def test_migrate_prints_what_the_page_shows(
    tmp_path: Path,
    home: Path,  # noqa: F811
    dray: Callable[..., Said],  # noqa: F811
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for name in ("model_def.py", "const.yaml"):
        (model / name).write_text(files("migration.md")[name])
    said = dray("migrate", model)
    [shown] = blocks("text", page="migration.md")
    assert said.out == shown.text
    assert said.code == 1


@pytest.mark.slow
def test_script_with_the_alias_runs(tmp_path: Path) -> None:
    [program] = [block.text for block in blocks("python", page="migration.md") if "install()" in block.text]
    assured = f"{program}\nimport dray.pytorch\nassert pytorch is dray.pytorch\nassert info is None\n"
    subprocess.run([sys.executable, "-c", assured], cwd=tmp_path, check=True, timeout=250)


def test_commands_are_those_of_the_code() -> None:
    table = PAGES["determined-reference.md"].split("## Commands\n\n")[1].split("\n\n")[0]
    documented = dict(re.findall(r"^\| `det ([^`]+)` \| (.*) \|$", table, flags=re.MULTILINE))
    assert {command: instead.replace("`", "") for command, instead in documented.items()} == COMMANDS


def test_what_is_said_to_be_missing_is() -> None:
    table = PAGES["migration.md"].split("## What is missing")[1].split("## ")[0]
    named = re.findall(r"`(determined\.[\w.]+)`", table)
    assert len(named) >= 6
    assert [name for name in named if missing(name) is None] == []
