"""Journals written by released versions can be replayed to the same records and decisions.

`journals/*.jsonl` were written by dray 0.1.0, from random histories with failures, late reports, values that are not
finite, and two extensions. They are never rewritten.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from searchers import ASHA, AdaptiveASHA, Journal, Method, PromotionASHA, RandomSearch, parse_space
from searchers.search import Record
from searchers.testing import repeat
from tests.searchers.helpers import new_search

JOURNALS = Path(__file__).parent / "journals"
SGD = {"name": "sgd", "momentum": {"type": "double", "minval": 0, "maxval": 0.9}}
SPACE = parse_space(
    {
        "lr": {"type": "log", "base": 10, "minval": -4, "maxval": -1},
        "opt": {"type": "categorical", "vals": [SGD, {"name": "adam"}]},
    }
)
METHODS: dict[str, Callable[[], Method]] = {
    "random": lambda: RandomSearch(max_trials=5, max_concurrent_trials=2, max_length=4),
    "asha": lambda: ASHA(max_trials=10, max_length=16, num_rungs=3, max_concurrent_trials=4),
    "promotion": lambda: PromotionASHA(max_trials=10, max_length=16, num_rungs=3, divisor=2, max_concurrent_trials=3),
    "adaptive": lambda: AdaptiveASHA(
        max_trials=12, max_length=16, divisor=2, variant="promotion", max_concurrent_trials=4
    ),
}


@pytest.mark.parametrize("name", METHODS)
def test_a_recorded_journal_replays(name: str) -> None:
    """`replay` compares every decision with the recorded one."""
    log: list[Record] = []
    search = new_search(METHODS[name](), SPACE, log, smaller_is_better=False)
    search.replay(Journal.read(JOURNALS / f"{name}.jsonl"))
    assert log == []
    assert search.done is not None
    assert search.progress() == 1


@pytest.mark.parametrize("name", METHODS)
def test_the_same_events_are_written_as_the_same_records(name: str) -> None:
    """Byte for byte, hyperparameters and their seeds included."""
    lines = (JOURNALS / f"{name}.jsonl").read_text().splitlines()
    written: list[Record] = []
    search = new_search(METHODS[name](), SPACE, written, smaller_is_better=False)
    for line in lines:
        repeat(search, json.loads(line))
    assert [json.dumps(record, allow_nan=False, separators=(",", ":")) for record in written] == lines
