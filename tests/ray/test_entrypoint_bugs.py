"""Bugs in users' code, whichever way the entrypoint names it: one error each, that begins with the user's own line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import dray
from dray.errors import ConfigError, ExperimentError
from tests.bugs import (
    CLASS,
    CRASHED_LAST,
    DEATH_OF_A_RANK,
    DIED,
    DIED_FIRST,
    DIED_LAST,
    OF_A_CLASS,
    OF_A_PROGRAM,
    OF_A_RANK,
    OF_A_RANK_TOO,
    PROGRAM,
    check_error,
    model_dir,
)
from tests.ray.harness import journal, recorded

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.usefixtures("ray_is_up")]


def run(entrypoint: str, bugs: list[str], directory: Path, *, slots: int = 1, **fields: Any) -> dray.Result:
    """A trial for each of the bugs, one after the other on the same worker group."""
    model = model_dir(directory)
    config = recorded(
        directory / "record",
        trials=1,
        batches=8,
        entrypoint=entrypoint,
        searcher={"name": "grid", "metric": "error", "max_length": {"batches": 8}, "max_concurrent_trials": 1},
        resources={"slot": "cpu", "slots_per_trial": slots},
        max_restarts=0,
        **fields,
    )
    config["hyperparameters"] |= {"lr": 0.01, "bug": {"type": "categorical", "vals": bugs}}
    result: dray.Result = dray.Experiment(config, model_dir=model, path=directory / "experiment").run()
    return result


def check(result: dray.Result, expected: dict[str, list[str] | None]) -> None:
    """Each trial's state, and how its error begins."""
    errors = {record["trial"]: record["error"] for record in journal(result.path) if record["event"] == "gave_up"}
    rows: Any = result.trials.set_index("hparams.bug")
    assert set(rows.index) == set(expected)
    for bug, begins in expected.items():
        trial = int(rows["trial_id"][bug])
        assert rows["state"][bug] == ("COMPLETED" if begins is None else "ERRORED"), bug
        check_error(bug, errors.get(trial, ""), begins)
        if begins in (DIED, DIED_FIRST, DIED_LAST, CRASHED_LAST):
            rank = int(begins in (DIED_LAST, CRASHED_LAST))
            told, _, printed = errors[trial].partition("\n\n")
            where = f"the last lines of its log ({result.path}/trial_{trial}/logs/rank_{rank}.log):"
            if begins is CRASHED_LAST:
                assert told.endswith(", in do"), "the user's own line, which is in no traceback"
                assert printed.startswith(f"{where}\n    | Fatal Python error: Segmentation fault\n")
            else:
                assert told.endswith(" died: exited with code 5")
                assert (printed.splitlines()[0], printed.splitlines()[-1]) == (where, "    | just before its end")


@pytest.mark.long
def test_bugs_of_a_class(tmp_path: Path) -> None:
    expected = {**OF_A_CLASS, "batch: end": DIED, "none at last": None}
    check(run(CLASS, list(expected), tmp_path), expected)


def test_bugs_of_a_program(tmp_path: Path) -> None:
    """All in one process, but for the one that dies of its."""
    expected = {**OF_A_PROGRAM, "batch: end": DIED, "none at last": None}
    check(run(PROGRAM, list(expected), tmp_path), expected)


@pytest.mark.long
def test_bugs_of_one_rank(tmp_path: Path) -> None:
    check(run(PROGRAM, list(OF_A_RANK), tmp_path, slots=2), OF_A_RANK)


@pytest.mark.long
def test_more_bugs_of_one_rank(tmp_path: Path) -> None:
    check(run(PROGRAM, list(OF_A_RANK_TOO), tmp_path, slots=2), OF_A_RANK_TOO)


@pytest.mark.long
def test_death_of_one_rank(tmp_path: Path) -> None:
    check(run(PROGRAM, list(DEATH_OF_A_RANK), tmp_path, slots=2), DEATH_OF_A_RANK)


@pytest.mark.long
@pytest.mark.parametrize("bug", ["before: exit 0", "no fit"])
def test_program_that_trains_on_one_rank_alone_is_told_of_the_other(bug: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"bugs.py ended on rank 1 without calling Trainer\.fit\(\)"):
        run(PROGRAM, [bug], tmp_path, slots=2)


@pytest.mark.long
def test_rank_that_never_comes_to_a_batch_ends_the_trial_after_the_timeout_of_collectives(tmp_path: Path) -> None:
    with pytest.raises(ExperimentError, match="every trial failed"):
        run(PROGRAM, ["batch: sleep"], tmp_path, slots=2, collective_timeout_s=3)
    [gave_up] = [record for record in journal(tmp_path / "experiment") if record["event"] == "gave_up"]
    assert "Timed out waiting 3000ms" in gave_up["error"]


@pytest.mark.long
def test_rank_that_never_comes_to_train_is_a_trial_that_hangs(tmp_path: Path) -> None:
    with pytest.raises(ExperimentError, match="every trial failed"):
        run(PROGRAM, ["before: sleep"], tmp_path, slots=2, hang_timeout_s=5, collective_timeout_s=1)
    [gave_up] = [record for record in journal(tmp_path / "experiment") if record["event"] == "gave_up"]
    assert gave_up["error"].startswith("no batch trained or validated, and no checkpoint saved, for 5 s")
