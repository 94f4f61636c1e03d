"""Which device a process trains on, and the search for a batch size, on machines that are made up."""

from __future__ import annotations

import math
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed

from dray import core, pytorch
from dray.core import ClusterInfo, DistributedContext, TrialInfo
from dray.experiment.probe import BatchSize, search_batch_size
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
    saving.save(contents, Report(batches=1))
    saving.finish()
    assert used == {"dray-agreement": 1, "trial": 1, "dray-saver_0": 1}


Rate = Callable[[int], float]


class Machine:
    """Memory for `limit` records per slot, and so much training data; `rate`: the throughput of a size."""

    def __init__(self, limit: int, *, data: float = math.inf, rate: Rate = float) -> None:
        self.limit, self.data, self.rate = limit, data, rate
        self.tried: list[int] = []

    def measure(self, size: int) -> BatchSize:
        assert size not in self.tried
        self.tried.append(size)
        return BatchSize(
            per_slot=size,
            global_batch_size=2 * size,
            aggregation_frequency=1,
            records_per_second=self.rate(size) if size <= self.limit else None,
            has_all_data=size >= self.data,
        )


@pytest.mark.parametrize("first", [1, 7, 24, 64, 1000])
def test_the_largest_size_that_fits_is_found_to_within_an_eighth_in_a_few_steps(first: int) -> None:
    for limit in range(1, 1500):
        machine = Machine(limit)
        found = search_batch_size(first, first, machine.measure)
        # The config's size, doubled or halved until it is the largest such that fits, and its eighths.
        doublings = math.floor(math.log2(limit / first))
        base = first << doublings if doublings >= 0 else next(first >> n for n in range(11) if first >> n <= limit)
        unit = max(1, 2 ** math.floor(math.log2(base)) // 8)
        assert found.largest.per_slot == max(base, limit // unit * unit)
        assert found.largest.per_slot > limit * 7 / 8 - 1
        assert [each.per_slot for each in found.sizes] == sorted(machine.tried)
        assert len(machine.tried) <= abs(doublings) + 7
        assert max(machine.tried) <= max(first, 2 * limit)


def test_nothing_larger_is_tried_than_all_data() -> None:
    machine = Machine(10**9, data=1437)
    found = search_batch_size(64, 64, machine.measure)
    assert machine.tried == [64, 128, 256, 512, 1024, 2048]
    assert found.largest.per_slot == 2048


@pytest.mark.parametrize(
    ("first", "step", "limit", "rate", "suggested"),
    [
        (8, 64, 1000, float, 64),  # all in one batch, and no more than the config's
        (64, 64, 20, float, 16),  # aggregation in place of memory
        (24, 24, 20, float, 12),  # 24, 12, 16, 20: only 12 divides 24
        (10, 100, 60, float, 50),  # 10, 20, 40, 80, 60 do not include 50, the largest divisor that fits
        (8, 64, 1000, lambda size: -abs(size - 16) + 100.0, 16),  # the fastest, not the largest
        (7, 7, 6, float, 1),
    ],
)
def test_the_suggestion_is_the_fastest_size_that_divides_a_step(
    first: int, step: int, limit: int, rate: Rate, suggested: int
) -> None:
    found = search_batch_size(first, step, Machine(limit, rate=rate).measure)
    assert found.suggestion.per_slot == suggested
    assert found.suggestion in found.sizes
