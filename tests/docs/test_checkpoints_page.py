"""docs/checkpoints.md: its code loads what a trial has written, and its table has every kind of storage."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dray.config.sections import KINDS
from tests.docs.pages import PAGES, blocks, files
from tests.forks.process import run_script

TRAIN = """
from model_def import DigitsTrial
from dray import pytorch
with pytorch.init(hparams={"global_batch_size": 64, "lr": 0.01, "hidden": 16}) as context:
    pytorch.Trainer(DigitsTrial(context), context).fit(max_length=pytorch.Batch(1))
"""


@pytest.mark.slow
def test_the_code_loads_a_trial(tmp_path: Path) -> None:
    (tmp_path / "model_def.py").write_text(files("index.md")["model_def.py"])
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


def test_every_kind_of_storage_is_in_the_table() -> None:
    for kind in set(KINDS["checkpoint_storage"].models) - {None, "uri"}:
        assert f"{{type: {kind}, " in PAGES["checkpoints.md"]
