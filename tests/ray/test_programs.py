"""Programs as trials: the example from the command line, then what they may and must not do."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import dray
from dray.errors import ConfigError
from tests.ray.harness import DIGITS, TRIALS, ends, journal, lines, printed, recorded, run_here

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.usefixtures("ray_is_up")]

EPOCH = 23  # batches of 64 in 1,437 images


# --------------------------------------------------------------------------------------------------------- the example
@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> dray.Result:
    path = tmp_path_factory.mktemp("example") / "script"
    assert run_here("create", DIGITS / "script.yaml", DIGITS, "--path", path).code == 0
    return dray.Result(path)


@pytest.mark.api("8.3b", "8.16")
def test_trials_are_as_long_as_fit_says_and_validate_when_it_says(example: dray.Result) -> None:
    assert example.trials["state"].tolist() == ["COMPLETED"] * 3
    assert example.trials["batches"].tolist() == [4 * EPOCH] * 3
    losses = example.metrics.query("name == 'validation_loss'")
    assert losses.groupby("trial_id")["batches"].agg(list).tolist() == [[EPOCH * n for n in (1, 2, 3, 4)]] * 3


@pytest.mark.api("8.15")
def test_what_a_program_prints_is_in_its_trials_log_with_the_hyperparameters_of_the_search(
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


def test_best_trial_is_of_the_class_that_its_checkpoint_names(example: dray.Result) -> None:
    trial: Any = example.load_best_trial()
    saved = torch.load(f"{example.best_trial.checkpoint.path}/state-dict.pth", weights_only=True)
    assert type(trial).__name__ == "DigitsTrial"
    assert torch.equal(trial.model[0].weight, saved["models_state_dict"][0]["0.weight"])


def test_finished_search_has_nothing_left_to_do(example: dray.Result) -> None:
    before = journal(example.path)
    dray.Experiment.resume(example.path).run()
    assert [record["event"] for record in journal(example.path)[len(before) :]] == ["opened"]


# ------------------------------------------------------------------------------------------------------ other programs
def program(what: str, directory: Path, *, trials: int, slots: int = 1, hook: str = "", **fields: Any) -> Any:
    model = directory / "model"
    shutil.copytree(TRIALS, model, ignore=shutil.ignore_patterns("__pycache__"))
    if hook:
        (model / "startup-hook.sh").write_text(hook)
    config = recorded(
        directory / "record",
        trials=trials,
        batches=12,
        entrypoint=f"python3 -m determined.launch.torch_distributed python3 program.py {what}",
        searcher={"name": "random", "metric": "error", "max_trials": trials, "max_concurrent_trials": 1},
        resources={"slot": "cpu", "slots_per_trial": slots},
        **fields,
    )
    return dray.Experiment(config, model_dir=model, path=directory / "experiment")


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> dray.Result:
    result: dray.Result = program("faults", tmp_path_factory.mktemp("faults"), trials=5, slots=2, max_restarts=1).run()
    return result


def batches(result: dray.Result, trial: int) -> set[int]:
    return {
        line["batch"] for line in lines(result.path.parent / "record") if line["trial"] == trial and "batch" in line
    }


@pytest.mark.api("3.5", "8.1")
def test_program_finds_its_peers_by_itself_and_from_the_environment(faults: dray.Result) -> None:
    for trial in (0, 1):
        for rank in (0, 1):
            assert printed(faults.path, trial, rank) == [f"rank {rank} of 2 on slots [0, 1]"]
    assert batches(faults, 0) == set(range(12))


@pytest.mark.api("2.12", "8.11", "8.12", "8.13")
def test_what_one_rank_does_alone_ends_the_trial_as_documented(faults: dray.Result) -> None:
    trials = faults.trials.set_index("trial_id")
    # Completed; stopped by itself at the next validation; left before its sixth batch; replaced; begun again, twice.
    assert trials["state"].tolist() == ["COMPLETED", "COMPLETED", "COMPLETED", "INVALID_HP", "COMPLETED", "COMPLETED"]
    assert trials["batches"].tolist()[:3] == [12, 8, 5]
    assert trials["restarts"].tolist() == [0, 0, 0, 0, 1, 1]
    assert ends(faults.path) == dict.fromkeys(range(6), 1)


@pytest.mark.api("8.13")
def test_error_of_one_rank_is_told_by_that_rank_and_its_trial_goes_on_from_its_checkpoint(faults: dray.Result) -> None:
    [restart] = [each for each in journal(faults.path) if each["event"] == "restarted" and each["trial"] == 4]
    assert restart["error"].splitlines()[-1] == "ArithmeticError: rank 1 went wrong"
    assert 'program.py", line' in restart["error"]
    made = [line for line in lines(faults.path.parent / "record") if line["trial"] == 4 and "made" in line]
    assert len({line["pid"] for line in made}) == 4
    assert batches(faults, 4) == set(range(12))


def test_a_failure_is_known_within_thirty_seconds_though_another_rank_is_busy_for_ten_minutes(
    faults: dray.Result,
) -> None:
    """Without ``hang_timeout_s``."""
    failed_at = next(line["time"] for line in lines(faults.path.parent / "record") if line.get("busy") == 1)
    [restart] = [each for each in journal(faults.path) if each["event"] == "restarted" and each["trial"] == 5]
    assert restart["error"].splitlines()[-1] == "KeyError: 'gone'"
    assert 'program.py", line' in restart["error"]
    assert restart["time"] < failed_at + 30
    assert batches(faults, 5) == set(range(12))


@pytest.fixture(scope="module")
def codes(tmp_path_factory: pytest.TempPathFactory) -> dray.Result:
    directory = tmp_path_factory.mktemp("codes")
    hook = f"echo x >> {directory}/hooks\nexport HOOKED=yes\n"
    result: dray.Result = program("codes", directory, trials=3, hook=hook, max_restarts=1).run()
    return result


def test_trial_ends_with_its_program_not_with_its_fit(codes: dray.Result) -> None:
    assert codes.trials["state"].tolist() == ["COMPLETED", "ERRORED", "COMPLETED"]
    assert codes.trials["restarts"].tolist() == [0, 1, 1]
    after = [line for line in lines(codes.path.parent / "record") if "after" in line]
    assert [line["trial"] for line in after] == [0, 2, 2]
    assert [line["went_on"] is None for line in after] == [True, True, False]
    assert batches(codes, 2) == set(range(8))


def test_exit_code_is_told_with_the_end_of_what_was_printed(codes: dray.Result) -> None:
    ends = {"restarted", "gave_up"}  # not "withheld": the first failure, in a process that had run another trial
    records = [record for record in journal(codes.path) if record.get("trial") == 1]
    errors = [record["error"] for record in records if record["event"] in ends]
    command = "python3 -m determined.launch.torch_distributed python3 program.py codes"
    log = codes.path / "trial_1" / "logs" / "rank_0.log"
    assert len(errors) == 2
    for error in errors:
        told, where, line, *end = error.splitlines()
        assert (told, line) == (f"{command} exited with code 3", "    sys.exit(3)")
        assert where.startswith("  program.py:")
        assert end == ["", f"the last lines of its log ({log}):", "    | no data for it"]
    assert printed(codes.path, 1) == ["no data for it"] * 2
    [failure] = [r["error"] for r in journal(codes.path) if r["event"] == "restarted" and r["trial"] == 2]
    assert failure.splitlines()[-1] == "OSError: what comes after training failed"
    assert "runpy" not in failure
    assert "worker.py" not in failure


def test_startup_hook_has_run_once_for_all_workers_and_its_exports_are_in_each_trial(codes: dray.Result) -> None:
    assert (codes.path.parent / "hooks").read_text() == "x\n"
    assert {line["after"] for line in lines(codes.path.parent / "record") if "after" in line} == {"yes"}


@pytest.mark.api("10.3")
def test_processes_that_a_program_starts_may_import_determined(codes: dray.Result) -> None:
    assert {line["child"] for line in lines(codes.path.parent / "record") if "after" in line} == {""}


def test_failing_startup_hook_ends_the_run_with_its_output(tmp_path: Path) -> None:
    experiment = program("codes", tmp_path, trials=2, hook="echo can not reach the data\nexit 9\n")
    with pytest.raises(ConfigError, match=r"startup-hook\.sh: exited with code 9; .*\n    \| can not reach the data"):
        experiment.run()
    assert lines(tmp_path / "record") == []
