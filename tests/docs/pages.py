"""The pages of the docs, and the blocks of code in them."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dray

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(dray.__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = {path.name: path.read_text() for path in [*sorted(DOCS.glob("*.md")), ROOT / "README.md"]}
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

JSON: dict[str, set[str]] = {
    section.partition("\n")[0]: set(re.findall(r"`(\w+)`", section))
    for section in re.split(r"^## ", PAGES["json.md"], flags=re.MULTILINE)[1:]
}
"""The names in the section of each command in docs/json.md."""

_BLOCK = re.compile(r"^(?:<!-- parsed only: (.+?) -->\n)?```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A block of code.

    Attributes:
        parsed_only: why it can't be run here, as the page says in a comment above it; None: it is run.
    """

    page: str
    language: str
    text: str
    parsed_only: str | None


def blocks(language: str | None = None, *, page: str | None = None) -> list[Block]:
    """All of them, or those of a language, or of a page."""
    found = [
        Block(page=name, language=match[2], text=match[3], parsed_only=match[1])
        for name, text in PAGES.items()
        for match in _BLOCK.finditer(text)
    ]
    return [each for each in found if language in (None, each.language) and page in (None, each.page)]


def files(page: str) -> dict[str, str]:
    """The blocks of a page that are files: their first line is a comment with the name."""
    named = ((re.match(r"# ([\w-]+\.\w+)\n", block.text), block.text) for block in blocks(page=page))
    return {name[1]: text for name, text in named if name is not None}
