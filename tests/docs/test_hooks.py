"""docs/hooks.py: what it does with the Markdown of the pages; what holds for the form of all pages."""

from __future__ import annotations

import importlib.util
import re
from types import ModuleType

import pytest

from dray.config.faults import SECTIONS
from tests.docs.pages import DOCS, PAGES, ROOT, blocks


@pytest.fixture(scope="module")
def hooks() -> ModuleType:
    pytest.importorskip("mkdocs")
    spec = importlib.util.spec_from_file_location("docs_hooks", DOCS / "hooks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_each_field_of_the_config_has_an_anchor(hooks: ModuleType) -> None:
    found = re.findall(r"\{#([\w.]+)\}", hooks.with_anchors(PAGES["config.md"]))
    fields = {
        f"{place}.{name}".replace("[]", "").lstrip(".")
        for place, model in SECTIONS.items()
        for name in model.model_fields
    }
    kinds = {f"hyperparameters.{kind}" for kind in ("const", "categorical", "int", "double", "log")}
    assert set(found) == fields | kinds
    assert len(found) == len(set(found))


def test_files_of_the_repository_are_links_once_it_has_an_address(hooks: ModuleType) -> None:
    text = "See `bench/results/gpu.md` and `dray demo`.\n\n```sh\nls `clusters/x`\n```\n"
    assert hooks.with_links(text, "") == text
    linked = hooks.with_links(text, "https://example.org/dray/")
    assert linked == text.replace(
        "`bench/results/gpu.md`", "[`bench/results/gpu.md`](https://example.org/dray/blob/main/bench/results/gpu.md)"
    )


@pytest.mark.parametrize("page", [name for name in PAGES if name != "README.md"])
def test_each_page_begins_with_a_sentence_that_describes_it(hooks: ModuleType, page: str) -> None:
    assert 20 < len(hooks.description(PAGES[page])) < 300


def test_each_page_is_in_the_navigation() -> None:
    named = re.findall(r": ([\w-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), flags=re.MULTILINE)
    assert sorted(named) == sorted({*PAGES, "contributing.md", "changelog.md"} - {"README.md"})


REFERENCE = {
    *(
        "cli.md",
        "commands.md",
        "json.md",
        "config.md",
        "pytorch-api.md",
        "searchers-api.md",
        "server-api.md",
        "machine.md",
    ),
    *("sharding-reference.md", "determined-reference.md", "troubleshooting.md"),
}


@pytest.mark.parametrize("page", sorted(PAGES.keys() - REFERENCE))
def test_pages_to_be_read_are_short(page: str) -> None:
    assert len(PAGES[page].split()) <= 1500


@pytest.mark.parametrize("page", PAGES)
def test_code_fits_its_column(page: str) -> None:
    lines = [line for block in blocks(page=page) if block.language != "text" for line in block.text.splitlines()]
    assert [line for line in lines if len(line) > 88] == []
