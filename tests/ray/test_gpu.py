"""The same distributed.yaml on GPUs: NCCL, one GPU a worker."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import dray
from tests.ray.harness import DIGITS, lines

pytestmark = [pytest.mark.ray, pytest.mark.gpu, pytest.mark.slow]


@pytest.mark.parametrize("slots", [1, 2])
def test_each_worker_has_a_gpu_of_its_own_and_nccl_joins_them(slots: int, digits_dir: Path, tmp_path: Path) -> None:
    if torch.cuda.device_count() < slots:
        pytest.skip(f"needs {slots} CUDA devices")
    config: dict[str, Any] = yaml.safe_load((DIGITS / "distributed.yaml").read_text())
    config["entrypoint"] = "recorded_digits:RecordedDigits"
    config["hyperparameters"] |= {"record": str(tmp_path / "record"), "pause_s": 0.0}
    # What a slot is, is not said: a cluster with GPUs offers those.
    config["resources"]["slots_per_trial"] = slots
    result = dray.Experiment(config, model_dir=digits_dir, path=tmp_path / "experiment").run()
    made = [line for line in lines(tmp_path / "record") if "made" in line]
    assert len(made) == slots
    assert {line["backend"] for line in made} == {"nccl"}
    assert len({line["gpus"] for line in made}) == slots
    assert {line["device"].partition(":")[0] for line in made} == {"cuda"}
    assert result.trials["state"].tolist() == ["COMPLETED"]
    assert result.metrics.query("name == 'accuracy'")["value"].max() > 0.95
