"""A trial's time and machine usage, and the event files that show them."""

from __future__ import annotations

import math
import subprocess
import sys
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import crc32c
from tensorboard.plugins.hparams import metadata

from dray import pytorch
from dray.config.resources import GpuType
from dray.hosts import use_host
from dray.training import usage
from dray.training.metrics import event_file
from dray.training.metrics.event_file import EventFile
from dray.training.usage import Usage, UsageShare, busy_percent, count_flops, peak_flops
from tests.pytorch.fakes import FakeHost, Ones, OneWeight, one_weight


class Clock:
    """A clock for all measurements, which stands still unless it is moved."""

    def __init__(self) -> None:
        self.now = self.cpu_s = 100.0

    def monotonic(self) -> float:
        return self.now

    def process_time(self) -> float:
        return self.cpu_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(usage, "time", clock)
    return clock


CPU = torch.device("cpu")


def test_time_is_reported_by_phase_and_batches_per_second(clock: Clock) -> None:
    measured = Usage(CPU)
    measured.trained(0, 0, data_s=1.0)
    measured.record("training", 4.0, batches=20)
    measured.record("validating", 2.0)
    measured.record("waiting", 0.25)
    measured.saved(0.5)
    told = {
        "training_s": 3.0,
        "data_s": 1.0,
        "validating_s": 2.0,
        "checkpointing_s": 0.5,
        "waiting_s": 0.25,
        "batches_per_second": 5.0,
    }
    assert measured.flush(at_once=True) == told
    assert measured.flush(at_once=True) is None, "told, and from then on anew"
    measured.record("waiting", 0.75)
    measured.record("training", 1.0, batches=3)
    assert measured.flush(at_once=True) == {"training_s": 1.0, "waiting_s": 0.25, "batches_per_second": 3.0}


def test_figures_are_reported_every_few_seconds_only(clock: Clock) -> None:
    measured = Usage(CPU)
    for _ in range(3):
        clock.now += usage.REPORT_EVERY_S - 1
        measured.record("training", usage.REPORT_EVERY_S - 1, batches=1)
        told = measured.flush(at_once=False)
        if told is not None:
            break
    assert told == {"training_s": 8.0, "batches_per_second": 0.25}, "with the second report"


def add(measured: Usage, *machines: Mapping[str, float]) -> None:
    ranks = [UsageShare(machine, 0.0, 0.0) for machine in machines]
    measured.add_ranks(ranks, ranks)


def test_a_machine_is_looked_at_once_a_second_at_most(clock: Clock) -> None:
    measured = Usage(CPU)
    clock.now, clock.cpu_s = 102.0, 103.0
    first = measured.share().machine
    assert first["cpu_cores"] == 1.5
    assert 0.01 < first["memory_gb"] < 100
    assert "gpu_memory_gb" not in first
    clock.now, clock.cpu_s = 102.5, 1000.0
    assert measured.share().machine is first
    clock.now, clock.cpu_s = 104.0, 105.0
    assert measured.share().machine["cpu_cores"] == 1.0


def test_ranks_are_added_up(clock: Clock) -> None:
    measured = Usage(CPU)
    names = ("cpu_cores", "memory_gb", "gpu_memory_gb", "gpu_peak_memory_gb", "gpu_alloc_retries", "gpu_percent")
    rows = [(1.0, 2.0, 3.0, 2.5, 1, 50.0), (), (0.5, 1.0, 4.0, 1.5, 2, 100.0), (0.5, 1.0)]
    add(measured, *(dict(zip(names, row, strict=False)) for row in rows))
    told = {
        "cpu_cores": 2.0,
        "memory_gb": 4.0,
        "gpu_percent": 75.0,
        "gpu_memory_gb": 4.0,
        "gpu_peak_memory_gb": 2.5,
        "gpu_alloc_retries": 3,
    }
    assert measured.flush(at_once=True) == told


