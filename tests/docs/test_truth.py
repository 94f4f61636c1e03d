"""What the pages say is true: numbers are in the results that they name, environment variables exist."""

from __future__ import annotations

import importlib.util
import re
from functools import cache
from pathlib import Path

import pytest

from tests.docs.pages import PAGES, ROOT

RESULTS = ROOT / "bench" / "results"
RESULT = re.compile(r"bench/results/(\w+\.md)|<!-- figures: (\w+\.md) -->")
NUMBER = re.compile(r"(?<![\w.,])(\d{1,3}(?:,\d{3})+|\d*\.?\d+)")


def passages(page: str) -> list[str]:
    """Paragraphs, items of lists and tables. A comment, `<!-- figures: NAME.md -->`, belongs to what it precedes."""
    text = re.sub(r"(<!-- figures: \S+ -->)\n+", r"\1", re.sub(r"^```.*?^```$", "", PAGES[page], flags=re.M | re.S))
    return re.split(r"\n\s*\n|\n(?=[-*] )", text)


def numbers(text: str) -> set[str]:
    return {each.replace(",", "") for each in NUMBER.findall(text)}


def is_among(number: str, measured: set[str]) -> bool:
    """Whether it is one of these, or one of these rounded to its decimals."""
    half = 0.5 * 10 ** -len(number.partition(".")[2])
    return any(abs(float(each) - float(number)) <= half * 1.000001 for each in measured)


CITING = [(page, each) for page in PAGES for each in passages(page) if RESULT.search(each)]


@pytest.mark.parametrize(("page", "passage"), CITING, ids=[page for page, _ in CITING])
def test_numbers_are_those_of_the_results_that_are_named(page: str, passage: str) -> None:
    names = {name for match in RESULT.findall(passage) for name in match if name}
    measured = numbers("".join((RESULTS / name).read_text() for name in names))
    said = numbers(re.sub(r"`[^`]*`|\]\([^)]*\)|<!--.*?-->", "", passage))
    assert [each for each in said if not is_among(each, measured)] == [], f"not in {names}"


@cache
def sources(*folders: Path) -> str:
    return "\n".join(file.read_text() for folder in folders for file in sorted(folder.rglob("*.py")))


@pytest.mark.parametrize("prefix", ["DRAY", "RAY"])
def test_environment_variables_exist(prefix: str) -> None:
    code = sources(ROOT / "dray")
    if prefix == "RAY":
        # Not ray/train: dray starts workers without it.
        [ray] = importlib.util.find_spec("ray").submodule_search_locations  # type: ignore[union-attr, misc]
        code += sources(*(Path(ray) / each for each in ("_common", "_private", "autoscaler", "dashboard")))
    named = {name for page in PAGES.values() for name in re.findall(rf"\b{prefix}_[A-Z_]+\b", page)}
    assert len(named) > 5
    composed = set(re.findall(rf"f\"({prefix}_\w*)\{{", code))
    assert [each for each in named if each not in code and not each.startswith(tuple(composed))] == []
