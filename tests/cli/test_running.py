"""The command beside a real driver: inspect, follow, stop, resume and export an experiment."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from dray.records.numbering import typed
from dray.records.result import Result
from tests.cli.said import Said
from tests.ray.harness import TRIALS, Driver, journal, recorded, wait_for, write_config

Dray = Callable[..., Said]

pytestmark = pytest.mark.ray

TALKS = """
import time
from pathlib import Path

from recorded import Recorded


class Talks(Recorded):
    def train_batch(self, batch, epoch_idx, batch_idx):
        print(f"batch {batch_idx}")
        if not Path(self.context.get_hparam("fast")).exists():
            time.sleep(0.2 if batch_idx < 60 else 1)
        return super().train_batch(batch, epoch_idx, batch_idx)
"""


@pytest.fixture
def driver(shared_cluster: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    """One of ``results/talks-...``: three trials of 200 batches, which print each batch.

    They take two minutes or more; seconds once the file ``fast`` exists.
    """
    monkeypatch.setenv("DRAY_HOME", str(tmp_path / "results"))
    monkeypatch.setenv("RAY_ADDRESS", shared_cluster)
    (tmp_path / "model").mkdir()
    shutil.copy(TRIALS / "recorded.py", tmp_path / "model")
    (tmp_path / "model" / "talks.py").write_text(TALKS)
    period = {"batches": 20}
    config = recorded(
        tmp_path / "record", trials=3, batches=200, min_validation_period=period, entrypoint="talks:Talks", name="talks"
    )
    config["hyperparameters"]["fast"] = str(tmp_path / "fast")
    driver = Driver("create", write_config(tmp_path, config), tmp_path / "model", log=tmp_path / "log")
    yield driver
    driver.close()


def following(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "dray.cli", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )


def test_an_experiment_is_followed_stopped_resumed_and_exported(driver: Driver, tmp_path: Path, dray: Dray) -> None:
    # ---- while it runs
    path = driver.wait_for(lambda: next(iter((tmp_path / "results").glob("talks-*/journal.jsonl")), None), "a start")
    path = path.parent
    driver.wait_for(lambda: any(path.glob("trial_0/checkpoint_*/manifest.json")), "a checkpoint")
    [listed] = dray("e", "list", "--json").value
    assert (listed["name"], listed["state"], listed["trials"]) == (path.name, "RUNNING", 3)
    driver.wait_for(lambda: dray("t", "describe", "talks", "0", "--json").value["metrics"], "metrics")
    assert "is RUNNING; stop it first" in dray("e", "delete", "talks", "--yes").is_one_line()
    assert dray("e", "activate", "talks").err == f"{path.name} is RUNNING\n"

    # ---- followed, from its start until the driver ends
    trial, events = following("t", "logs", "talks", "0", "-f"), following("e", "logs", "latest", "-f")
    before = len((path / "trial_0" / "logs" / "rank_0.log").read_text().splitlines())
    wait_for(lambda: len((path / "trial_0" / "logs" / "rank_0.log").read_text().splitlines()) > before + 20, "batches")
    driver.interrupt()
    assert driver.wait() == 130
    out, err = trial.communicate(timeout=120)
    assert (trial.returncode, err) == (0, "")
    assert out.splitlines() == (path / "trial_0" / "logs" / "rank_0.log").read_text().splitlines()
    out, err = events.communicate(timeout=120)
    assert (events.returncode, err) == (0, "")
    assert "trial 0 started: lr=" in out

    # ---- stopped
    [listed] = dray("e", "list", "--json").value
    assert (listed["state"], listed["ended"]) == ("STOPPED", 0)
    assert f"dray experiment resume {typed(path)}\n" in dray("e", "describe", "latest").out

    # ---- resumed, by name
    (tmp_path / "fast").touch()
    again = Driver("resume", "talks", log=tmp_path / "log")
    assert again.wait() == 0, again.log.read_text()
    [listed] = dray("e", "list", "--json").value
    assert (listed["state"], listed["ended"]) == ("COMPLETED", 3)
    assert sum(record["event"] == "opened" for record in journal(path)) == 2

    # ---- its best model, exported
    best = Result(path).best_trial
    saved = torch.load(Path(best.checkpoint.path) / "state-dict.pth", weights_only=True)["models_state_dict"][0]
    assert dray("c", "export", "talks", "-o", tmp_path / "weights").code == 0
    state = torch.load(tmp_path / "weights" / "model.pt", weights_only=True)
    assert state.keys() == saved.keys()
    assert torch.equal(state["weight"], saved["weight"])
    hparams = json.loads((tmp_path / "weights" / "hparams.json").read_text())
    assert hparams["lr"] == best.hparams["lr"]
    assert dray("c", "verify", "talks").code == 0
    assert dray("e", "delete", "talks", "--yes").code == 0
    assert [path.name for path in (tmp_path / "results").iterdir()] == [".numbers"]
