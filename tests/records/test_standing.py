"""How an experiment stands, in one sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dray.config.load import load_config
from dray.records.overview import Overview
from dray.records.reader import ExperimentReader
from dray.records.standing import RungNow, Standing, standing
from searchers.events import Exited, Reported, Started
from tests.records.test_result import Story, config, told


def searching(**searcher: Any) -> Any:
    fields = {"metric": "error", "max_length": {"batches": 16}}
    space = {"lr": {"type": "double", "minval": 0.1, "maxval": 0.2}}
    return load_config({"hyperparameters": space, "searcher": {**fields, **searcher}})


def read(story: Story) -> ExperimentReader:
    reader = ExperimentReader(story.directory)
    reader.refresh()
    return reader


def parts_of(found: Standing) -> dict[str, str]:
    return {part.about: part.text for part in found.parts}


def test_a_running_experiment_is_described_in_a_sentence(tmp_path: Path) -> None:
    story = told(tmp_path, config())  # a record a second, from 1001 s on
    reader = read(story)
    found = standing(reader.overview(), reader, now=1001.0 + 134 * 60)
    assert found.sentence.startswith("Running for 2 h 14 min; ")
    parts = parts_of(found)
    assert parts["trials"] == "3 of 5 trials ended"
    assert parts["failed"] == "1 trial failed"
    assert parts["best"] == "best error 0.25 of trial 0"
    assert parts["search"] == "1 trial trains to 20 batches"
    assert parts_of(story.result.standing)["best"] == parts["best"]


def test_time_and_budget_left_are_shown_while_it_can_continue() -> None:
    budget = {"time": {"spent": 3600.0, "total": 7200.0}, "usd": {"spent": 22.0, "total": 25.0}}
    seen = Overview(name="a", path="", state="RUNNING", began=0.0, last=60.0, ran_s=60.0, left_s=2400.0, budget=budget)
    found = standing(seen, None, now=60.0)
    assert (found.sentence, found.left_s) == (
        "Running for 1 min 00 s; about 40 min and 12% of the budget left",
        2400.0,
    )
    assert found.budget_left == pytest.approx(0.12)
    ended = standing(Overview(name="a", path="", state="COMPLETED", began=0.0, ran_s=113.0, budget=budget), None)
    assert ended.sentence == "Completed after 1 min 53 s"


BEGAN = {"began": 1.0, "ran_s": 40.0}


@pytest.mark.parametrize(
    ("state", "fields", "sentence"),
    [
        ("QUEUED", {}, "Queued for 5 min 00 s"),
        ("QUEUED", BEGAN, "Queued after 40 s"),
        ("STOPPED", {}, "Not begun"),
        ("PAUSED", {"began": 1.0, "ran_s": 47.4}, "Paused after 47 s"),
        ("DAMAGED", {"why": "line 3 is cut"}, "Its files can't be read: line 3 is cut"),
        ("ERROR", {**BEGAN, "why": "no trial completed"}, "Failed after 40 s: no trial completed"),
        ("COMPLETED", {**BEGAN, "reason": "budget.time is spent"}, "Ended after 40 s: budget.time is spent"),
        (
            "PARTLY_FAILED",
            {**BEGAN, "trials": 4, "ended": 4, "failed": 2},
            "Completed after 40 s; 4 of 4 trials ended; 2 trials failed",
        ),
        ("UNKNOWN", BEGAN, "Ran for 40 s, and may still run on another machine"),
        ("RESTARTING", {**BEGAN, "why": "its process died"}, "Restarting after 40 s: its process died"),
    ],
)
def test_each_state_is_told(state: Any, fields: Any, sentence: str) -> None:
    seen = Overview(name="a", path="", state=state, **fields)
    assert standing(seen, None, queued=100.0, now=400.0).sentence == sentence


def test_what_a_search_by_rungs_does_now_is_told(tmp_path: Path) -> None:
    search = searching(name="asha", num_rungs=3, divisor=2, variant="promotion", sampler="tpe", max_trials=4)
    story = Story(tmp_path / "experiment", search)
    story.happen(*(Started(trial=trial) for trial in range(4)))
    for trial, error in ((0, 0.25), (1, 0.5)):
        story.validate(trial, 4, error, decides=True)
    story.happen(Started(trial=0))
    reader = read(story)
    found = standing(reader.overview(), reader)
    assert found.rungs == [
        RungNow(length=4, reached=2, running=2, paused=1),
        RungNow(length=8, reached=0, running=1, paused=0),
        RungNow(length=16, reached=0, running=0, paused=0),
    ]
    assert found.search == (
        "3 trials train to rungs 1 to 2 of 3, 1 is paused at rungs, "
        "hyperparameters are random until 10 trials have results (2 have)"
    )


def test_the_generation_of_a_population_is_told(tmp_path: Path) -> None:
    story = Story(tmp_path / "experiment", searching(name="pbt", population=2, interval={"batches": 4}, quantile=0.5))
    story.happen(Started(trial=0), Started(trial=1))
    story.happen(Reported(trial=0, step=4, value=0.5))
    reader = read(story)
    found = standing(reader.overview(), reader)
    assert found.search == "the population trains generations 1 to 2 of 4"


def test_a_search_without_a_best_trial_says_why(tmp_path: Path) -> None:
    story = Story(tmp_path / "experiment", config())
    story.happen(Started(trial=0))
    reader = read(story)
    assert parts_of(standing(reader.overview(), reader))["best"] == "no trial has validated yet"
    story.validate(0, 10, 0.5)
    story.happen(Exited(trial=0, reason="errored"))
    reader.refresh()
    assert parts_of(standing(reader.overview(), reader))["best"].startswith("no best trial, because every trial")


def test_an_exhausted_space_is_why_a_search_ended(tmp_path: Path) -> None:
    search = {"name": "random", "metric": "error", "max_trials": 100, "max_length": {"batches": 16}}
    space = {"layers": {"type": "int", "minval": 1, "maxval": 2}}
    story = Story(tmp_path / "experiment", load_config({"hyperparameters": space, "searcher": search}))
    for trial in (0, 1):
        story.happen(Started(trial=trial))
        story.validate(trial, 16, 0.5)
        story.happen(Exited(trial=trial, reason="completed"))
    story.journal.close()
    reader = read(story)
    found = reader.overview()
    assert (found.state, found.total, found.reason) == ("COMPLETED", 2, "all 2 points of the space were tried")
    assert ": all 2 points of the space were tried" in standing(found, reader).sentence