def test_work_of_all_ranks_makes_throughput_and_mfu(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100-SXM4-80GB")
    measured = Usage(torch.device("cuda:0"), flops_per_record=39e12)
    measured.trained(6, torch.tensor(3000), data_s=0.0)
    mine = measured.share()
    assert measured.share() == UsageShare({}, 0.0, 0.0)
    measured.add_ranks([mine, UsageShare({}, 2.0, 1000.0)], [mine, UsageShare({}, 2.0, 1000.0)])
    measured.record("training", 2.0, batches=3)
    told = {
        "training_s": 2.0,
        "batches_per_second": 1.5,
        "records_per_second": 4.0,
        "tokens_per_second": 2000.0,
        "tflops_per_slot": 78.0,
        "mfu_percent": 25.0,
    }
    assert measured.flush(at_once=True) == told
    measured.record("training", 1.0, batches=1)
    assert measured.flush(at_once=True) == {"training_s": 1.0, "batches_per_second": 1.0}, "counted anew"


def test_the_peak_of_a_gpu_is_known_by_its_name() -> None:
    known = {"NVIDIA H100 80GB HBM3": 989, "NVIDIA H100 PCIe": 756, "NVIDIA A10G": 70, "NVIDIA L40S": 362}
    assert {name: peak_flops(name) for name in known} == {name: tflops * 1e12 for name, tflops in known.items()}
    more = {"NVIDIA H800": 989, "NVIDIA A800-SXM4-80GB": 312, "NVIDIA L20": 119.5, "NVIDIA GeForce RTX 5090": 210}
    more |= {"NVIDIA RTX 6000 Ada Generation": 364, "NVIDIA RTX A6000": 155, "NVIDIA H20": 148}
    more |= {"NVIDIA RTX PRO 6000 Blackwell Server Edition": 503, "AMD Instinct MI250X / MI250": 191.5}
    assert {name: peak_flops(name) for name in more} == {name: tflops * 1e12 for name, tflops in more.items()}
    assert peak_flops("NVIDIA RTX A4000") is None
    assert peak_flops("NVIDIA A100-SXM4-40GB MIG 1g.5gb") is None


def test_the_peak_of_each_type_of_slots_is_known() -> None:
    assert [name for name in get_args(GpuType) if peak_flops(name) is None] == []


@pytest.mark.slow
def test_code_whose_flops_were_counted_is_compiled_afterwards() -> None:
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    model = torch.compile(torch.nn.Linear(3, 2), backend=backend)
    batch = torch.ones(5, 3)
    _, flops = count_flops(lambda: model(batch).sum().backward())
    assert (flops, graphs) == (2 * 2 * 5 * 3 * 2, []), "forward, and the gradient of the weights"
    model(batch)
    assert len(graphs) == 1


STATS = {"reserved_bytes.all.current": 2e9, "allocated_bytes.all.peak": 1e9, "num_alloc_retries": 3, "num_ooms": 0}


class NVMLError(Exception):
    """As pynvml's: no RuntimeError."""


@pytest.mark.parametrize("error", [NVMLError("Not Supported"), KeyError(), ModuleNotFoundError("pynvml is optional")])
@pytest.mark.parametrize("lost", ["utilization", "memory_stats"])
def test_a_gpu_that_can_not_be_measured_is_logged_once_and_left_out(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, lost: str, error: Exception
) -> None:
    def fails(device: torch.device) -> None:
        raise error

    monkeypatch.setattr(torch.cuda, "utilization", lambda device: 50)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: STATS)
    monkeypatch.setattr(torch.cuda, lost, fails)
    measured = Usage(torch.device("cuda:0"))
    for _ in range(3):
        clock.now += 2.0
        add(measured, measured.share().machine)
    told = measured.flush(at_once=True)
    assert told is not None
    memory = {"gpu_memory_gb": 2.0, "gpu_peak_memory_gb": 1.0, "gpu_alloc_retries": 3}
    left = {"utilization": memory, "memory_stats": {"gpu_percent": 50.0}}[lost]
    assert {name: value for name, value in told.items() if name.startswith("gpu")} == left
    assert {"cpu_cores", "memory_gb"} <= told.keys()
    names = [] if isinstance(error, ModuleNotFoundError) else [type(error).__name__]
    assert [name in line for name, line in zip(names, caplog.messages, strict=True)] == [True] * len(names)


