"""Budgets and alerts of an experiment."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import dray
from dray.config.load import load_config
from dray.config.notify import Notify, Watched
from dray.config.search import build_search
from dray.errors import AlreadyEnded, ConfigError
from dray.experiment import requests
from dray.experiment.alerts import Alerts
from dray.experiment.limits import Limits
from dray.records.directory import ExperimentDirectory
from dray.records.reader import ExperimentReader
from dray.records.spending import FILE, Usage
from searchers import Exited, Journal, Reported, Requested, Started
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


def test_a_requested_trial_and_too_small_an_extension_do_not_make_an_ended_experiment_a_stopped_one(path: Path) -> None:
    requests.place(path, Requested(id="request", hparams={"lr": 0.05}))
    with pytest.raises(AlreadyEnded, match=r"2 of 1.5 h"):
        resume(path, budget={"time": "90m"})
    assert [each for each in events(path) if each in ("requested", "ended", "limits")][-2:] == ["requested", "ended"]
    with closing(ExperimentReader(ExperimentDirectory(path))) as reader:
        reader.refresh()
        assert (reader.overview().state, reader.overview().reason) == ("COMPLETED", "budget.time is spent")


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


SPACE = {"global_batch_size": 1, "lr": {"type": "double", "minval": 0, "maxval": 1}}
SEARCHER = {
    "name": "random",
    "metric": "acc",
    "smaller_is_better": False,
    "max_length": {"batches": 8},
    "max_trials": 9,
}
ALERTING = load_config(
    {"entrypoint": "m:T", "hyperparameters": SPACE, "searcher": SEARCHER, "budget": {"time": "100s"}}
)
WHERE = "KeyError at train.py:{} in load"


class Driver:
    """What a driver does with records, from the journal of earlier ones."""

    def __init__(self, watched: Watched, journal: list[Mapping[str, Any]]) -> None:
        self.journal = journal
        self.limits = Limits(ALERTING, journal)
        self.alerts = Alerts(watched, self.limits, journal)

    def happen(self, *records: Mapping[str, Any]) -> list[str]:
        """Write records and the alerts that are due, and return their texts."""
        for record in records:
            self.limits.record(record)
        due = self.alerts.due(records)
        self.journal += [*records, *due]
        return [each["text"] for each in due]

    def spend(self, seconds: float) -> list[str]:
        self.limits.spend(Usage(spent={"time": seconds}, per_s={"time": 1.0}))
        return self.happen()


def gave_up(trial: int, line: int) -> dict[str, Any]:
    where = WHERE.format(line)
    return {
        "event": "gave_up",
        "trial": trial,
        "error": "KeyError: 'x'\n\nTraceback (most recent call last):\n...",
        "where": where,
        "why": "twice",
    }


def ended(trial: int, value: float | None) -> list[dict[str, Any]]:
    reported = {"event": "reported", "trial": trial, "step": 8, "value": value, "actions": []}
    return [reported, {"event": "exited", "trial": trial, "reason": "completed", "actions": []}]


def test_a_trial_that_failed_for_good_is_told_with_the_line_and_each_line_once() -> None:
    driver = Driver(Watched(failed_trials=True), [])
    told = driver.happen(gave_up(3, 14), gave_up(4, 14))
    assert told == ["trial 3 failed for good: KeyError: 'x' (train.py:14 in load)"]
    assert driver.happen(gave_up(5, 14)) == []
    assert len(driver.happen(gave_up(5, 20))) == 1
    assert Driver(Watched(), []).happen(gave_up(3, 14)) == []


def test_no_gain_is_told_once_for_each_best_trial() -> None:
    driver = Driver(Watched(no_gain=(2, 3)), [])
    assert driver.happen(*ended(0, 0.5)) == []
    assert driver.happen(*ended(1, 0.4)) == []
    assert driver.happen(*ended(2, 0.3)) == ["no better acc in 2 trials; the best is 0.5 of trial 0"]
    assert driver.happen(*ended(3, 0.1)) == ["no better acc in 3 trials; the best is 0.5 of trial 0"]
    assert driver.happen(*ended(4, 0.2)) == []
    assert driver.happen(*ended(5, 0.9), *ended(6, 0.3)) == []
    assert driver.happen(*ended(7, 0.8)) == ["no better acc in 2 trials; the best is 0.9 of trial 5"]


def test_no_gain_is_told_if_no_trial_has_a_finite_metric() -> None:
    driver = Driver(Watched(no_gain=(2,)), [])
    assert driver.happen(*ended(0, None), *ended(1, None)) == ["no better acc in 2 trials; no trial has a finite one"]


def test_a_budget_that_is_nearly_spent_is_told_once_and_again_after_it_was_raised() -> None:
    driver = Driver(Watched(budget=(0.5, 0.9)), [])
    assert driver.spend(49) == []
    assert driver.spend(50) == ["50% of the budget is spent: 50 s of 1.66667 min"]
    assert driver.spend(60) == []
    assert len(driver.spend(95)) == 1
    assert driver.spend(100) == [], "its end is told"
    driver.limits.totals = {"time": 105.0}
    assert len(driver.spend(104)) == 2


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("failed"), st.integers(0, 3)),
        st.tuples(st.just("ended"), st.integers(0, 9)),
        st.tuples(st.just("spent"), st.integers(0, 99)),
        st.tuples(st.just("sent"), st.integers(0, 9)),
        st.tuples(st.just("killed"), st.just(0)),
    ),
    max_size=40,
)


@given(STEPS)
def test_another_driver_raises_the_same_alerts_as_one_that_was_never_killed(steps: list[tuple[str, int]]) -> None:
    watched = Watched(failed_trials=True, no_gain=(1, 3), budget=(0.9,))
    journals: list[list[Mapping[str, Any]]] = [[], []]
    for journal, may_die in zip(journals, (True, False), strict=True):
        driver, spent, sent = Driver(watched, journal), 0.0, set[int]()
        for trial, (step, number) in enumerate(steps):
            if step == "failed":
                driver.happen(gave_up(trial, number))
            elif step == "ended":
                driver.happen(*ended(trial, number / 10))
            elif step == "spent":
                spent = max(spent, number)
                driver.spend(spent)
            elif step == "sent" and number in driver.alerts.pending:
                driver.happen({"event": "told", "id": number})
                sent.add(number)
            elif step == "killed" and may_die:
                driver = Driver(watched, journal)
                driver.spend(spent)
        alerts = [each for each in journal if each["event"] == "alert"]
        assert [each["id"] for each in alerts] == [*range(len(alerts))]
        assert driver.alerts.pending.keys() == {*range(len(alerts))} - sent, "what another driver would send"
    assert journals[0] == journals[1]


@pytest.mark.parametrize(
    ("notify", "wants", "not_wanted"),
    [
        ({"states": ["failed"]}, [("failed", None), ("trial_failed", None), ("budget", 0.9)], [("completed", None)]),
        ({"failed_trials": False, "no_gain": 3}, [("no_gain", 3)], [("trial_failed", None), ("no_gain", 2)]),
        ({"budget": 0.5}, [("budget", 0.5)], [("budget", 0.9), ("no_gain", 1)]),
    ],
)
def test_a_receiver_gets_what_it_wants(notify: Any, wants: list[Any], not_wanted: list[Any]) -> None:
    found = Notify(url="https://hooks", **notify)
    assert all(found.wants(*each) for each in wants)
    assert not any(found.wants(*each) for each in not_wanted)
    assert not any(Notify(**notify).wants(*each) for each in wants), "nobody would get it"


@pytest.mark.parametrize(
    ("given_", "says"),
    [
        ({"budget": 1.5}, "notify.budget: must be <= 0.99"),
        ({"no_gain": 0}, "notify.no_gain: must be >= 1"),
        ({"idle": "5m"}, "notify.idle: unknown field"),
        ({"url": ["https://hooks.example/s3cr3t-t0k3n"]}, "notify.url: must be a string, got a list"),
    ],
)
def test_faults_of_the_section_are_named_without_the_url(given_: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config({"entrypoint": "m:T", "hyperparameters": SPACE, "searcher": SEARCHER, "notify": given_})
    assert says in str(refused.value)
    assert "t0k3n" not in str(refused.value)
