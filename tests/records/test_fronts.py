"""The tables, the best trials and the overview of a search with several metrics, against the definition of a front."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest

from dray.display.best_trials import best_trials
from dray.errors import ExperimentError
from dray.records.fronts import order_of, standings
from dray.records.outcomes import no_best_reason, ranked, sound
from dray.records.result import Result
from searchers import Metric, Objectives
from tests.report.simulated import simulated

OBJECTIVES = Objectives((Metric(name="loss"), Metric(name="size"), Metric(name="size", at_most=10)))


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Result:
    return Result(simulated(tmp_path_factory.mktemp("fronts") / "objectives", 24, several=True).path)


def rows(*validations: tuple[int, int, dict[str, float]]) -> pd.DataFrame:
    found = [
        {"trial_id": trial, "batches": batches, "kind": "validation", "name": name, "value": value}
        for trial, batches, metrics in validations
        for name, value in metrics.items()
    ]
    return pd.DataFrame(found)


def test_validation_that_stands_for_a_trial_keeps_the_limits_and_has_the_best_first_objective() -> None:
    there = standings(
        rows(
            (0, 1, {"loss": 0.1, "size": 12.0}),
            (0, 2, {"loss": 0.5, "size": 9.0}),
            (0, 3, {"loss": 0.4, "size": 9.5}),
            (0, 4, {"loss": 0.4, "size": 9.0}),
            (1, 1, {"loss": 0.1, "size": float("nan")}),
            (1, 2, {"loss": 0.2}),
            (2, 1, {"loss": 0.3, "size": 20.0}),
            (2, 2, {"loss": 0.9, "size": 15.0}),
        ),
        OBJECTIVES,
    )
    assert {trial: each.batches for trial, each in there.items()} == {0: 3, 2: 2}
    assert there[0].metrics == {"loss": 0.4, "size": 9.5}
    assert there[2].losses.violation == 0.5


def test_failed_trial_is_on_no_front() -> None:
    there = standings(rows((0, 1, {"loss": 0.1, "size": 1.0}), (1, 1, {"loss": 0.2, "size": 2.0})), OBJECTIVES)
    assert order_of(there, {0: "ERRORED", 1: "PRUNED"}).front == [1]


def test_table_has_the_front_by_the_definition(result: Result) -> None:
    trials = result.trials
    assert (trials["metrics.validation_loss"] == trials["best_metric"]).all()
    assert (trials["metrics.size"] == trials["hparams.hidden"]).all()
    assert trials["violation"].tolist() == pytest.approx(((trials["hparams.hidden"] - 200) / 200).clip(0).tolist())
    kept = trials[trials["metrics.size"] <= 200]
    points = list(zip(kept["best_metric"], kept["metrics.size"], strict=True))
    front = {
        trial
        for trial, (loss, size) in zip(kept["trial_id"], points, strict=True)
        if not any(a <= loss and b <= size and (a, b) != (loss, size) for a, b in points)
    }
    assert set(trials[trials["front"] == 1]["trial_id"]) == front
    assert trials[trials["violation"] > 0]["front"].isna().all()


def test_ranks_begin_with_the_front_and_end_with_what_exceeds_limits(result: Result) -> None:
    order = ranked(result.trials, 1)
    fronts = order["front"].dropna().tolist()
    assert fronts == sorted(fronts)
    assert order["violation"].tolist() == sorted(order["violation"])
    first = order[order["front"] == 1]["best_metric"].tolist()
    assert first == sorted(first)
    assert len(sound(order)) == (order["violation"] == 0).sum()


def test_overview_has_the_front_of_the_journal(result: Result) -> None:
    seen = result.overview
    front = result.trials[result.trials["front"] == 1].sort_values("best_metric")["trial_id"].tolist()
    assert list(seen.front) == front
    assert (seen.metric, seen.best_trial) == ("validation_loss", front[0])
    assert seen.best == pytest.approx(result.trials.set_index("trial_id")["best_metric"][front[0]])


def test_table_of_the_best_shows_every_metric_and_the_front(result: Result) -> None:
    heading, columns, first, *_ = best_trials(result, "validation_loss", 1, width=200)
    count = int((result.trials["front"] == 1).sum())
    assert heading == f"best trials (front 1 is the Pareto front, {count} trials):"
    assert columns.split()[:6] == ["trial", "state", "batches", "front", "validation_loss", "size"]
    assert first.split()[3] == "1"


def test_no_best_trial_if_none_keeps_the_limits(tmp_path: Path) -> None:
    path = simulated(tmp_path / "objectives", 6, several=True).path
    stored = path / "experiment.yaml"
    stored.write_text(stored.read_text().replace("at_most: 200", "at_most: 1"))
    journal = path / "journal.jsonl"
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    lines[0]["metrics"][2]["at_most"] = 1
    journal.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    result = Result(path)
    table = ranked(result.trials, 1)
    closest = int(result.trials.sort_values("hparams.hidden")["trial_id"].iloc[0])
    assert f"none that validated keeps every constraint; the closest is trial {closest} " in no_best_reason(
        table, "validation_loss"
    )
    with pytest.raises(ExperimentError, match="keeps every constraint"):
        result.best_trials  # noqa: B018
    assert best_trials(result, "validation_loss", 1, width=200) == []
    assert result.overview.front == ()
