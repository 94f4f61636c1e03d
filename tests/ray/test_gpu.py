"""The same distributed.yaml on GPUs: NCCL, one GPU a worker. And four trials on one GPU, with its memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import ray
import torch
import yaml

import dray
from tests.ray.harness import DIGITS, lines
from tests.ray.test_sharing import check_that_three_go_on

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
    assert {line["backend"] for line in made} == {"cpu:gloo,cuda:nccl"}
    assert len({line["gpus"] for line in made}) == slots
    assert {line["device"].partition(":")[0] for line in made} == {"cuda"}
    assert result.trials["state"].tolist() == ["COMPLETED"]
    assert result.metrics.query("name == 'accuracy'")["value"].max() > 0.95


def test_three_trials_go_on_when_a_fourth_exceeds_its_gpu_share(tmp_path: Path) -> None:
    ray.shutdown()  # the experiments of the tests before started one in this process
    # On a cluster that is up, all groups start at the same time.
    ray.init(address="local", num_cpus=16, include_dashboard=False, log_to_driver=False)
    try:
        met = check_that_three_go_on(tmp_path, "more than a quarter of the GPU", "oom", slot="gpu")
    finally:
        ray.shutdown()
    assert [each["has"]["GPU"] for each in met] == [0.25] * 4
    assert len({each["gpus"] for each in met}) == 1
