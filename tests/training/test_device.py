"""Which device a process trains on, on machines whose GPUs are made up."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dray import core, pytorch
from dray.core import ClusterInfo, DistributedContext, TrialInfo, set_cluster_info
from dray.hosts import use_host
from dray.pytorch.experimental import get_default_device
from dray.training.device import own_device
from tests.pytorch.fakes import FakeHost


class Gpus:
    """What torch says of a machine's GPUs, each of which has a UUID."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.uuids: list[str] = []
        self.chosen: list[torch.device] = []
        fakes: dict[str, Any] = {
            "is_available": lambda: bool(self.uuids),
            "device_count": lambda: len(self.uuids),
            "set_device": self.chosen.append,
            "get_device_properties": lambda device: SimpleNamespace(uuid=self.uuids[torch.device(device).index]),
        }
        for name, fake in fakes.items():
            monkeypatch.setattr(torch.cuda, name, fake)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Gpus:
    return Gpus(monkeypatch)


def place(local_rank: int, local_size: int) -> DistributedContext:
    numbers = {"rank": local_rank, "size": local_size, "local_rank": local_rank, "local_size": local_size}
    return DistributedContext(**numbers, cross_rank=0, cross_size=1, transport=SimpleNamespace())  # type: ignore[arg-type]


def test_a_process_trains_on_the_gpu_of_its_local_rank_or_the_only_one_it_sees_or_the_cpu(gpus: Gpus) -> None:
    assert own_device(place(1, 2)) == torch.device("cpu")
    gpus.uuids = ["a", "b"]
    assert own_device(place(1, 2)) == torch.device("cuda:1")
    gpus.uuids = ["b"]
    assert own_device(place(1, 2)) == torch.device("cuda:0")


ON_CPUS = [{"resources": {"slot": "cpu"}}, {"resources": {"slots_per_trial": 0}}]


@pytest.mark.parametrize("config", ON_CPUS)
def test_a_trial_of_a_cpu_slot_trains_on_the_cpu_beside_a_gpu(
    gpus: Gpus, config: dict[str, Any], tmp_path: Path
) -> None:
    gpus.uuids = ["a"]
    with use_host(FakeHost(tmp_path)), pytorch.init(exp_conf=config) as context:
        assert context.device == torch.device("cpu")
    assert gpus.chosen == []


@pytest.mark.parametrize("config", [None, {}, {"resources": None}, {"resources": {"slot": "gpu"}}])
def test_other_trials_train_on_the_gpu_that_is_there(gpus: Gpus, config: dict[str, Any] | None, tmp_path: Path) -> None:
    gpus.uuids = ["a"]
    with use_host(FakeHost(tmp_path)), pytorch.init(exp_conf=config) as context:
        assert context.device == torch.device("cuda:0")
    assert gpus.chosen == [torch.device("cuda:0")]


def test_a_program_of_a_cpu_slot_is_given_the_cpu(gpus: Gpus, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DRAY_HOME", os.fspath(tmp_path))
    gpus.uuids = ["a"]
    trial = TrialInfo(trial_id=0, experiment_id=0, trial_seed=0, hparams={}, config=ON_CPUS[0], steps_completed=0)
    before = set_cluster_info(ClusterInfo(trial=trial))
    try:
        with core.init() as context:
            assert get_default_device(context) == torch.device("cpu")
    finally:
        set_cluster_info(before)
    with core.init() as context:
        assert get_default_device(context) == torch.device("cuda:0")
