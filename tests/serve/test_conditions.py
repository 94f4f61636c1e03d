"""Searches of trials: one grammar, and an error for what it does not have."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dray.errors import Invalid
from dray.records.result import Result
from dray.serve.trials import Condition, parsed
from tests.report.simulated import simulated
from tests.serve.conftest import Served

TRIALS = 48


@pytest.fixture(scope="module")
def once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return simulated(tmp_path_factory.mktemp("conditions") / "digits-1", TRIALS).path


@pytest.fixture
def result(once: Path, served: Served) -> Result:
    shutil.copytree(once, served.results / "digits-1")
    return Result(served.results / "digits-1")


def search(served: Served, text: str) -> Any:
    return served.api("GET", f"/experiments/digits-1/trials?ids=1&search={quote(text)}")


def last(result: Result, kind: str, name: str) -> Any:
    rows = result.metrics.query(f"kind == '{kind}' and name == '{name}'").sort_values("batches")
    return rows.groupby("trial_id")["value"].last()


def test_conditions_are_those_of_the_tables(served: Served, result: Result) -> None:
    table = result.trials.set_index("trial_id", drop=False)
    lr, optimizer, best = table["hparams.lr"], table["hparams.optimizer"], table["best_metric"]
    accuracy, middle = last(result, "validation", "accuracy"), float(best.median())
    of_training = last(result, "training", "accuracy")
    wanted = {
        "lr<0.01": lr < 0.01,
        "lr < 0.01": lr < 0.01,
        "lr>=0.001 lr <0.01": (lr >= 0.001) & (lr < 0.01),
        "hparams.lr<0.01": lr < 0.01,
        "optimizer=adam": optimizer == "adam",
        "optimizer = adam|sgd": optimizer.isin(["adam", "sgd"]),
        'optimizer="adam"': optimizer == "adam",
        "'optimizer'='adam'|sgd": optimizer.isin(["adam", "sgd"]),
        "optimizer!=adam": optimizer != "adam",
        "hidden=32|64": table["hparams.hidden"].isin([32, 64]),
        "ADAM": optimizer == "adam",
        "adam lr < 0.01": (optimizer == "adam") & (lr < 0.01),
        f"validation_loss<{middle}": best < middle,
        f"best<{middle}": best < middle,
        f"accuracy>{accuracy.median()}": accuracy.reindex(table.index) > accuracy.median(),
        f"training.accuracy>{of_training.median()}": of_training.reindex(table.index) > of_training.median(),
        "state=pruned|completed": table["state"].isin(["PRUNED", "COMPLETED"]),
        "state!=pruned": table["state"] != "PRUNED",
        "nan_since=none": table["state"] == table["state"],
        "": table["state"] == table["state"],
    }
    for text, holds in wanted.items():
        assert search(served, text).json["ids"] == table.index[holds].tolist(), text
    few = [text for text in wanted if 0 < len(search(served, text).json["ids"]) < TRIALS]
    assert len(few) >= 12, "they tell trials apart"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("lr<<0.1", "can't read 'lr<<0.1'"),
        ("lr<", "can't read 'lr<'"),
        ("<3", "can't read '<3'"),
        ("lr<0.1<5", "can't read 'lr<0.1<5'"),
        ("lr<0.1 and hidden>3", "can't read 'and hidden>3'; write conditions with spaces"),
        ("lr<0.1 && hidden>3", "can't read '&& hidden>3'"),
        ("lr≥0.1", "can't read 'lr≥0.1'"),
        ("optimizer='adam", "can't read"),
        ("adam lr=>0.1", "can't read 'lr=>0.1'"),
        ("optimizer=adam|", "can't read 'optimizer=adam|'"),
        ('lr="0.1', "can't read"),
        ("lr<abc", "'abc' is not a number; write it as lr<0.01"),
        ("lr<nan", "'nan' is not a number"),
        ("lr<0.1|0.2", "is not a number"),
        ("optimizer<3", "optimizer has no order, so write it as optimizer="),
        ("foo>3", "there is no field foo; the fields are best, last, trial, duration, state, "),
        ("foo=3", "lr, hidden, optimizer, layers, validation_loss, training.accuracy"),
        ("foo != adam", "there is no field foo"),
        ("x" * 5000, "at most 4,000 characters"),
    ],
)
def test_what_is_no_condition_is_an_error_that_says_why(served: Served, result: Result, text: str, why: str) -> None:
    reply = search(served, text)
    assert reply.status == 400
    assert why in reply.json["error"]
    assert "the fields are best, last, trial, duration, state, " in reply.json["error"]


TEXT = st.text('abclr01.<>=!|" -', max_size=30)


@given(TEXT)
def test_any_text_is_read_whole_or_refused(text: str) -> None:
    try:
        terms = parsed(text)
    except Invalid:
        return
    signs = [each for each in terms if isinstance(each, Condition)]
    assert all(each.sign in ("<", "<=", ">", ">=", "=", "!=") and each.values for each in signs)
    outside = "".join(text.split('"')[::2])
    assert bool(signs) == any(sign in outside for sign in "<>="), "no sign is lost"


def test_nan_is_found_by_its_name() -> None:
    [condition] = parsed("metric = nan")
    assert isinstance(condition, Condition)
    assert (condition.test()(math.nan), condition.test()(1.0), condition.test()(None)) == (True, False, False)


def test_quotes_are_double_or_single() -> None:
    assert parsed("net = 'a b' \"and\" it's x=5'") == [
        Condition("net", "=", ("a b",)),
        "and",
        "it's",
        Condition("x", "=", ("5'",)),
    ]
