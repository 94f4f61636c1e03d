"""Which device a process trains on, on machines whose GPUs are made up."""

from __future__ import annotations

import os
import re
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed

from dray import core, pytorch
from dray.core import ClusterInfo, DistributedContext, TrialInfo
from dray.hosts import use_host
from dray.pytorch.experimental import get_default_device
from dray.training.checkpoint import checkpointer, files
from dray.training.host import Report
from dray.training.parallel import device
from dray.training.parallel.agreement import Agreement
from dray.training.parallel.device import GpuConflict, check_gpus, own_device
from dray.training.progress import Progress
from dray.worker.isolation.snapshot import ProcessSnapshot
from dray.worker.process_group import gpu_of_worker
from dray.worker.ranks import Place
from tests.core.test_distributed import nodes, on_ranks
from tests.pytorch.fakes import FakeHost


class Gpus:
    """Fakes torch's view of a machine's GPUs, each with a UUID."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.of_thread = threading.local()
        self._of_all: list[str] = []
        self.chosen: list[torch.device] = []
        fakes: dict[str, Any] = {
            "is_available": lambda: bool(self.uuids),
            "device_count": lambda: len(self.uuids),
            "set_device": self.chosen.append,
            "get_device_properties": lambda device: SimpleNamespace(uuid=self.uuids[torch.device(device).index]),
        }
        for name, fake in fakes.items():
            monkeypatch.setattr(torch.cuda, name, fake)

    @property
    def uuids(self) -> list[str]:
        """The GPUs that this thread sees, since ranks are threads here."""
        return getattr(self.of_thread, "uuids", self._of_all)

    @uuids.setter
    def uuids(self, uuids: list[str]) -> None:
        self._of_all = uuids


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Gpus:
    return Gpus(monkeypatch)


def test_a_process_trains_on_the_gpu_of_its_local_rank_or_the_only_one_it_sees_or_the_cpu(gpus: Gpus) -> None:
    assert own_device(1) == torch.device("cpu")
    gpus.uuids = ["a", "b"]
    assert own_device(1) == torch.device("cuda:1")
    gpus.uuids = ["b"]
    assert own_device(1) == torch.device("cuda:0")


def checked(gpus: Gpus, seen: list[list[str]]) -> list[str]:
    """The error of each rank on a machine, given the GPUs that it sees."""

    def work(context: DistributedContext) -> str:
        gpus.of_thread.uuids = seen[context.rank]
        try:
            check_gpus(own_device(context.local_rank), context.allgather)
        except GpuConflict as error:
            return str(error)
        return ""

    return on_ranks(nodes(len(seen)), work)


def test_ranks_that_would_share_a_gpu_are_refused_on_all_of_them(gpus: Gpus) -> None:
    [told] = set(checked(gpus, [["a", "b"]] * 3))
    assert re.search(r"ranks 0, 2 of this trial would all train on the GPU a of \S+, where each .* sees 2 GPUs", told)
    assert "--nproc-per-node" in told
    [told] = set(checked(gpus, [["b"], ["b"]]))
    assert "sees 1 GPU," in told


def test_ranks_with_gpus_of_their_own_may_each_see_all_or_only_theirs(gpus: Gpus) -> None:
    assert checked(gpus, [["a", "b"]] * 2) == ["", ""]
    assert checked(gpus, [["a"], ["b"]]) == ["", ""]
    assert checked(gpus, [[], []]) == ["", ""], "on CPUs"
    assert checked(gpus, [["a"]]) == [""], "a trial on a part of a GPU"


def test_two_processes_on_one_gpu_are_refused_by_init(
    gpus: Gpus, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DRAY_HOME", os.fspath(tmp_path))
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    gpus.uuids = ["a"]

    def work(context: DistributedContext) -> str:
        with pytest.raises(GpuConflict) as caught, pytorch.init(distributed=context):
            pass
        return str(caught.value)

    [told] = set(on_ranks(nodes(2), work))
    assert told.startswith("ranks 0, 1 of this trial would all train on the GPU a of ")


@pytest.mark.parametrize(("uuids", "local_rank", "device"), [(["a", "b"], 1, "cuda:1"), (["b"], 1, "cuda:0")])
def test_a_worker_of_ray_trains_on_the_gpu_of_its_local_rank(
    gpus: Gpus, uuids: list[str], local_rank: int, device: str
) -> None:
    gpus.uuids = uuids
    assert gpu_of_worker(local_rank, Place("a", "10.0.0.3", ("3",))) == torch.device(device)


def test_a_gpu_of_rays_that_torch_does_not_see_is_an_error(gpus: Gpus) -> None:
    with pytest.raises(GpuConflict, match=r"a worker on 10\.0\.0\.3 GPU 3, but torch \S+ sees none there; install"):
        gpu_of_worker(0, Place("a", "10.0.0.3", ("3",)))


ON_CPUS = [{"resources": {"slot": "cpu"}}, {"resources": {"slots_per_trial": 0}}]


@pytest.mark.parametrize("config", [*ON_CPUS, None, {}, {"resources": None}, {"resources": {"slot": "gpu"}}])
def test_a_trial_trains_on_the_available_gpu_unless_its_slot_is_a_cpu(gpus: Gpus, config: Any, tmp_path: Path) -> None:
    gpus.uuids = ["a"]
    with use_host(FakeHost(tmp_path)), pytorch.init(exp_conf=config) as context:
        assert context.device == torch.device("cpu" if config in ON_CPUS else "cuda:0")
    assert gpus.chosen == ([] if config in ON_CPUS else [torch.device("cuda:0")])


def test_a_program_of_a_cpu_slot_is_given_the_cpu(
    gpus: Gpus, set_info: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DRAY_HOME", os.fspath(tmp_path))
    gpus.uuids = ["a"]
    trial = TrialInfo(trial_id=0, experiment_id=0, trial_seed=0, hparams={}, config=ON_CPUS[0], steps_completed=0)
    set_info(ClusterInfo(trial=trial))
    with core.init() as context:
        assert get_default_device(context) == torch.device("cpu")
    set_info(None)
    with core.init() as context:
        assert get_default_device(context) == torch.device("cuda:0")


def test_core_init_and_reports_of_metrics_leave_cuda_alone(
    gpus: Gpus, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DRAY_HOME", os.fspath(tmp_path))
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: pytest.fail("CUDA is initialised before the program does"))
    gpus.uuids = ["a", "b"]

    def work(context: DistributedContext) -> None:
        with core.init(distributed=context) as core_context:
            core_context.train.report_training_metrics(1, {"loss": 1.0})

    on_ranks(nodes(2), work)


@pytest.mark.gpu
def test_a_real_gpu_is_known_by_its_uuid() -> None:
    device = own_device(0)
    check_gpus(device, lambda mine: [mine, None])
    uuid = torch.cuda.get_device_properties(device).uuid
    with pytest.raises(GpuConflict, match=f"ranks 0, 1 of this trial would all train on the GPU {uuid} of "):
        check_gpus(device, lambda mine: [mine, mine])


def test_threads_that_may_use_a_gpu_use_that_of_the_thread_which_starts_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By itself a thread uses GPU 0, where it makes a context."""
    used: dict[str, int] = {}
    monkeypatch.setattr(device, "gpu_in_use", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda gpu: used.setdefault(threading.current_thread().name, gpu))
    with Agreement(DistributedContext(), stop_requested=lambda: False, trained=lambda: 0).listening():
        pass
    ProcessSnapshot().run(lambda: None)
    monkeypatch.setattr(checkpointer, "AT_ONCE_BYTES", 0)
    contents = files.contents(state={}, progress=Progress(), ranks=[], description=files.Description(metadata={}))
    saving = checkpointer.Saver(FakeHost(tmp_path))
    saving.save(contents, Report(batches=1), at_once=False)
    saving.finish()
    assert used == {"dray-agreement": 1, "trial": 1, "dray-saver_0": 1}
