"""Bugs in users' programs: one error each, that begins with the user's own line; ranks that hang; a wrong metric."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import dray
from dray.errors import ConfigError, ExperimentError
from tests.bugs import (
    CRASHED_LAST,
    DEATH_OF_A_RANK,
    DIED,
    DIED_FIRST,
    DIED_LAST,
    EXIT_3,
    OF_A_RANK,
    PROGRAM,
    RAISES,
    check_error,
    model_dir,
)
from tests.ray.harness import journal, recorded

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.long, pytest.mark.usefixtures("ray_is_up")]


def run(bugs: list[str], directory: Path, *, slots: int = 1, **fields: Any) -> dray.Result:
    """A trial for each of the bugs, one after the other on the same worker group."""
    model = model_dir(directory)
    config = recorded(
        directory / "record",
        trials=1,
        batches=8,
        entrypoint=PROGRAM,
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


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("expected", "slots"),
    [
        # The bugs that end no process are those of tests/worker/test_bugs_in_trials.py.
        ({"batch: exception": RAISES, "batch: end": DIED, "after: exit 3": EXIT_3, "none at last": None}, 1),
        (OF_A_RANK, 2),
        (DEATH_OF_A_RANK, 2),
    ],
    ids=["of a program", "of a rank", "death of a rank"],
)
def test_a_bug_is_one_error_that_begins_with_the_users_line(
    expected: dict[str, list[str] | None], slots: int, tmp_path: Path
) -> None:
    check(run(list(expected), tmp_path, slots=slots), expected)


@pytest.mark.parametrize("bug", ["before: exit 0", "no fit"])
def test_program_that_trains_on_one_rank_alone_is_told_of_the_other(bug: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"bugs.py ended on rank 1 without calling Trainer\.fit\(\)"):
        run([bug], tmp_path, slots=2)


@pytest.mark.parametrize(
    ("bug", "timeouts", "says"),
    [
        ("batch: sleep", {"collective_timeout_s": 3}, "Timed out waiting 3000ms"),
        (
            "before: sleep",
            {"hang_timeout_s": 5, "collective_timeout_s": 1},
            "no batch trained or validated, and no checkpoint saved, for 5 s",
        ),
    ],
)
def test_a_rank_that_hangs_ends_the_trial(bug: str, timeouts: dict[str, int], says: str, tmp_path: Path) -> None:
    with pytest.raises(ExperimentError, match="every trial failed"):
        run([bug], tmp_path, slots=2, **timeouts)
    [gave_up] = [record for record in journal(tmp_path / "experiment") if record["event"] == "gave_up"]
    assert says in gave_up["error"]
