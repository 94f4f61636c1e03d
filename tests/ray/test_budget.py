"""An experiment with a budget of time whose driver is killed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import dray
from dray.records.spending import FILE
from tests.ray.harness import (
    OWN_CLUSTER,
    TRIALS,
    Driver,
    in_the_middle,
    journal,
    recorded,
    run_here,
    saved_batches,
    write_config,
)

pytestmark = [pytest.mark.ray, pytest.mark.slow]

MORE_S = 7.0
LATE_S = 5.0  # a quarter of a second, unless the machine has other work


def timeline(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / "metrics" / FILE).read_text().splitlines()]


def ran_s(path: Path) -> float:
    """The time from the beginning to the last sign of life of each run."""
    events = timeline(path)
    starts = [number for number, event in enumerate(events) if event["event"] == "opened"]
    ends = [*starts[1:], len(events)]
    return sum(events[end - 1]["time"] - events[start]["time"] for start, end in zip(starts, ends, strict=True))


@pytest.mark.long
def test_a_killed_driver_goes_on_and_ends_within_its_budget(drive: Callable[..., Driver], tmp_path: Path) -> None:
    record, path = tmp_path / "record", tmp_path / "experiment"
    config = recorded(record, trials=1, batches=5000, pause_s=0.02, budget={"time": "1h"})
    config["searcher"].pop("max_trials")
    config["searcher"]["max_concurrent_trials"] = 1
    driver = drive("create", write_config(tmp_path, config), TRIALS, "--path", path, **OWN_CLUSTER)
    driver.wait_for(lambda: in_the_middle(path, record), "a trial past its first checkpoint")
    driver.kill()
    budget_s = round(ran_s(path) + MORE_S, 3)
    driver = drive("extend", path, "--budget", f"time={budget_s}s", **OWN_CLUSTER)
    assert driver.wait() == 0, driver.log.read_text()

    seen = dray.Result(path).overview
    assert (seen.state, seen.trials, seen.ended) == ("COMPLETED", 1, 0)
    assert seen.reason.startswith("budget.")
    assert seen.budget is not None
    assert seen.budget["time"] == {"spent": pytest.approx(ran_s(path), abs=0.1), "total": budget_s}
    [ended] = [each for each in journal(path) if each["event"] == "ended"]
    closed = timeline(path)[-1]
    assert closed["event"] == "closed"
    # What follows the decision is the end of the processes.
    at_decision = seen.budget["time"]["spent"] - (closed["time"] - ended["time"])
    assert budget_s <= at_decision < budget_s + LATE_S
    assert saved_batches(path, 0) > 0
    refused = run_here("resume", path)
    assert (refused.code, "--budget time=" in refused.err) == (1, True)
