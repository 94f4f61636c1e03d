"""docs/troubleshooting.md quotes messages that dray prints."""

from __future__ import annotations

import ast
import re
from functools import cache

import pytest

from tests.docs.pages import PAGES
from tests.sources import nodes

MESSAGES = re.findall(r"^### `(.+)`$", PAGES["troubleshooting.md"], flags=re.MULTILINE)


@cache
def literals() -> str:
    """All text in dray's strings, with a newline in place of each value that is filled in."""
    strings = [node for file in nodes().values() for node in file if isinstance(node, ast.Constant)]
    return "\n".join(each.value for each in strings if isinstance(each.value, str))


@pytest.mark.parametrize("message", MESSAGES)
def test_message_is_one_of_drays(message: str) -> None:
    # What stands for itself: not "...", nor the field, numbers and names that the example fills in.
    parts = [
        part.strip(" ,;:") for part in re.split(r"\.\.\.|^[a-z.]+: |\d+ \w+:.*?(?=unknown)|Python 3\.\d+", message)
    ]
    quoted = [part for part in parts if len(part) > 6]
    assert quoted
    assert [part for part in quoted if part not in literals()] == []
