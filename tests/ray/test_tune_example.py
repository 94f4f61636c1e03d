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
    return {each["id"]: hparams[each["trial"]] for each in records(path) if each["event"] == "suggested"}


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


def test_after_kill_9_the_search_continues(tmp_path: Path) -> None:
    path = tmp_path / "digits"
    arguments = ["--path", str(path), "--trials", str(TRIALS), "--epochs", str(EPOCHS)]
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
    before, trials_before = known(path), len(records(path))
    assert first.returncode == -signal.SIGKILL
    assert 2 <= len(before) < TRIALS, "some trials, not all"

    printed = run_script(SCRIPT, *arguments, directory=tmp_path, **settings)
    assert f"best of {TRIALS} trials" in printed
    assert {tune_id: known(path)[tune_id] for tune_id in before} == before
    assert len(known(path)) == TRIALS, "none is lost, and none twice"

    state = records(path)
    assert len(state) > trials_before
    start, space = next(each for each in state if each["event"] == "start"), state[0]["hyperparameters"]
    method = PromotionASHA(max_trials=TRIALS, max_length=EPOCHS, num_rungs=3, divisor=2, max_concurrent_trials=2)
    search = Search.replay(
        state, method, parse_space(space), seed=start["seed"], smaller_is_better=True, log=lambda record: None
    )
    assert search.done is not None
    assert max(view.last_step or 0 for view in search.trials.values()) == EPOCHS

    results = tune.ResultGrid(tune.ExperimentAnalysis(str(path)))
    by_id = {result.metrics["trial_id"]: result for result in results if result.metrics is not None}
    numbers = {each["id"]: each["trial"] for each in state if each["event"] == "suggested"}
    assert set(by_id) == set(numbers)
    for tune_id, result in by_id.items():
        assert result.config is not None
        assert known(path)[tune_id].items() <= result.config.items()
        assert result.metrics["epoch"] == search.trials[numbers[tune_id]].last_step
