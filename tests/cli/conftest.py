"""Experiments for the commands to read, in a default storage for one test."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from dray.cli import main
from dray.records.directory import ExperimentDirectory
from dray.storage import CheckpointStore
from dray.training.checkpoint.files import Description, contents, write
from dray.training.progress import Progress
from searchers.journal import Journal
from tests.cli.said import Said
from tests.report.simulated import simulated

TRIALS = 8
WEIGHT = torch.tensor([[1.0, 2.0]])


def checkpoint(store: CheckpointStore, batches: int) -> str:
    """One as a trainer writes it, of a model with one layer."""
    staging = store.stage(batches)
    state = {"models_state_dict": [{"weight": WEIGHT}], "optimizers_state_dict": [{"state": {}}], "callbacks": {}}
    about = Description(metadata={"trial_cls_spec": "model_def:DigitsTrial", "hparams": {"hidden": 16}})
    write(staging, contents(state=state, progress=Progress(batches=batches), ranks=[], description=about))
    return store.commit(staging, batches)


@pytest.fixture(scope="session")
def simulated_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("results")
    directory = simulated(root / "digits-1", TRIALS)
    for trial in range(TRIALS):
        checkpoint(directory.store(trial), 10)
    logs = directory.trial(0) / "logs"
    logs.mkdir()
    (logs / "rank_0.log").write_text("one\ntwo\nthr")
    return root


@pytest.fixture
def home(simulated_once: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The default storage, with a finished experiment, ``digits-1``, which a test may change."""
    root = tmp_path / "results"
    shutil.copytree(simulated_once, root)
    monkeypatch.setenv("DRAY_HOME", str(root))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return root


@pytest.fixture
def digits(home: Path) -> ExperimentDirectory:
    """The experiment ``digits-1``."""
    return ExperimentDirectory.open(home / "digits-1")


@pytest.fixture
def held(digits: ExperimentDirectory) -> Iterator[Journal]:
    """The journal of ``digits-1``, cut in the middle of the search and locked as by a driver."""
    lines = digits.journal.read_text().splitlines(keepends=True)
    end = next(number for number, line in enumerate(lines) if json.loads(line)["event"] == "exited")
    digits.journal.write_text("".join(lines[: end + 1]))
    with Journal(digits.journal) as journal:
        yield journal


@pytest.fixture
def dray(capfd: pytest.CaptureFixture[str]) -> Callable[..., Said]:
    """Run the command in this process, as the console script does."""

    def run(*arguments: object) -> Said:
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
        out, err = capfd.readouterr()
        return Said(code=int(ended.value.code or 0), out=out, err=err)

    return run
