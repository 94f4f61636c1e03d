"""examples/tune_search, killed with SIGKILL and started again: Tune restores the search."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from ray import tune

from searchers import Journal, PromotionASHA, Search, parse_space
from tests.forks.process import Forked, run_script
from tests.ray.harness import ROOT, wait_for

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.usefixtures("ray_is_up")]

SCRIPT = ROOT / "examples" / "tune_search" / "tune_search.py"
TRIALS, EPOCHS = 7, 4


def records(path: Path) -> list[dict[str, Any]]:
    """The searcher's state that Tune saved last."""
    states = sorted(path.glob("searcher-state-*.json"))
    return [dict(record) for record in Journal.read(states[-1])] if states else []


def known(path: Path) -> dict[str, Mapping[str, object]]:
    """The hyperparameters of each of Tune's trials, by the searcher's state."""
    hparams = {each["trial"]: each["hparams"] for each in records(path) if each["event"] == "started"}
    return {tune_id: hparams[number] for number, tune_id in tune_ids(path).items()}


def tune_ids(path: Path) -> dict[int, str]:
    """Tune's id of each trial, the last one: the searcher gives a trial to Tune again if Tune had not yet saved it."""
    return {each["trial"]: each["id"] for each in records(path) if each["event"] == "suggested"}


def saved_by_tune(path: Path) -> set[str]:
    """The ids of the trials that `Tuner.restore` will bring back."""
    state = json.loads(max(path.glob("experiment_state-*.json")).read_text())
    return {json.loads(trial)["trial_id"] for trial, _ in state["trial_data"]}


def stopped_between_saves(pid: int, path: Path) -> bool:
    """Stop the process, unless Tune is copying its files to the storage: what is half copied, it can't restore."""
    os.kill(pid, signal.SIGSTOP)
    states = [*path.glob("search_gen_state-*.json"), *path.glob("experiment_state-*.json"), path / "tuner.pkl"]
    with contextlib.suppress(EOFError, ValueError, pickle.UnpicklingError):
        for state in states:
            json.loads(state.read_text()) if state.name.startswith("exp") else pickle.loads(state.read_bytes())
        return len(states) >= 3
    os.kill(pid, signal.SIGCONT)
    return False


# Now and then a worker that was forked for the killed driver spins, and keeps the CPU that the next one needs.
@pytest.mark.long
def test_after_kill_9_the_search_continues(tmp_path: Path) -> None:
    path = tmp_path / "digits"
    arguments = ["--path", str(path), "--trials", str(TRIALS), "--epochs", str(EPOCHS), "--pause-s", "0.2"]
    settings = {"TUNE_GLOBAL_CHECKPOINT_S": "0.5", "OMP_NUM_THREADS": "1"}

    def is_in_the_middle() -> bool:
        events = [each["event"] for each in records(path)]
        return events.count("reported") >= 4 and any(
            {"action": "pause", "trial": 0} in each.get("actions", []) for each in records(path)
        )

    with (tmp_path / "output").open("wb") as output:
        first = Forked(str(SCRIPT), *arguments, environment={**os.environ, **settings}, output=output.fileno())
        try:
            wait_for(lambda: is_in_the_middle() or first.returncode is not None, "some results")
            assert first.returncode is None, "it ended too early:\n" + (tmp_path / "output").read_text()
            wait_for(lambda: stopped_between_saves(first.pid, path), "Tune's files to be whole", 60)
        finally:
            first.kill()
        first.communicate(30)
    before, records_before, brought_back = known(path), len(records(path)), saved_by_tune(path)
    assert first.returncode == -signal.SIGKILL
    assert len(before) >= 2
    assert sum(each["event"] == "exited" for each in records(path)) < TRIALS, "some trials, not all"

    printed = run_script(SCRIPT, *arguments, directory=tmp_path, **settings)
    assert f"best of {TRIALS} trials" in printed
    after = known(path)
    for tune_id, hparams in before.items():
        if tune_id in brought_back:
            assert after[tune_id] == hparams
        else:  # Tune copies its own state and the searcher's one after the other
            assert tune_id not in after
            assert hparams in after.values(), "the trial began again, with its hyperparameters"
    assert len(after) == TRIALS, "none is lost, and none twice"

    state = records(path)
    assert len(state) > records_before
    start, space = next(each for each in state if each["event"] == "start"), state[0]["hyperparameters"]
    method = PromotionASHA(max_trials=TRIALS, max_length=EPOCHS, num_rungs=3, divisor=2, max_concurrent_trials=2)
    search = Search(method, parse_space(space), seed=start["seed"], smaller_is_better=True, log=lambda record: None)
    search.replay(state)
    assert search.done is not None
    assert max(view.last_step or 0 for view in search.trials.values()) == EPOCHS

    results = tune.ResultGrid(tune.ExperimentAnalysis(str(path)))
    by_id = {result.metrics["trial_id"]: result for result in results if result.metrics is not None}
    numbers = {tune_id: number for number, tune_id in tune_ids(path).items()}
    assert set(by_id) == set(numbers)
    for tune_id, result in by_id.items():
        assert result.config is not None
        assert known(path)[tune_id].items() <= result.config.items()
        assert result.metrics["epoch"] == search.trials[numbers[tune_id]].last_step
