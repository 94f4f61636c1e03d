"""docs/search.md names every field of the searcher section, and its snippets are what it says."""

from __future__ import annotations

import re
from random import Random

import yaml

from dray.config.searcher import SEARCHER_FIELDS, Searcher
from searchers import parse_space
from tests.docs.pages import PAGES, blocks

PAGE = PAGES["search.md"]


def test_page_has_exactly_the_methods_and_fields() -> None:
    table = [line for line in PAGE.splitlines() if line.startswith("| `")]
    named = set(re.findall(r"`(\w+)`", "".join(row.split("|")[1] for row in table)))
    assert named == set(SEARCHER_FIELDS)
    fields = set(re.findall(r"`(\w+)[`:]", PAGE))
    assert set(Searcher.model_fields) - {"name"} <= fields


def test_each_row_has_its_methods_fields() -> None:
    rows = {line.split("|")[1]: line.split("|")[3] for line in PAGE.splitlines() if line.startswith("| `")}
    common = SEARCHER_FIELDS["single"]
    own = {names: set(re.findall(r"`(\w+)`", cell)) for names, cell in rows.items()}
    assert own[" `random` "] == SEARCHER_FIELDS["random"] - common
    assert own[" `grid` "] == SEARCHER_FIELDS["grid"] - common
    asha = SEARCHER_FIELDS["asha"] - SEARCHER_FIELDS["random"] - {"stop_once"}
    assert own[" `asha`, `async_halving` "] - {"random"} == asha
    more = SEARCHER_FIELDS["adaptive_asha"] - SEARCHER_FIELDS["asha"]
    assert own[" `adaptive_asha` "] - {"asha", "num_rungs"} == more


def test_conditional_hyperparameters_exist_where_their_value_is_chosen() -> None:
    snippet, _ = blocks("yaml", page="search.md")
    space = parse_space(yaml.safe_load(snippet.text)["hyperparameters"])
    seen = [space.sample(Random(n))["optimizer"] for n in range(50)]
    assert {frozenset(each) for each in seen} == {frozenset({"name", "momentum"}), frozenset({"name"})}  # type: ignore[call-overload]
    assert all(("momentum" in each) == (each["name"] == "sgd") for each in seen)  # type: ignore[index, operator]
