"""What people are told about an experiment while it runs; with any journal, and any driver that dies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dray.config.load import load_config
from dray.config.notify import Notify, Watched
from dray.errors import ConfigError
from dray.experiment.alerts import Alerts
from dray.experiment.limits import Limits
from dray.records.spending import Usage

SPACE = {"global_batch_size": 1, "lr": {"type": "double", "minval": 0, "maxval": 1}}
SEARCHER = {
    "name": "random",
    "metric": "acc",
    "smaller_is_better": False,
    "max_length": {"batches": 8},
    "max_trials": 9,
}
CONFIG = load_config({"entrypoint": "m:T", "hyperparameters": SPACE, "searcher": SEARCHER, "budget": {"time": "100s"}})
WHERE = "KeyError at train.py:{} in load"


class Driver:
    """What a driver does with records, from the journal of earlier ones."""

    def __init__(self, watched: Watched, journal: list[Mapping[str, Any]]) -> None:
        self.journal = journal
        self.limits = Limits(CONFIG, journal)
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
    assert driver.spend(50) == ["50% of the budget is spent: 0.833 of 1.66667 min"]
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
