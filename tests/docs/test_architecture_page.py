"""docs/architecture.md, architecture-walks.md: the picture is drawn from today's imports, and what they name exists."""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path

import pytest

from tests.docs.pages import DOCS, PAGES, ROOT

TEXT = PAGES["architecture.md"] + PAGES["architecture-walks.md"]
NAMED = sorted(set(re.findall(r"`((?:[\w-]+/)*\w+\.(?:py|md|toml))(?::([\w.]+))?`", TEXT)))
TABLE = re.findall(r"^\| (`.+?) \|", PAGES["architecture.md"], flags=re.MULTILINE)


def names_in(file: Path) -> set[str]:
    """The classes and functions of a file, and the methods of its classes as `Class.method`."""
    found = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            inner = (each for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef))
            found |= {f"{node.name}.{each.name}" for each in inner}
    return found


def test_picture_is_up_to_date() -> None:
    pytest.importorskip("tomllib", reason="docs/rooms.py needs Python 3.11")
    spec = importlib.util.spec_from_file_location("rooms", DOCS / "rooms.py")
    assert spec is not None
    assert spec.loader is not None
    rooms = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(rooms)
    assert (DOCS / "architecture.svg").read_text() == rooms.svg(), "run: python docs/rooms.py"
    layers = {room.removeprefix("dray.") for row in rooms.floors() for room in row}
    assert {name for row in TABLE for name in re.findall(r"`(\w+)`", row)} == layers, "the table of packages"


@pytest.mark.parametrize(("file", "name"), NAMED)
def test_what_it_names_exists(file: str, name: str) -> None:
    path = next(root / file for root in (ROOT / "dray", ROOT) if (root / file).exists())
    assert not name or name in names_in(path)


def test_folders_that_it_names_exist() -> None:
    folders = set(re.findall(r"`((?:[\w-]+/)+)`", TEXT)) - {"dray/"}
    assert len(folders) >= 3
    assert [each for each in folders if not any((root / each).is_dir() for root in (ROOT / "dray", ROOT))] == []
