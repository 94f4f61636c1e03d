"""docs/pytorch-api.md says what the docstrings say of all that is public; docs/config.md what the schema says."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from dray import pytorch
from dray.config.sections import SECTIONS
from dray.config.storage import SECRETS

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_docs", DOCS / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_page_is_up_to_date(generate: ModuleType) -> None:
    assert (DOCS / "pytorch-api.md").read_text() == generate.page(), "run: python docs/generate.py"


def test_page_of_the_config_is_up_to_date_and_tells_of_every_field(generate: ModuleType) -> None:
    page = generate.config_page()
    assert (DOCS / "config.md").read_text() == page, "run: python docs/generate.py"
    for place, section in SECTIONS.items():
        _, _, rest = page.partition(f"## `{place}`" if place else "## The experiment")
        table = rest.partition("\n## ")[0]
        assert [row for row in section.model_fields if f"| `{row}` |" not in table] == [], place


def test_every_field_has_an_example_but_secrets_and_what_is_required_says_so(generate: ModuleType) -> None:
    lines = [line for line in generate.config_page().splitlines() if line.startswith("| `")]
    rows = [[cell.strip(" `") for cell in line.split("|")[1:]] for line in lines]
    assert {name for name, _, _, _, example, *_ in rows if not example} == set(SECRETS) - {"access_key"}
    required = {name for name, _, _, default, *_ in rows if default == "required"}
    by_themselves = {
        name for section in SECTIONS.values() for name, field in section.model_fields.items() if field.is_required()
    }
    in_their_method = {"max_trials", "num_rungs"}
    in_their_storage = {"bucket", "container", "host_path"}
    assert required == by_themselves | in_their_method | in_their_storage


def test_page_tells_of_every_public_name(generate: ModuleType) -> None:
    told = {name for modules in generate.CHAPTERS.values() for names in modules.values() for name in names}
    assert {name for name in pytorch.__all__ if not name.startswith("_")} <= told


def test_public_class_without_docstring_is_refused(generate: ModuleType) -> None:
    class Untold:
        pass

    with pytest.raises(SystemExit, match="Untold has no docstring"):
        generate._docstring(Untold)


def test_sections_become_lists_and_examples_code(generate: ModuleType) -> None:
    def half(x: float, exact: bool = True) -> float:
        """Half of a number.

        Args:
            x: any number,
                but not infinite.
            exact: told in full.

        Returns:
            The ``half``.

        >>> half(4.0)
        2.0
        """
        return x / 2

    assert generate._entry("half", half) == [
        "### `half`\n",
        "```python\nhalf(x: float, exact: bool = True) -> float\n```\n",
        "Half of a number.\n\n**Args**\n\n- `x`: any number, but not infinite.\n- `exact`: told in full.\n\n"
        "**Returns**\n\nThe `half`.\n\n```python\n>>> half(4.0)\n2.0\n```\n",
    ]


def test_the_only_item_of_a_section_is_one_item_though_it_takes_two_lines(generate: ModuleType) -> None:
    def step() -> None:
        """Take a step.

        Args:
            frequency: how often a step is taken,
                in batches.
        """

    assert "- `frequency`: how often a step is taken, in batches.\n" in generate._docstring(step)
