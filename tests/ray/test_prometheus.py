"""What Ray's metrics endpoint says of experiments agrees with what happened in them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

import dray
from dray.desk.messages import Message, ReportReceived
from dray.experiment.prometheus import METRICS
from tests.ray.harness import TRIALS, Meanwhile, recorded, wait_for
from tests.ray.scraping import Sample, scraped, values

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.usefixtures("ray_is_up")]

ALONE, FAULTY = "alone", "faulty"
ONE_SLOT = {"slot": "cpu", "max_slots": 1}
STATES = {
    ALONE: {"COMPLETED": 1},
    FAULTY: {"COMPLETED": 3, "ERRORED": 1, "INVALID_HP": 1},  # see `recorded.Faulty`; trial 2 is replaced
}


@dataclass(frozen=True, kw_only=True)
class Found:
    """What two experiments of one process have exported.

    Attributes:
        during: scraped while the only trial of the first one trained.
        after: scraped after the second one's end.
        reports: how many reports the first one's driver has received.
    """

    during: list[Sample]
    after: list[Sample]
    reports: int


@pytest.fixture(scope="module")
def found(ray_is_up: None, tmp_path_factory: pytest.TempPathFactory) -> Found:
    directory = tmp_path_factory.mktemp("prometheus")
    during: list[Sample] = []
    messages: list[Message] = []

    def run(name: str, trial: str, hparams: dict[str, Any] | None = None, **fields: Any) -> None:
        config = recorded(directory / f"{name}.record", resources=ONE_SLOT, **fields)
        config["hyperparameters"] |= hparams or {}
        experiment = dray.Experiment(
            config | {"entrypoint": f"recorded:{trial}"}, model_dir=TRIALS, path=directory / name
        )
        experiment.run(on_message=messages.append if name == ALONE else None)

    def look() -> None:
        def busy() -> list[Sample] | None:
            now = scraped()
            return now if values(now, "dray_slots_busy", ALONE) else None

        during.extend(wait_for(busy, "a busy slot at the endpoint") or [])
        until.touch()

    until = directory / "until"
    asha = {
        "name": "asha",
        "metric": "error",
        "max_length": {"batches": 40},
        "max_trials": 1,
        "num_rungs": 3,
        "divisor": 2,
    }
    with Meanwhile(look):
        held = {"until": str(until), "longer": str(until)}
        run(ALONE, "Held", held, trials=1, batches=40, searcher=asha)
    run(FAULTY, "Faulty", trials=4, batches=20)
    reports = sum(isinstance(message, ReportReceived) for message in messages)

    def ended() -> list[Sample] | None:
        now = scraped()
        return now if values(now, "dray_trials", FAULTY) == STATES[FAULTY] else None

    after = wait_for(ended, "the second experiment's end at the endpoint")
    assert after is not None
    return Found(during=during, after=after, reports=reports)


def test_trials_are_counted_by_state(found: Found) -> None:
    assert values(found.during, "dray_trials", ALONE) == {"RUNNING": 1}
    assert values(found.after, "dray_trials", FAULTY) == STATES[FAULTY]


def test_a_slot_is_busy_while_its_trial_runs(found: Found) -> None:
    assert values(found.during, "dray_slots_busy", ALONE) == {"": 1}
    assert values(found.after, "dray_slots_busy", FAULTY) == {}


def test_decisions_are_counted_by_kind(found: Found) -> None:
    # The only trial of ASHA goes on at two rungs, and ends at the third. Others have one rung: their end, or a failure.
    assert values(found.after, "dray_decisions_total", ALONE) == {"continue": 2, "stop": 1}
    assert values(found.after, "dray_decisions_total", FAULTY) == {"stop": 5}


def test_only_restarts_of_failed_trials_count(found: Found) -> None:
    assert values(found.after, "dray_restarts_total", ALONE) == {}
    assert values(found.after, "dray_restarts_total", FAULTY) == {"": 1}


def test_each_report_counts_once(found: Found) -> None:
    assert found.reports >= 4
    assert values(found.after, "dray_reports_total", ALONE) == {"": found.reports}


def test_each_checkpoint_is_timed_once(found: Found) -> None:
    # Every ten batches, and of the first one nothing was saved twice; trial 1 of the second fails before its first.
    assert values(found.after, "dray_checkpoint_seconds_count", ALONE) == {"": 4}
    assert values(found.after, "dray_checkpoint_seconds_count", FAULTY) == {"": 6}
    [infinite] = [
        each.value
        for each in found.after
        if each.name == "dray_checkpoint_seconds_bucket" and each.labels["experiment"] == ALONE
        if each.labels["le"] == "+Inf"
    ]
    assert infinite == 4
    assert 0 < values(found.after, "dray_checkpoint_seconds_sum", ALONE)[""] < 60


def test_all_metrics_are_there_with_their_labels(found: Found) -> None:
    by_name = {each.name.removesuffix("_count"): each.labels for each in found.after}
    for name, metric in METRICS.items():
        assert {"experiment", *metric.labels} <= by_name[name].keys()