class FakeNvml:
    """As the driver's library: fills in what it is given, and returns an error code."""

    def __init__(self, code: int = 0) -> None:
        self.code = code

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, handle: Any) -> int:
        handle._obj.value = 7 if uuid == b"GPU-1-2" else 0  # noqa: SLF001 - what a `byref` refers to
        return 0

    def nvmlDeviceGetUtilizationRates(self, handle: Any, rates: Any) -> int:
        rates._obj.gpu, rates._obj.memory = (43, 5) if handle.value == 7 else (0, 0)  # noqa: SLF001
        return self.code


GPU = torch.device("cuda:0")


def test_the_drivers_library_tells_how_busy_a_gpu_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="1-2"))
    assert busy_percent(GPU, FakeNvml()) == 43.0
    with pytest.raises(RuntimeError, match="NVML returned error 3"):
        busy_percent(GPU, FakeNvml(code=3))


def test_without_pynvml_the_drivers_library_is_asked(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(device: torch.device) -> None:
        raise ModuleNotFoundError("pynvml")

    monkeypatch.setattr(torch.cuda, "utilization", missing)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: STATS)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="1-2"))
    monkeypatch.setattr(usage, "busy_percent", lambda device: busy_percent(device, FakeNvml()))
    measured = Usage(GPU)
    clock.now += 2.0
    assert measured.share().machine["gpu_percent"] == 43.0


