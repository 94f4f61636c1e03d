"""Programs as trials: the example from the command line, then what one rank of two does alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import dray
from tests.ray.harness import DIGITS, TRIALS, ends, journal, lines, printed, recorded, run_here

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.usefixtures("ray_is_up")]

EPOCH = 23  # batches of 64 in 1,437 images


# --------------------------------------------------------------------------------------------------------- the example
@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> dray.Result:
    path = tmp_path_factory.mktemp("example") / "script"
    assert run_here("create", DIGITS / "script.yaml", DIGITS, "--path", path).code == 0
    return dray.Result(path)


@pytest.mark.long
@pytest.mark.api("8.3b", "8.16")
def test_trials_are_as_long_as_fit_says_and_validate_when_it_says(example: dray.Result) -> None:
    assert example.trials["state"].tolist() == ["COMPLETED"] * 3
    assert example.trials["batches"].tolist() == [4 * EPOCH] * 3
    losses = example.metrics.query("name == 'validation_loss'")
    assert losses.groupby("trial_id")["batches"].agg(list).tolist() == [[EPOCH * n for n in (1, 2, 3, 4)]] * 3


@pytest.mark.long
@pytest.mark.api("8.15")
def test_what_a_program_prints_is_in_its_trials_log(
    example: dray.Result,
) -> None:
    rows = example.trials.set_index("trial_id")
    for trial in range(3):
        hparams = {
            "global_batch_size": 64,
            "hidden": int(rows["hparams.hidden"][trial]),
            "lr": float(rows["hparams.lr"][trial]),
        }
        lines = [line for line in printed(example.path, trial) if "dray.worker.host" not in line]
        assert lines == [f"training with {hparams}"]


@pytest.mark.long
def test_best_trial_is_of_the_class_that_its_checkpoint_names(example: dray.Result) -> None:
    trial: Any = example.load_best_trial()
    saved = torch.load(f"{example.best_trial.checkpoint.path}/state-dict.pth", weights_only=True)
    assert type(trial).__name__ == "DigitsTrial"
    assert torch.equal(trial.model[0].weight, saved["models_state_dict"][0]["0.weight"])


# ------------------------------------------------------------------------------------- what one rank of two does alone
@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> dray.Result:
    directory = tmp_path_factory.mktemp("faults")
    config = recorded(
        directory / "record",
        trials=4,
        batches=12,
        entrypoint="python3 -m determined.launch.torch_distributed python3 program.py",
        searcher={"name": "random", "metric": "error", "max_trials": 4, "max_concurrent_trials": 1},
        resources={"slot": "cpu", "slots_per_trial": 2},
        max_restarts=1,
    )
    return dray.Experiment(config, model_dir=TRIALS, path=directory / "experiment").run()


def noted(result: dray.Result, trial: int, what: str) -> list[Any]:
    mine = [line for line in lines(result.path.parent / "record") if line["trial"] == trial]
    return [line[what] for line in mine if what in line]


@pytest.mark.api("2.12", "3.5", "8.1", "8.11", "8.12", "8.13")
def test_what_one_rank_does_alone_ends_the_trial_as_documented(faults: dray.Result) -> None:
    for trial in (0, 1):
        for rank in (0, 1):
            assert printed(faults.path, trial, rank) == [f"rank {rank} of 2 on slots [0, 1]"]
    trials = faults.trials.set_index("trial_id")
    # Completed; stopped by itself at the next validation; left before its sixth batch; replaced; begun again.
    assert trials["state"].tolist() == ["COMPLETED", "COMPLETED", "COMPLETED", "INVALID_HP", "COMPLETED"]
    assert trials["batches"].tolist()[:3] == [12, 8, 5]
    assert trials["restarts"].tolist() == [0, 0, 0, 0, 1]
    assert ends(faults.path) == dict.fromkeys(range(5), 1)


@pytest.mark.api("8.13")
def test_error_of_one_rank_is_told_by_that_rank_within_thirty_seconds(faults: dray.Result) -> None:
    """Although the other one is busy for ten minutes, without ``hang_timeout_s``."""
    [restart] = [each for each in journal(faults.path) if each["event"] == "restarted"]
    assert restart["trial"] == 4
    assert restart["error"].splitlines()[-1] == "KeyError: 'gone'"
    assert 'program.py", line' in restart["error"]
    assert set(noted(faults, 4, "batch")) == set(range(12)), "it goes on from its checkpoint"
    assert restart["time"] < noted(faults, 4, "failed")[0] + 30
