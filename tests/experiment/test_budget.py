"""A budget that is spent: what the experiment is then, and how it goes on. Nothing here starts Ray."""

from __future__ import annotations

import json
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import dray
from dray.config.search import build_search
from dray.errors import AlreadyEnded, ConfigError
from dray.records.directory import ExperimentDirectory
from dray.records.reader import ExperimentReader
from dray.records.spending import FILE
from searchers import Exited, Journal, Reported, Started
from tests.ray.harness import run_here

CONFIG: dict[str, Any] = {
    "name": "budgeted",
    "entrypoint": "python3 train.py",
    "hyperparameters": {"global_batch_size": 2, "lr": {"type": "double", "minval": 0, "maxval": 1}},
    "searcher": {"name": "asha", "metric": "loss", "max_length": {"epochs": 4}, "num_rungs": 2, "divisor": 2}
    | {"max_concurrent_trials": 3},
    "budget": {"time": "2h", "slot_hours": 40},
    "reproducibility": {"experiment_seed": 7},
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """An experiment whose driver was killed after it had run for two hours: trial 0 has reached the first of its rungs,
    1 has started, 2 was stopped, and 3 waits."""
    directory = experiment(tmp_path / "budgeted-1").prepare()
    config = directory.config()
    with Journal(directory.journal) as journal:
        journal.append({"event": "opened", "version": "0", "time": 0.0})
        search = build_search(config, lambda record: journal.append({**record, "time": 0.0}))
        search.start()
        for trial in (0, 1, 2):
            search.on(Started(trial=trial))
        search.on(Reported(trial=0, step=2, value=0.1))
        search.on(Reported(trial=2, step=2, value=0.2))
        search.on(Exited(trial=2, reason="stopped"))
    spend(directory, 0, 7200, slots=4)
    return directory.path


def experiment(path: Path) -> dray.Experiment:
    """As a script creates it, or continues it."""
    code = path.with_name("code")
    code.mkdir(exist_ok=True)
    (code / "train.py").write_text("train()\n")
    return dray.Experiment(CONFIG, model_dir=code, path=path)


def spend(directory: ExperimentDirectory, begin: float, end: float, *, slots: float) -> None:
    events = [
        {"event": "opened", "time": begin},
        {"event": "starts", "time": begin, "group": "a", "slots": slots},
        {"event": "arrived", "time": begin, "group": "a"},
        {"event": "alive", "time": end},
    ]
    directory.metrics.mkdir(exist_ok=True)
    with (directory.metrics / FILE).open("a") as file:
        file.writelines(json.dumps(event) + "\n" for event in events)


def resume(path: Path, **arguments: Any) -> dray.Result:
    return dray.Experiment.resume(path, **arguments).run()


def events(path: Path) -> list[str]:
    return [record["event"] for record in Journal.read(path / "journal.jsonl")]


def test_a_resumed_experiment_whose_budget_is_spent_names_the_command_that_extends_it(path: Path) -> None:
    for _ in range(2):
        with pytest.raises(AlreadyEnded) as caught:
            resume(path)
        assert str(caught.value) == (
            "the experiment has ended: budget.time is spent (2 of 2 h, 8 of 40 slot-hours); to continue: "
            f"dray experiment extend {path} --budget time=4h"
        )
        assert events(path).count("ended") == 1
    with pytest.raises(AlreadyEnded, match=r"2 of 1.5 h"):
        resume(path, budget={"time": "90m"})


def test_an_experiment_that_has_ended_before_the_last_of_its_budget_is_not_resumed_for_the_rest(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "dray.cluster.connection", None)  # the run would begin
    with pytest.raises(ImportError):
        resume(path, budget={"time": "2.1h"})
    with Journal(path / "journal.jsonl") as journal:
        journal.append({"event": "ended", "reason": "the rest of budget.time takes no trial to its next rung"})
    with pytest.raises(AlreadyEnded, match=r"the rest of budget.time .*2 of 2.1 h, .* --budget time=5h"):
        resume(path)
    assert experiment(path).run().overview.state == "COMPLETED"
    assert events(path).count("ended") == 1
    with pytest.raises(ImportError):
        resume(path, budget={"time": "4h"})


def test_the_same_script_run_again_has_the_result(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = experiment(path).run().overview
    assert (found.state, found.reason) == ("COMPLETED", "budget.time is spent")
    assert found.budget == {
        "time": {"spent": 7200, "total": 7200},
        "slot_hours": {"spent": 8, "total": 40},
    }
    said = capsys.readouterr().err
    assert "ended: budget.time is spent\n" in said
    assert "next: 1 trial would begin; trial 1 would continue to 2 epochs; trial 0 would continue to 4 epochs" in said


def test_an_extension_is_recorded_once_and_changes_the_given_totals(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "dray.cluster.connection", None)  # the run would begin
    for _ in range(2):
        with pytest.raises(ImportError):
            resume(path, budget={"time": "4h"}, patience=7)
    assert events(path).count("limits") == 1
    with closing(ExperimentReader(ExperimentDirectory(path))) as reader:
        reader.refresh()
        budget = reader.config.budget
        assert budget is not None
        assert (budget.time, budget.slot_hours, reader.config.patience) == ("4h", 40, 7)
        assert (reader.overview().state, reader.overview().reason) == ("STOPPED", None)
        assert reader.overview().usage == "2 of 4 h, 8 of 40 slot-hours"


def test_prices_can_be_added(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dray.cluster.connection", None)  # the run would begin
    for prices in ({"CPU": 1.0, "T4": 2.0}, {"CPU": 0.5}):
        with pytest.raises(ImportError):
            resume(path, budget={"time": "4h", "usd": 90}, prices=prices)
    with closing(ExperimentReader(ExperimentDirectory(path))) as reader:
        reader.refresh()
        assert reader.config.prices == {"CPU": 0.5, "T4": 2.0}
        assert reader.overview().budget["usd"] == {
            "spent": 16.0,
            "total": 90.0,
        }  # the group has no type, so the highest price


@pytest.mark.parametrize(
    ("extension", "fault"),
    [
        ({"budget": {"time": "soon"}}, "budget.time"),
        ({"budget": {"usd": 9}}, "prices"),
        ({"budget": "4h"}, "budget"),
        ({"until": {"loss": "low"}}, "until.loss"),
        ({"until": {"los": 0.1}}, "until.los"),
        ({"max_trials": 9}, "searcher.max_trials"),
    ],
)
def test_an_invalid_extension_is_refused_and_changes_nothing(path: Path, extension: dict[str, Any], fault: str) -> None:
    with pytest.raises(ConfigError, match="The extension has 1 error") as caught:
        resume(path, **extension)
    assert [each.path for each in caught.value.faults] == [fault]
    assert "limits" not in events(path)


def test_the_commands_show_what_is_spent(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AlreadyEnded):
        resume(path)
    monkeypatch.setenv("DRAY_HOME", str(path.parent))
    described = run_here("describe", path)
    assert "COMPLETED" in described.out
    assert "\nended       budget.time is spent" in described.out
    assert "\nbudget      2 of 2 h, 8 of 40 slot-hours" in described.out
    assert "2 of 2 h, 8 of 40 slot-hours" in run_here("list").out
    assert json.loads(run_here("describe", path, "--json").out)["budget"]["time"]["spent"] == 7200
    assert "experiment ended: budget.time is spent" in run_here("logs", path).out
