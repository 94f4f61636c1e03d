"""docs/search.md names every field of the searcher section, and its snippets are what it says."""

from __future__ import annotations

import re
from random import Random

import yaml

from dray.config.searcher import METHODS, AnySearcher
from searchers import parse_space
from tests.docs.pages import PAGES, blocks

PAGE = PAGES["search.md"]
PAGES_OF_SEARCHES = PAGE + PAGES["priors.md"] + PAGES["objectives.md"]
TABLE = [line for line in PAGE.partition("## Hyperparameters")[0].splitlines() if line.startswith("| `")]
FIELDS = {method: set(model.model_fields) for method, model in METHODS.items() if ":" not in method}


def test_page_has_exactly_the_methods_and_fields() -> None:
    named = set(re.findall(r"`(\w+)`", "".join(row.split("|")[1] for row in TABLE)))
    assert named == set(FIELDS)
    fields = set(re.findall(r"`(\w+)[`:]", PAGES_OF_SEARCHES))
    assert set(AnySearcher.model_fields) - {"name"} <= fields


def test_each_row_has_its_methods_fields() -> None:
    rows = {line.split("|")[1]: line.split("|")[3] for line in TABLE}
    common = FIELDS["single"]
    own = {names: set(re.findall(r"`(\w+)`", cell)) for names, cell in rows.items()}
    assert own[" `auto` "] == FIELDS["auto"] - common
    assert own[" `random` "] - {"auto"} == FIELDS["random"] - FIELDS["auto"]
    assert own[" `grid` "] == FIELDS["grid"] - common
    assert own[" `pbt` "] == FIELDS["pbt"] - common
    asha = FIELDS["asha"] - FIELDS["random"] - {"stop_once"}
    assert own[" `asha`, `async_halving` "] - {"random"} == asha
    more = FIELDS["adaptive_asha"] - FIELDS["asha"]
    assert own[" `adaptive_asha` "] - {"asha", "num_rungs"} == more


def test_conditional_hyperparameters_exist_where_chosen() -> None:
    [snippet] = [each for each in blocks("yaml", page="search.md") if "momentum" in each.text]
    space = parse_space(yaml.safe_load(snippet.text)["hyperparameters"])
    seen = [space.sample(Random(n))["optimizer"] for n in range(50)]
    assert {frozenset(each) for each in seen} == {frozenset({"name", "momentum"}), frozenset({"name"})}  # type: ignore[call-overload]
    assert all(("momentum" in each) == (each["name"] == "sgd") for each in seen)  # type: ignore[index, operator]
