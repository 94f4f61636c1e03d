"""Checkpoints of the real Determined on a real Ray: a search begins with one, a program on two slots goes on."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import dray
from dray import pytorch
from tests.pytorch.test_determined_checkpoints import EPOCH, LENGTH, MODELS, golden

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.long, pytest.mark.usefixtures("ray_is_up")]

UUID = "3f0e2b5c-8f61-4c1b-9d3a-0d6f7a3b9e11"


def run(config: dict[str, Any], directory: Path) -> dray.Result:
    model = directory / "model"
    shutil.copytree(MODELS, model, ignore=shutil.ignore_patterns("__pycache__"))
    result: dray.Result = dray.Experiment(config, model_dir=model, path=directory / "experiment").run()
    return result


@pytest.mark.api("9.11")
def test_every_trial_of_a_search_begins_with_it(tmp_path: Path) -> None:
    _, checkpoint, _ = golden("still")
    shutil.copytree(checkpoint, tmp_path / "storage" / UUID)
    result = run(
        {
            "name": "warm",
            "entrypoint": "model_def:Still",
            "hyperparameters": {"width": 5, "records": 22, "global_batch_size": 4},
            "searcher": {
                "name": "random",
                "metric": "validation_loss",
                "max_length": {"batches": 6},
                "max_trials": 2,
                "source_checkpoint_uuid": UUID,
            },
            "perform_initial_validation": True,
            "checkpoint_storage": {"type": "shared_fs", "host_path": str(tmp_path), "storage_path": "storage"},
            "resources": {"slot": "cpu"},
        },
        tmp_path,
    )
    assert result.trials["state"].tolist() == ["COMPLETED"] * 2
    assert result.trials["batches"].tolist() == [6] * 2
    losses = result.metrics.query("name == 'validation_loss' and kind == 'validation'")
    first = losses.query("batches == 0")["value"].tolist()
    shutil.copytree(MODELS, tmp_path / "storage" / UUID / "code")  # the golden checkpoints share it
    loaded: Any = pytorch.load_trial_from_checkpoint_path(tmp_path / "storage" / UUID)
    loaded.model.eval()
    with torch.no_grad():
        batches = [loaded.evaluate_batch(batch) for batch in loaded.build_validation_data_loader()]
    expected = sum(float(each["validation_loss"]) for each in batches) / len(batches)
    assert first == pytest.approx([expected] * 2, rel=1e-5)


@pytest.mark.api("9.8", "9.11")
def test_a_program_on_two_slots_goes_on_with_the_losses_that_it_would_have_had(tmp_path: Path) -> None:
    told, checkpoint, batches = golden("plain-2")
    result = run(
        {
            "name": "program",
            "entrypoint": "python3 -m determined.launch.torch_distributed "
            f"python3 train.py Plain {LENGTH} {tmp_path} --latest {checkpoint}",
            "hyperparameters": {"global_batch_size": 8},
            "searcher": {"name": "single", "metric": "validation_loss"},
            "resources": {"slot": "cpu", "slots_per_trial": 2},
            "max_restarts": 0,
        },
        tmp_path,
    )
    assert result.trials["state"].tolist() == ["COMPLETED"]
    for rank, theirs in enumerate(told["ranks"]):
        mine = json.loads((tmp_path / f"losses_{rank}.json").read_text())["losses"]
        # Until the validation at the end of the epoch, which draws random numbers in Determined and none in dray.
        assert mine[: EPOCH - batches] == pytest.approx(theirs["losses"][batches:EPOCH], rel=1e-6)
