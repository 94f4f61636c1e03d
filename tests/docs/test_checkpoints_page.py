"""docs/checkpoints.md: its code loads what a trial has written, and its table has every kind of storage."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dray import pytorch
from dray.config.faults import KINDS
from dray.training.checkpoint import files as checkpoint_files
from dray.worker.lease import REPORT_FILE
from tests.docs.pages import PAGES, blocks, files
from tests.forks.process import run_script
from tests.pytorch.fakes import OneWeight

TRAIN = """
from model_def import DigitsTrial
from dray import pytorch
with pytorch.init(hparams={"global_batch_size": 64, "lr": 0.01, "hidden": 16}) as context:
    pytorch.Trainer(DigitsTrial(context), context).fit(max_length=pytorch.Batch(1))
"""


@pytest.mark.slow
@pytest.mark.long
def test_the_code_loads_a_trial(tmp_path: Path) -> None:
    (tmp_path / "model_def.py").write_text(files("quick-start.md")["model_def.py"])
    (tmp_path / "train.py").write_text(TRAIN)
    run_script(tmp_path / "train.py", directory=tmp_path, DRAY_HOME=str(tmp_path / "home"))
    [written] = (tmp_path / "home" / "local").glob("*/checkpoint_1")
    checkpoint = tmp_path / "digits-1" / "trial_7" / "checkpoint_352"
    shutil.copytree(written, checkpoint)

    result = SimpleNamespace(best_trial=SimpleNamespace(checkpoint=object()))
    names: dict[str, Any] = {"path": tmp_path / "digits-1", "result": result}
    [code] = blocks("python", page="checkpoints.md")
    exec(code.text, names)
    assert names["checkpoint"] is result.best_trial.checkpoint
    [state] = torch.load(checkpoint / "state-dict.pth", weights_only=True)["models_state_dict"]
    loaded = names["trial"].model.state_dict()
    assert state.keys() == loaded.keys()
    assert all(torch.equal(state[name], loaded[name]) for name in state)


def tops(names: Iterable[str]) -> set[str]:
    """The files and directories at the top of a checkpoint."""
    return {name.partition("/")[0] for name in names}


def test_lists_of_a_checkpoints_files_are_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAY_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model_def.py").touch()
    with pytorch.init(hparams={"lr": 1}, exp_conf={"name": "digits"}, aggregation_frequency=2) as context:
        pytorch.Trainer(OneWeight(context), context).fit(max_length=pytorch.Batch(1))
    [checkpoint] = (tmp_path / "home" / "local").glob("digits-*/checkpoint_1")
    written = {path.name for path in checkpoint.iterdir()} | {REPORT_FILE, "data"}  # with a stream

    [table] = re.findall(r"directory of these files:\n\n((?:\|.*\n)+)", PAGES["checkpoints.md"])
    assert tops(re.findall(r"`([^`]+)`", "\n".join(row.split("|")[1] for row in table.splitlines()))) == written
    listed = re.findall(r"^([a-z][\w./-]+(?:, [\w./-]+)*)   ?", str(checkpoint_files.__doc__), re.MULTILINE)
    assert tops(name for names in listed for name in names.split(", ")) == written | {"sharded"}


def test_every_kind_of_storage_is_in_the_table() -> None:
    for kind in set(KINDS["checkpoint_storage"].models) - {None, "uri"}:
        assert f"{{type: {kind}, " in PAGES["checkpoints.md"]