def test_a_machine_that_can_not_be_measured_is_left_out(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(path: str) -> None:
        raise ValueError("not the /proc that we know")

    monkeypatch.setattr(usage, "Path", fails)
    measured = Usage(CPU)
    clock.now += 2.0
    assert measured.share().machine == {}
    add(measured, {}, {"cpu_cores": 1.0, "memory_gb": 2.0})
    assert measured.flush(at_once=True) == {"cpu_cores": 1.0, "memory_gb": 2.0}


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_processes_that_load_data_count(clock: Clock) -> None:
    measured = Usage(CPU)
    # Ended by its standard input, when it has spent half a second of CPU time.
    work = "import time\nwhile time.process_time() < 0.5: pass\nprint('done', flush=True)\ninput()"
    found: list[Mapping[str, float]] = []

    def train() -> None:
        with subprocess.Popen([sys.executable, "-c", work], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
            assert child.stdout is not None
            assert child.stdin is not None
            child.stdout.readline()
            clock.now += 2
            found.append(measured.share().machine)
            child.stdin.write(b"\n")

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    [machine] = found
    assert 0.2 <= machine["cpu_cores"] < 1, "0.5 s of two, but for the kernel's clock, and what starting it took"


def test_flops_are_any_positive_number_also_numpys(tmp_path: Path) -> None:
    with use_host(FakeHost(tmp_path)), pytorch.init() as context:
        for right in ("count", 5, 0.5, np.int64(5), np.float32(5)):
            context.set_flops_per_record(right)
        for wrong in ("5", 0, -1, float("nan"), float("inf"), None):
            with pytest.raises(ValueError, match='takes a positive number or "count", got'):
                context.set_flops_per_record(wrong)  # type: ignore[arg-type]


class SlowData(Ones):
    def __getitem__(self, index: int) -> torch.Tensor:
        threading.Event().wait(0.002)
        return super().__getitem__(index)


class Slow(OneWeight):
    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        super().__init__(context)
        context.set_flops_per_record("count")

    def get_batch_tokens(self, batch: torch.Tensor) -> int:
        return 7 * batch.numel()

    def build_training_data_loader(self) -> pytorch.DataLoader:
        return pytorch.DataLoader(SlowData(10), batch_size=2)


def test_a_trials_last_report_says_where_its_time_went(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage, "REPORT_EVERY_S", float("inf"))  # none in between, however slow the machine is
    host = FakeHost(tmp_path)
    began = usage.time.monotonic()
    with use_host(host), pytorch.init(hparams={}, enable_tensorboard_logging=False) as context:
        trial = Slow(context)
        pytorch.Trainer(trial, context).fit(
            max_length=pytorch.Batch(20), validation_period=pytorch.Batch(5), checkpoint_policy="all"
        )
    elapsed = usage.time.monotonic() - began
    told: list[Any] = [report.system for report in host.reports]
    assert told[:-1] == [None] * (len(told) - 1)
    seconds = {name: value for name, value in told[-1].items() if name.endswith("_s")}
    assert set(seconds) == {"training_s", "data_s", "validating_s", "checkpointing_s", "waiting_s"}
    assert seconds["data_s"] >= 20 * 2 * 0.002
    assert sum(seconds.values()) <= elapsed
    speed = 20 / (seconds["training_s"] + seconds["data_s"])
    assert told[-1]["batches_per_second"] == pytest.approx(speed)
    assert told[-1]["records_per_second"] == pytest.approx(2 * speed)
    assert told[-1]["tokens_per_second"] == pytest.approx(14 * speed)
    flops_per_record = 4  # a product and a sum, forward and backward
    assert told[-1]["tflops_per_slot"] == pytest.approx(2 * speed * flops_per_record / 1e12)
    assert trial.weight == pytest.approx(one_weight(20)), "counting changes nothing"
    assert all(report.system is None for report in host.committed), "of two equal runs, checkpoints are equal"


def read(directory: Path) -> Any:
    """The events that TensorBoard reads from a directory."""
    shown = EventAccumulator(str(directory), size_guidance={"scalars": 0})
    shown.Reload()
    return shown


@given(st.binary())
def test_checksums_are_those_of_tensorboard(data: bytes) -> None:
    assert event_file.crc32c(data) == crc32c(data)


@given(
    st.floats(0, 1e11),
    st.integers(0, 2**62),
    st.dictionaries(st.text(max_size=200), st.floats(width=32, allow_nan=False)),
)
def test_an_event_says_what_it_was_given(wall_time: float, step: int, values: dict[str, float]) -> None:
    event = Event.FromString(event_file.scalars(wall_time, step, values))
    assert (event.wall_time, event.step) == (wall_time, step)
    assert [(value.tag, value.simple_value) for value in event.summary.value] == list(values.items())


@pytest.mark.parametrize(
    ("value", "shown"), [(1e300, math.inf), (-1e300, -math.inf), (math.inf, math.inf), (math.nan, math.nan)]
)
def test_what_no_float_holds_is_infinite_and_nan_stays(value: float, shown: float) -> None:
    (found,) = Event.FromString(event_file.scalars(1.0, 1, {"x": value})).summary.value
    assert found.simple_value == pytest.approx(shown, nan_ok=True)


@pytest.mark.parametrize("pids", [[7] * 12, range(103, 91, -1)], ids=["one process", "one after another"])
def test_files_are_read_in_the_order_in_which_they_were_made(
    pids: Iterable[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = []
    for pid in pids:
        monkeypatch.setattr("os.getpid", lambda pid=pid: pid)
        files.append(EventFile(tmp_path))
    assert [file.path for file in files] == sorted(tmp_path.iterdir())
    for file in files:
        file.close()


HPARAMS = st.dictionaries(st.text(max_size=200), st.booleans() | st.floats(allow_nan=False) | st.text(max_size=200))


@given(st.floats(0, 1e11), HPARAMS)
def test_hyperparameters_are_what_tensorboards_page_reads(
    wall_time: float, values: dict[str, bool | float | str]
) -> None:
    event = Event.FromString(event_file.hparams(wall_time, values))
    [found] = event.summary.value
    assert (event.wall_time, found.tag) == (wall_time, metadata.SESSION_START_INFO_TAG)
    assert found.metadata.plugin_data.plugin_name == metadata.PLUGIN_NAME
    info = metadata.parse_session_start_info_plugin_data(found.metadata.plugin_data.content)
    assert info.start_time_secs == wall_time
    read = {name: getattr(value, value.WhichOneof("kind")) for name, value in info.hparams.items()}
    assert read == values
    assert {name: type(value) for name, value in read.items()} == {name: type(value) for name, value in values.items()}
