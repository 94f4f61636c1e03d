"""examples/tune_search, killed with SIGKILL and started again: Tune restores the search."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
from pathlib import Path
from typing import Any

import pytest

from searchers import Journal
from tests.forks.process import Forked, run_script
from tests.ray.harness import ROOT, wait_for

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.long, pytest.mark.usefixtures("ray_is_up")]

SCRIPT = ROOT / "examples" / "tune_search" / "tune_search.py"
TRIALS, EPOCHS = 16, 4


def records(path: Path) -> list[dict[str, Any]]:
    """The searcher's state that Tune saved last."""
    states = sorted(path.glob("searcher-state-*.json"))
    return [dict(record) for record in Journal.read(states[-1])] if states else []


def hparams(path: Path) -> list[Any]:
    return [each["hparams"] for each in records(path) if each["event"] == "started"]


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
    arguments = ["--path", str(path), "--trials", str(TRIALS), "--epochs", str(EPOCHS), "--pause-s", "0.2"]
    settings = {"TUNE_GLOBAL_CHECKPOINT_S": "0.5", "OMP_NUM_THREADS": "1"}
    with (tmp_path / "output").open("wb") as output:
        first = Forked(str(SCRIPT), *arguments, environment={**os.environ, **settings}, output=output.fileno())
        try:
            wait_for(lambda: sum(each["event"] == "reported" for each in records(path)) >= 4, "some results")
            wait_for(lambda: stopped_between_saves(first.pid, path), "Tune's files to be whole", 60)
        finally:
            first.kill()
        first.communicate(60)
    assert first.returncode == -signal.SIGKILL, (tmp_path / "output").read_text()
    before = hparams(path)
    assert 2 <= len(before) < TRIALS, "some trials, not all"

    printed = run_script(SCRIPT, *arguments, directory=tmp_path, **settings)
    assert f"best of {TRIALS} trials" in printed
    after = hparams(path)
    assert after[: len(before)] == before, "a trial that began again has its hyperparameters"
    assert len({json.dumps(each, sort_keys=True) for each in after}) == TRIALS, "none is lost, and none twice"
    assert max(each["step"] for each in records(path) if each["event"] == "reported") == EPOCHS
