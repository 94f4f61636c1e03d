"""A search whose trials are sharded over two ranks: they pause at rungs, and the driver is killed in the middle."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

import dray
from dray import pytorch
from dray.storage.manifest import MANIFEST, parse_manifest
from tests.ray.harness import (
    TRIALS,
    Driver,
    attempts,
    check_promotions,
    decided,
    ends,
    in_the_middle,
    journal,
    latest_checkpoint,
    lines,
    promotion,
    recorded,
    run_here,
    wait_for,
    weights,
    write_config,
)

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.usefixtures("ray_is_up")]

TRIAL_COUNT, BATCHES = 6, 40
RUNGS = (10, 20, 40)
HELD_AT = 23
"""Where the first trial that is promoted to the last rung waits for the driver's death: past its checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    record: Path
    result: dray.Result

    @property
    def losses(self) -> set[tuple[int, int, float]]:
        """(trial, batch, a rank's loss): the same batch is there once for each value that it had."""
        return {(line["trial"], line["batch"], line["loss"]) for line in lines(self.record) if "batch" in line}

    @property
    def metrics(self) -> pd.DataFrame:
        """All that was reported, but for the times."""
        rows = self.result.metrics.drop(columns="time")
        return rows.sort_values([*rows.columns], ignore_index=True)

    @property
    def shards(self) -> dict[int, dict[str, str]]:
        """The SHA-256 of each rank's file (weights and optimizer state) in each trial's latest checkpoint."""
        found = {}
        for trial in self.result.trials["trial_id"]:
            checkpoint = latest_checkpoint(self.result.path / f"trial_{trial}")
            assert checkpoint is not None
            files = parse_manifest((checkpoint / MANIFEST).read_bytes(), checkpoint).items()
            found[int(trial)] = {name: each.sha256 for name, each in files if name.startswith("sharded/")}
        return found


def config(directory: Path, until: Path) -> dict[str, Any]:
    found = recorded(
        directory / "record",
        trials=TRIAL_COUNT,
        batches=BATCHES,
        entrypoint="sharded:Sharded",
        searcher=promotion(TRIAL_COUNT, BATCHES, max_concurrent_trials=1),
        resources={"slots_per_trial": 2, "slot": "cpu"},
    )
    found["hyperparameters"] |= {"held_at": HELD_AT, "until": str(until)}
    return found


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Sweep:
    directory = tmp_path_factory.mktemp("undisturbed")
    path = directory / "experiment"
    experiment = dray.Experiment(config(directory, until=directory), model_dir=TRIALS, path=path)
    sweep = Sweep(record=directory / "record", result=experiment.run())
    assert experiment.last_run.driver.counts.groups_started == 1
    return sweep


@pytest.fixture(scope="module")
def resumed(
    shared_cluster: str, drive: Callable[..., Driver], tmp_path_factory: pytest.TempPathFactory, undisturbed: Sweep
) -> Sweep:
    directory = tmp_path_factory.mktemp("resumed")
    path, record, until = (directory / name for name in ("experiment", "record", "until"))
    driver = drive(
        "create",
        write_config(directory, config(directory, until)),
        TRIALS,
        "--path",
        path,
        RAY_ADDRESS=shared_cluster,
    )
    driver.wait_for(lambda: any(line.get("batch") == HELD_AT - 1 for line in lines(record)), "a trial in the middle")
    before = journal(path)
    assert decided(path, "pause"), "others are paused"
    driver.process.kill()
    driver.process.wait()
    wait_for(lambda: not in_the_middle(path, record), "the end of the workers, which Ray kills")
    until.touch()
    result = dray.Experiment.resume(path).run()
    assert journal(path)[: len(before)] == before, "nothing that was acknowledged is lost"
    return Sweep(record=record, result=result)


def test_trials_pause_with_their_shards_and_go_on_in_the_warm_group(undisturbed: Sweep) -> None:
    found = attempts(undisturbed.record)
    lengths = undisturbed.result.trials.set_index("trial_id")["batches"]
    assert set(lengths) == set(RUNGS)
    assert len({attempt.pid for mine in found.values() for attempt in mine}) == 1
    went_on = [trial for trial, mine in found.items() if len([each for each in mine if each.batches]) > 1]
    assert went_on, "a trial left its workers and came back"
    for trial, mine in found.items():
        assert [batch for attempt in mine for batch in attempt.batches] == list(range(lengths[trial]))
    files = {f"sharded/rank_{rank}.safetensors" for rank in (0, 1)}
    assert all(set(saved) == files for saved in undisturbed.shards.values())


@pytest.mark.long
def test_killed_and_resumed_it_ends_as_if_nothing_had_happened(undisturbed: Sweep, resumed: Sweep) -> None:
    path = resumed.result.path
    columns = ["trial_id", "state", "hparams.lr", "batches", "metric", "best_metric", "restarts"]
    assert resumed.result.trials[columns].equals(undisturbed.result.trials[columns])
    assert ends(path) == dict.fromkeys(range(TRIAL_COUNT), 1)
    promotions = [check_promotions(each.result.path, divisor=2, top=BATCHES) for each in (resumed, undisturbed)]
    assert promotions[0] == promotions[1] > 0
    pd.testing.assert_frame_equal(resumed.metrics, undisturbed.metrics, check_exact=True)
    assert resumed.losses == undisturbed.losses
    assert resumed.shards == undisturbed.shards


@pytest.mark.long
def test_only_what_came_after_the_last_checkpoint_is_trained_again(resumed: Sweep) -> None:
    lengths = resumed.result.trials.set_index("trial_id")["batches"]
    cut = 0
    for trial, mine in attempts(resumed.record).items():
        trained = [batch for attempt in mine for batch in attempt.batches]
        again = list(range(20, HELD_AT)) if trained.count(20) == 2 else []
        assert sorted(trained) == sorted([*range(lengths[trial]), *again])
        cut += bool(again)
    assert cut == 1


@pytest.mark.long
def test_its_checkpoints_are_whole_and_load_into_one_process(resumed: Sweep) -> None:
    result = resumed.result
    said = run_here("verify", result.path, group="checkpoint")
    assert said.code == 0, said.err
    assert said.out.endswith(" checkpoints verified, 0 damaged\n")
    best = result.best_trial
    checkpoint = result.path / f"trial_{best.trial_id}" / f"checkpoint_{best.best_batches}"
    expected = weights(checkpoint)
    trials: list[Any] = [result.load_best_trial(), pytorch.load_trial_from_checkpoint_path(str(checkpoint))]
    for trial in trials:
        state = trial.model.state_dict()
        assert state.keys() == expected.keys()
        assert all(torch.equal(state[name], value) for name, value in expected.items())
        trial.model.eval()
        points, sums = trial.build_validation_data_loader().dataset.tensors
        with torch.no_grad():
            assert trial.error((points, sums)).item() == pytest.approx(best.metric)
