"""What Ray's metrics endpoint says of experiments agrees with what happened in them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dray.experiment.prometheus import METRICS
from tests.forks.process import run_script
from tests.ray import exporting
from tests.ray.exporting import ALONE, FAULTY, STATES, Found
from tests.ray.harness import ROOT
from tests.ray.scraping import values

pytestmark = [pytest.mark.ray, pytest.mark.slow]


@pytest.fixture(scope="module")
def found(shared_cluster: str, tmp_path_factory: pytest.TempPathFactory) -> Found:
    """In a process of its own: Ray 2.60 counts once more for each earlier connection of a process to the cluster."""
    directory = tmp_path_factory.mktemp("prometheus")
    run_script(
        Path(exporting.__file__), str(directory), directory=directory, RAY_ADDRESS=shared_cluster, PYTHONPATH=str(ROOT)
    )
    return Found.read(json.loads((directory / exporting.FOUND).read_text()))


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
