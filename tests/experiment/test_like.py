"""First points that a new experiment learns from the experiments in ``searcher.like``."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from dray.errors import ConfigError
from dray.experiment.experiment import Experiment
from dray.experiment.like import read_earlier
from dray.records.directory import ExperimentDirectory, results_root
from tests.report.simulated import config_of, simulated

BEST = -2.2
"""The exponent of the best learning rate of a simulated search."""


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DRAY_HOME", str(tmp_path / "results"))
    simulated(results_root() / "digits-1", 24)
    simulated(results_root() / "digits-2", 24, several=True)
    simulated(results_root() / "small-1", 2)
    return results_root()


def created(model: Path, like: Any, path: Path, **more: Any) -> tuple[Experiment, list[dict[str, Any]]]:
    config = {**config_of(16).to_dict(), "entrypoint": "python3 train.py"}
    (model / "train.py").write_text("print(1)\n")
    experiment = Experiment(
        {**config, "searcher": {**config["searcher"], "like": like, **more}}, model_dir=model, path=path
    )
    return experiment, experiment.prepare().config().searcher.points  # type: ignore[attr-defined]


@pytest.mark.parametrize("like", ["digits-1", ["digits-2"], "digits-*"])
def test_first_points_are_near_the_best_of_earlier_experiments(like: Any, results: Path, tmp_path: Path) -> None:
    experiment, points = created(tmp_path, like, results / "new-1")
    assert points
    assert abs(math.log10(points[0]["lr"]) - BEST) < 0.8
    [line] = experiment.learned
    assert line.startswith("first ")
    assert ("digits-2" in line) == (like != "digits-1")


def test_the_same_call_continues_after_the_earlier_ones_are_deleted(results: Path, tmp_path: Path) -> None:
    _, points = created(tmp_path, "digits-1", results / "new-1")
    shutil.rmtree(results / "digits-1")
    assert created(tmp_path, "digits-1", results / "new-1")[1] == points


@pytest.mark.parametrize("is_there", [True, False], ids=["there", "deleted"])
def test_a_fork_has_the_same_points(is_there: bool, results: Path, tmp_path: Path) -> None:
    _, points = created(tmp_path, "digits-1", results / "new-1")
    if not is_there:
        shutil.rmtree(results / "digits-1")
    experiment, same = created(tmp_path, "digits-1", results / "new-2", points=points)
    assert same == points
    assert len(experiment.learned) == (not is_there)


def test_too_few_results_are_said(results: Path, tmp_path: Path) -> None:
    experiment, points = created(tmp_path, ["small-1"], results / "new-1")
    assert (points, experiment.learned) == ([], ["nothing learned from small-1: fewer than 8 results"])


def test_an_experiment_that_has_yet_to_begin_has_no_results(results: Path, tmp_path: Path) -> None:
    (results / "small-1" / "journal.jsonl").unlink()
    experiment, points = created(tmp_path, ["small-1"], results / "new-1")
    assert (points, experiment.learned) == ([], ["nothing learned from small-1: fewer than 8 results"])


def test_a_pattern_learns_from_those_that_can_be_read(results: Path, tmp_path: Path) -> None:
    simulated(results / "digits-3", 24)
    (results / "digits-3" / "journal.jsonl").write_text("{\n{}\n")
    (results / "local" / "digits-local").mkdir(parents=True)
    (results / "local" / "digits-local" / "metrics.jsonl").touch()
    experiment, points = created(tmp_path, "digits-*", results / "new-1")
    assert points == created(tmp_path, ["digits-1", "digits-2"], results / "new-2")[1]
    assert experiment.learned[0].startswith("nothing learned from digits-3: ")
    assert "line 1 is damaged" in experiment.learned[0]
    with pytest.raises(ConfigError, match="line 1 is damaged"):
        created(tmp_path, "digits-3*", results / "new-3")


def test_an_experiment_with_two_names_counts_once(results: Path, tmp_path: Path) -> None:
    named = [str(results / "digits-1"), "digits-[1]", "digits-2"]
    assert created(tmp_path, named, results / "new-1")[0].learned[0].count("digits-1") == 1


def test_a_name_may_look_like_a_pattern(results: Path, tmp_path: Path) -> None:
    simulated(results / "digits-[1]", 24)
    assert created(tmp_path, "digits-[1]", results / "new-1")[0].learned == ["first 1 trial learned from digits-[1]"]


def test_the_rungs_are_those_of_the_last_extension(results: Path) -> None:
    journal = results / "digits-1" / "journal.jsonl"
    assert read_earlier("digits-1").rungs == (1, 4, 16)
    with journal.open("a") as file:
        file.write('{"event": "extended", "max_length": 64, "rungs": [1, 4, 16, 64], "actions": []}\n')
    assert read_earlier("digits-1").rungs == (1, 4, 16, 64)


def test_there_are_no_more_points_than_trials(results: Path, tmp_path: Path) -> None:
    assert len(created(tmp_path, "digits-*", results / "new-1", max_trials=1)[1]) == 1


def test_points_that_leave_no_room_are_said(results: Path, tmp_path: Path) -> None:
    given = [{"lr": 0.001 * number, "hidden": 32, "optimizer": "adam"} for number in range(1, 11)]
    experiment, points = created(tmp_path, "digits-1", results / "new-1", points=given)
    assert len(points) == 10
    assert experiment.learned == ["nothing learned from digits-1: searcher.points has 10 already"]


@pytest.mark.parametrize(
    ("like", "field", "what"),
    [
        ("nowhere", 0, "no experiment 'nowhere'"),
        (["digits-1", "cnn-*"], 1, "matches 'cnn-*'"),
        (7, 0, "no experiment '7'"),
    ],
)
def test_an_unknown_experiment_is_one_error_and_nothing_is_created(
    like: Any, field: int, what: str, results: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        created(tmp_path, like, results / "new-1")
    [(path, message)] = caught.value.faults
    assert path == f"searcher.like[{field}]"
    assert what in message
    assert not ExperimentDirectory(results / "new-1").config_file.exists()


def test_without_like_nothing_changes_but_a_line_names_what_could_be_learned_from(
    results: Path, tmp_path: Path
) -> None:
    for name, trials in (("other-1", 2), ("other-2", 2)):
        created(tmp_path, [], results / name, max_trials=trials)
    experiment, points = created(tmp_path, [], results / "new-1")
    assert points == []
    assert experiment.learned == [
        "same entrypoint and metric: other-2, other-1; to learn from one, add --config searcher.like=other-2"
    ]
