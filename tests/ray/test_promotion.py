"""ASHA that promotes: trials pause, free their groups, and go on from their checkpoints, with nothing trained twice."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

import dray
from dray.errors import ConfigError
from tests.ray.harness import (
    TRIALS,
    attempts,
    check_promotions,
    decided,
    ends,
    journal,
    lines,
    promotion,
    recorded,
    run_here,
)

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.usefixtures("ray_is_up")]

TRIAL_COUNT, BATCHES = 12, 40
RUNGS = (10, 20, 40)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    record: Path
    result: dray.Result
    groups: int  # how many worker groups were started


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Sweep:
    directory = tmp_path_factory.mktemp("promotion")
    record = directory / "record"
    searcher = promotion(TRIAL_COUNT, BATCHES)
    config = recorded(record, trials=TRIAL_COUNT, batches=BATCHES, pause_s=0.005, searcher=searcher)
    experiment = dray.Experiment(config, model_dir=TRIALS, path=directory / "experiment")
    result = experiment.run()
    counts = experiment.last_run.driver.counts
    assert counts.groups_lost == 0
    return Sweep(record=record, result=result, groups=counts.groups_started)


def test_all_trials_are_accounted_for_and_each_ended_once(sweep: Sweep) -> None:
    assert sweep.result.trials["trial_id"].tolist() == list(range(TRIAL_COUNT))
    assert ends(sweep.result.path) == dict.fromkeys(range(TRIAL_COUNT), 1)
    assert set(sweep.result.trials["state"]) == {"COMPLETED", "PRUNED"}
    assert set(sweep.result.trials["batches"]) == set(RUNGS)
    assert sweep.result.trials["restarts"].eq(0).all()


def test_every_batch_of_every_trial_is_trained_exactly_once(sweep: Sweep) -> None:
    lengths = sweep.result.trials.set_index("trial_id")["batches"]
    for trial, mine in attempts(sweep.record).items():
        assert [batch for attempt in mine for batch in attempt.batches] == list(range(lengths[trial]))


def test_trials_pause_at_rungs_and_go_on_from_there(sweep: Sweep) -> None:
    parts = {trial: [attempt for attempt in mine if attempt.batches] for trial, mine in attempts(sweep.record).items()}
    resumed = {trial: mine for trial, mine in parts.items() if len(mine) > 1}
    assert resumed, "some trial left its workers and came back"
    for trial, mine in resumed.items():
        assert {attempt.batches[0] for attempt in mine[1:]} <= set(RUNGS)
        assert len(mine) == 1 + decided(sweep.result.path, "resume").count(trial)
    # While a trial is paused, its group trains others.
    order = [line["trial"] for line in lines(sweep.record) if "batch" in line]
    assert any(len(set(order[order.index(t) : len(order) - order[::-1].index(t)])) > 1 for t in resumed)


def test_paused_trials_come_back_to_the_groups_that_are_there(sweep: Sweep) -> None:
    processes = {attempt.pid for mine in attempts(sweep.record).values() for attempt in mine}
    assert len(processes) <= sweep.groups


def test_promotions_are_the_papers_rule(sweep: Sweep) -> None:
    promotions = check_promotions(sweep.result.path, divisor=2, top=BATCHES)
    longer = sum(RUNGS.index(batches) for batches in sweep.result.trials["batches"])
    assert promotions == longer
    assert promotions >= TRIAL_COUNT // 2


def test_each_validation_is_there_once(sweep: Sweep) -> None:
    errors = sweep.result.metrics.query("kind == 'validation' and name == 'error'")
    lengths = sweep.result.trials.set_index("trial_id")["batches"]
    for trial, mine in errors.groupby("trial_id"):
        assert mine["batches"].tolist() == list(range(10, lengths[trial] + 1, 10))


# ------------------------------------------------------------------------------------------- the death of the driver


# --------------------------------------------------------------------------------------------------------- extension


def test_finished_search_is_extended_from_the_command_line_and_goes_on_from_its_checkpoints(sweep: Sweep) -> None:
    path = sweep.result.path
    before, noted = journal(path), {trial: len(mine) for trial, mine in attempts(sweep.record).items()}
    old = sweep.result.trials.set_index("trial_id")["batches"]
    with pytest.raises(ConfigError, match=re.escape("searcher.max_trials")):
        dray.Experiment.resume(path, max_trials=TRIAL_COUNT - 1).run()
    said = run_here("extend", path, "--max-trials", TRIAL_COUNT + 2, "--max-length", 2 * BATCHES)
    assert said.code == 0, said.err

    result = dray.Result(path)
    states = [record for record in journal(path) if record["event"] not in ("opened",)]
    assert states[: len(before) - 1] == [record for record in before if record["event"] != "opened"]
    trials = result.trials.set_index("trial_id")
    assert trials.index.tolist() == list(range(TRIAL_COUNT + 2))
    assert set(trials["batches"]) <= {*RUNGS, 2 * BATCHES}
    revived = [trial for trial in old.index if trials["batches"][trial] > old[trial]]
    assert revived, "the best go on"
    assert (trials["batches"] == 2 * BATCHES).any()
    for trial, mine in attempts(sweep.record).items():
        assert [batch for attempt in mine for batch in attempt.batches] == list(range(trials["batches"][trial]))
        after = [attempt.batches[0] for attempt in mine[noted.get(trial, 0) :] if attempt.batches]
        assert after[:1] == ([old.get(trial, 0)] if trials["batches"][trial] > old.get(trial, 0) else [])
    # The same again has nothing left to do, and says so by ending well.
    assert dray.Experiment.resume(path, max_trials=TRIAL_COUNT + 2, max_length=2 * BATCHES).run().path == path
