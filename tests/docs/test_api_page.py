"""docs/pytorch-api.md and searchers-api.md have every public name; docs/config.md is what the config's schema says."""

from __future__ import annotations

import importlib.util
import inspect
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType, ModuleType

import pytest

import dray
import dray.compat
import dray.pytorch.experimental
import dray.tensorboard.metric_writers.pytorch
import searchers
from dray import core, pytorch
from dray.config.faults import SECTIONS
from dray.config.storage import SECRETS
from searchers import events

DOCS = Path(__file__).parents[2] / "docs"
API = "".join((DOCS / name).read_text() for name in ("pytorch-api.md", "searchers-api.md"))
DIRECTIVES = re.findall(r"^::: ([\w.]+)$", API, flags=re.MULTILINE)
ALIASES = {name for name in core.__all__ if name.startswith("Dummy")}
"""Determined's names for its classes outside of a cluster; each is one of those that the page has."""
RENAMED = {"LegacyTrial", "TrialContext", "__version__"}
"""Determined's older names for `PyTorchTrial` and its context."""
PLACEHOLDERS = {"ExperimentalCoreContext", "ProfilerContext"}
"""Names that Determined's code may use, without a use of their own."""


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_docs", DOCS / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_public_name_is_on_the_page() -> None:
    named = {each.rpartition(".")[2] for each in DIRECTIVES}
    assert {name for name in pytorch.__all__ if not name.startswith("_")} <= named
    assert set(core.__all__) - ALIASES - PLACEHOLDERS <= named
    assert set(dray.__all__) - RENAMED <= named
    assert set(searchers.__all__) - vars(events).keys() <= named  # `searchers.events` is on the page as a whole


def public(path: str) -> Iterator[tuple[str, object]]:
    """A name on the page, and its public members."""
    thing = pkgutil.resolve_name(path)
    if not inspect.isclass(thing) and not inspect.isfunction(thing):
        return  # a constant or a type alias
    yield path, thing
    for name, member in vars(thing).items() if inspect.isclass(thing) else ():
        if not name.startswith("_") and isinstance(member, FunctionType | classmethod | staticmethod | property):
            yield f"{path}.{name}", member


@pytest.mark.parametrize("path", DIRECTIVES)
def test_every_public_name_has_a_docstring(path: str) -> None:
    # An inherited docstring is that of another class: mkdocstrings leaves out what has none of its own.
    assert [name for name, thing in public(path) if not inspect.getdoc(thing)] == []


def test_page_of_the_commands_is_up_to_date(generate: ModuleType) -> None:
    assert (DOCS / "commands.md").read_text() == generate.commands_page(), "run: python docs/generate.py"


def test_page_of_the_config_is_up_to_date_and_has_every_field(generate: ModuleType) -> None:
    page = generate.config_page()
    assert (DOCS / "config.md").read_text() == page, "run: python docs/generate.py"
    fields = {section.path(name) for section in SECTIONS.values() for name in section.model_fields}
    assert [path for path in generate.GUIDES if path not in fields] == []
    for place, section in SECTIONS.items():
        _, _, rest = page.partition(f"## `{place}`" if place else "## The experiment")
        table = rest.partition("\n## ")[0]
        assert [row for row in section.model_fields if f"| `{row}` |" not in table] == [], place


def test_every_field_has_an_example_or_is_a_secret(generate: ModuleType) -> None:
    page = generate.config_page().partition("## The experiment")[2]
    lines = [line for line in page.splitlines() if line.startswith("| `")]
    rows = [[cell.strip(" `") for cell in line.split("|")[1:]] for line in lines]
    assert {name for name, _, _, _, example, *_ in rows if not example} == set(SECRETS) - {"access_key"}
    required = {name for name, _, _, default, *_ in rows if default == "required"}
    fields = [each for section in SECTIONS.values() for each in section.model_fields.items()]
    assert required == {name for name, field in fields if field.is_required()} - {"storage_path"}  # only a uri needs it
