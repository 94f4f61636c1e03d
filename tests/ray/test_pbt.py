"""Population-based training on a real Ray: trials begin from others' weights, and a killed driver changes nothing."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import dray
from dray.cli import main
from tests.ray.harness import TRIALS, Driver, attempts, journal, latest_checkpoint, recorded, weights, write_config

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.long, pytest.mark.usefixtures("ray_is_up")]

INTERVAL, LENGTH = 10, 40
SEARCH = ("reported", "exited", "started")


def population(record: Path) -> dict[str, Any]:
    """One trial runs at a time, so that the order of the reports does not depend on timing."""
    searcher = {"name": "pbt", "metric": "error", "max_length": {"batches": LENGTH}, "quantile": 0.34}
    searcher |= {"population": 3, "interval": {"batches": INTERVAL}}
    config = recorded(record, trials=1, batches=LENGTH, pause_s=0.02, searcher=searcher)
    config["resources"]["max_slots"] = 1
    return config


def decisions(path: Path) -> list[dict[str, Any]]:
    """The search's events with their decisions, by trial, without the starts that a restart repeats.

    A trial may start before the last report of one that completes, if its workers are free sooner.
    """
    kept = ("event", "trial", "step", "value", "batches", "reason", "hparams", "actions")
    found = [{name: record.get(name) for name in kept} for record in journal(path) if record["event"] in SEARCH]
    for record in found:
        record["hparams"] = (record["hparams"] or {}).get("lr")
    kept_once = [each for place, each in enumerate(found) if each["event"] != "started" or each not in found[:place]]
    return sorted(kept_once, key=lambda record: -1 if record["trial"] is None else record["trial"])


def test_a_killed_driver_changes_no_decision_and_no_weight(tmp_path: Path, drive: Callable[..., Driver]) -> None:
    sound = tmp_path / "sound"
    result = dray.Experiment(population(tmp_path / "record"), path=sound, model_dir=TRIALS).run()
    table = result.trials
    forks = table[table["source_trial"].notna()]
    assert len(forks) > 0
    assert (table["state"] == "COMPLETED").sum() == 3
    for _, fork in forks.iterrows():  # it has trained on from where its source was
        mine = [batch for attempt in attempts(tmp_path / "record")[fork["trial_id"]] for batch in attempt.batches]
        assert mine == list(range(fork["source_batches"], fork["batches"]))

    killed = tmp_path / "killed"
    config = write_config(tmp_path, population(tmp_path / "record_of_killed"))
    driver = drive("create", config, TRIALS, "--path", killed)
    driver.wait_for(lambda: (killed / "journal.jsonl").exists() and _forks(killed), "a fork")
    os.kill(driver.process.pid, signal.SIGKILL)
    driver.process.wait()
    with pytest.raises(SystemExit) as ended:
        main(["experiment", "resume", str(killed)])
    assert not ended.value.code
    assert decisions(killed) == decisions(sound)
    for trial in table["trial_id"]:
        one, other = (latest_checkpoint(path / f"trial_{trial}") for path in (sound, killed))
        assert one is not None
        assert other is not None
        before, after = weights(one), weights(other)
        assert all((before[name] == after[name]).all() for name in before)


def _forks(path: Path) -> bool:
    return any(action.get("source") for record in journal(path) for action in record.get("actions", ()))
