"""What the experiments of tokens spend, also if nobody is left who could write down when they ended."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from dray.records.directory import ExperimentDirectory
from dray.records.spending import AFTER_S, ALIVE_S, FILE
from dray.serve import tokens
from dray.serve.accounts import Meters
from dray.serve.control import Share
from dray.serve.queue import Item
from dray.serve.quota import Quota
from dray.serve.tokens import Tokens
from tests.serve.conftest import TOKEN

RUN: list[dict[str, Any]] = [
    {"event": "opened", "time": 100.0, "lent": True},
    {"event": "starts", "time": 110.0, "group": "a", "slots": 2},
    {"event": "granted", "time": 110.0, "group": "a", "trial": 0, "slot_type": "CPU"},
    {"event": "alive", "time": 120.0},
]


def item(path: Path, events: list[dict[str, Any]], budget: Mapping[str, float], *, torn: str = "") -> Item:
    """An experiment of a token, with this timeline."""
    metrics = ExperimentDirectory(path).metrics
    metrics.mkdir(parents=True)
    (metrics / FILE).write_text("".join(json.dumps(event) + "\n" for event in events) + torn)
    return Item(name=path.name, path=path, submitted=0.0, share=Share(), owner="agent", budget=dict(budget))


@pytest.fixture
def meters(tmp_path: Path) -> Meters:
    tokens.create(tmp_path, "agent", "submit", Quota(usd=5, prices={"CPU": 1.8}))
    return Meters(Tokens(tmp_path, TOKEN))


def slot_s(spent: Mapping[str, float]) -> float:
    return spent["slot_hours"] * 3600


def test_slots_count_until_now_by_the_prices_of_the_token(meters: Meters, tmp_path: Path) -> None:
    experiment = item(tmp_path / "a", RUN, {"slot_hours": 1})
    for now, expected in ((120.0, 20), (130.0, 40), (125.0, 30)):
        found = meters.read([experiment], now)["a"]
        assert slot_s(found) == pytest.approx(expected)
        assert found["usd"] == pytest.approx(expected * 1.8 / 3600)


@pytest.mark.parametrize("torn", ["", '{"event": "ali'])
def test_after_the_death_of_its_process_slots_count_until_the_last_trial_has_left(
    meters: Meters, tmp_path: Path, torn: str
) -> None:
    experiment = item(tmp_path / "a", RUN, {"slot_hours": 1}, torn=torn)
    assert slot_s(meters.close(experiment, 150.0)) == pytest.approx(80)
    # The next process of the experiment, or of the server, knows it too.
    assert slot_s(meters.read([experiment], 500.0)["a"]) == pytest.approx(80)
    assert slot_s(meters.close(experiment)) == pytest.approx(80)


@pytest.mark.parametrize(("budget_slot_s", "lost_s"), [(1e6, ALIVE_S), (1000, 1.0)])
def test_after_the_death_of_the_server_the_last_seconds_are_added(
    meters: Meters, tmp_path: Path, budget_slot_s: float, lost_s: float
) -> None:
    experiment = item(tmp_path / "a", RUN, {"slot_hours": budget_slot_s / 3600})
    assert slot_s(meters.close(experiment)) == pytest.approx(20 + 2 * (lost_s + AFTER_S))


@pytest.mark.parametrize("timeline", ["[]\n", "{}\n", "no json\n", '{"event": "starts", "time": "x"}\n'])
def test_a_timeline_that_the_trials_code_has_changed_harms_no_other(
    meters: Meters, tmp_path: Path, timeline: str
) -> None:
    good, bad = item(tmp_path / "a", RUN, {"slot_hours": 1}), item(tmp_path / "b", [], {}, torn=timeline)
    assert slot_s(meters.read([bad, good], 130.0)["a"]) == pytest.approx(40)
    assert slot_s(meters.close(bad, 130.0)) == 0


def test_a_deleted_experiment_has_spent_what_was_last_read(meters: Meters, tmp_path: Path) -> None:
    experiment = item(tmp_path / "a", RUN, {"slot_hours": 1})
    meters.read([experiment], 130.0)
    (ExperimentDirectory(experiment.path).metrics / FILE).unlink()
    assert slot_s(meters.close(experiment, 150.0)) == pytest.approx(80)
