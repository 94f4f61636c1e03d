"""A search whose trials are sharded over two ranks: they pause at rungs, and go on from their shards."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import dray
from dray import pytorch
from dray.storage.manifest import MANIFEST, parse_manifest
from tests.ray.harness import (
    TRIALS,
    attempts,
    check_promotions,
    latest_checkpoint,
    promotion,
    recorded,
    run_here,
    weights,
)

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.usefixtures("ray_is_up")]

TRIAL_COUNT, BATCHES = 6, 40
RUNGS = (10, 20, 40)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    record: Path
    result: dray.Result


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Sweep:
    directory = tmp_path_factory.mktemp("sharded")
    config = recorded(
        directory / "record",
        trials=TRIAL_COUNT,
        batches=BATCHES,
        entrypoint="sharded:Sharded",
        searcher=promotion(TRIAL_COUNT, BATCHES, max_concurrent_trials=1),
        resources={"slots_per_trial": 2, "slot": "cpu"},
    )
    experiment = dray.Experiment(config, model_dir=TRIALS, path=directory / "experiment")
    found = Sweep(record=directory / "record", result=experiment.run())
    assert experiment.last_run.driver.counts.groups_started == 1
    return found


def test_trials_pause_with_their_shards_and_go_on_in_the_warm_group(sweep: Sweep) -> None:
    found = attempts(sweep.record)
    lengths = sweep.result.trials.set_index("trial_id")["batches"]
    assert set(lengths) == set(RUNGS)
    assert check_promotions(sweep.result.path, divisor=2, top=BATCHES) > 0
    assert len({attempt.pid for mine in found.values() for attempt in mine}) == 1
    went_on = [trial for trial, mine in found.items() if len([each for each in mine if each.batches]) > 1]
    assert went_on, "a trial left its workers and came back"
    for trial, mine in found.items():
        assert [batch for attempt in mine for batch in attempt.batches] == list(range(lengths[trial]))
        checkpoint = latest_checkpoint(sweep.result.path / f"trial_{trial}")
        assert checkpoint is not None
        files = parse_manifest((checkpoint / MANIFEST).read_bytes(), checkpoint)
        shards = {name for name in files if name.startswith("sharded/")}
        assert shards == {f"sharded/rank_{rank}.safetensors" for rank in (0, 1)}


def test_its_checkpoints_are_whole_and_load_into_one_process(sweep: Sweep) -> None:
    result = sweep.result
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
