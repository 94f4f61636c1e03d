"""Where a trial's time goes, its machine usage, and its FLOPs."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import os
import re
import socket
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar

import torch

from dray.training.step_timer import StepTimer, over_ranks


class _Rates(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


def busy_percent(device: torch.device, library: Any = None) -> float:
    """The share of time in which a kernel ran on a GPU lately. `library`: by default, the driver's.

    Raises:
        OSError: there is no such library.
        RuntimeError: it does not tell, for example for a part of a GPU (MIG).
    """
    nvml = library or _library()
    uuid = torch.cuda.get_device_properties(device).uuid
    handle, rates = ctypes.c_void_p(), _Rates()
    _check(nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}".encode(), ctypes.byref(handle)))
    _check(nvml.nvmlDeviceGetUtilizationRates(handle, ctypes.byref(rates)))
    return float(rates.gpu)


@functools.cache
def _library() -> Any:
    nvml = ctypes.CDLL("libnvidia-ml.so.1")
    _check(nvml.nvmlInit_v2())
    return nvml


def _check(code: int) -> None:
    if code != 0:
        raise RuntimeError(f"NVML returned error {code}")


#: FLOPs per record, or "count" to count them in the first batch; None: unknown.
Flops: TypeAlias = float | Literal["count"] | None

_PEAK_TFLOPS: list[tuple[str, float]] = [
    ("GB300", 2500), ("B300", 2250), ("GB200", 2500), ("B200", 2250),
    ("GH200", 989), ("H200 NVL", 836), ("H200", 989), ("H100 NVL", 835), ("H100 PCIE", 756), ("H100", 989),
    ("H800 PCIE", 756), ("H800", 989), ("H20", 148),
    ("RTX PRO 6000", 503), ("RTX 6000 ADA", 364), ("RTX A6000", 155), ("A6000", 155),
    ("RTX 5090", 210), ("RTX 4090", 165), ("RTX 3090", 71),
    ("L40S", 362), ("L40", 181), ("L20", 119.5), ("L4", 121),
    ("A100", 312), ("A800", 312), ("A40", 150), ("A30", 165), ("A10G", 70), ("A10", 125),
    ("V100", 125), ("T4", 65), ("P100", 21), ("P4", 5.5),
    ("MI355X", 2500), ("MI350X", 2300), ("MI325X", 1307), ("MI308X", 188), ("MI300X", 1307), ("MI300A", 981),
    ("MI250X", 191.5), ("MI250", 181), ("MI210", 181), ("MI100", 92),
]  # fmt: skip
"""The peaks of dense bfloat16 (else float16, else float32) in the vendors' data sheets, by words in the GPU's name; the
first match counts. torch sees each half of an MI250X as a GPU."""


def peak_flops(gpu: str) -> float | None:
    """The peak of a GPU in FLOPs per second, without sparsity, by torch's name for it; None if unknown.

    >>> peak_flops("NVIDIA H100 80GB HBM3")
    989000000000000.0
    >>> peak_flops("NVIDIA A100-SXM4-40GB MIG 1g.5gb")  # a part of a GPU
    """
    words = set(re.split(r"\W+", gpu.upper()))
    if "MIG" in words:
        return None
    return next((tflops * 1e12 for name, tflops in _PEAK_TFLOPS if words.issuperset(name.split())), None)


def count_flops(function: Callable[..., Any]) -> tuple[Any, int]:
    """Call a function; return its result, and the FLOPs of its matrix products, convolutions and attention, forward and
    backward. Compiled code runs without its compiler meanwhile."""
    from torch.utils.flop_counter import FlopCounterMode

    eager = torch.compiler.set_stance("force_eager")  # otherwise torch never compiles code that first runs in this mode
    with eager, warnings.catch_warnings(), FlopCounterMode(display=False) as counter:
        warnings.filterwarnings("ignore", ".*when there are global hooks on modules")  # the counter's own
        result = function()
    return result, counter.get_total_flops()


log = logging.getLogger(__name__)

T = TypeVar("T")

REPORT_EVERY_S = 5.0  # besides reports at rungs and at the end of a trial
MEASURE_EVERY_S = 1.0  # a measurement of the machine takes about 0.1 ms

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


def _mean(values: list[float]) -> float:
    """Not statistics.fmean, whose import takes 3 ms."""
    return sum(values) / len(values)


#: The machine usage of a rank and its DataLoader workers, with the function that reduces it over ranks.
OVER_RANKS: dict[str, Callable[[list[Any]], float]] = {
    "cpu_cores": sum,  # seconds of CPU time per second
    "memory_gb": sum,  # resident; memory that processes share counts in each
    "host_wait_percent": _mean,  # share of the training time in which a rank waited for data
    "device_wait_percent": _mean,  # and in which it waited for its GPU
    "gpu_percent": _mean,  # share of the time in which a kernel ran
    "gpu_memory_gb": max,  # reserved by torch
    "gpu_peak_memory_gb": max,  # the maximum that tensors have occupied since the trial began
    "gpu_alloc_retries": sum,  # torch ran short of memory, and freed its cached blocks
    "gpu_ooms": sum,  # it was out of memory even then
}


@dataclass(frozen=True, slots=True)
class UsageShare:
    """One rank's part of a report."""

    machine: Mapping[str, float]  # figures that could be measured
    records: float
    tokens: float
    node: str = field(default_factory=socket.gethostname)


class Usage:
    """Measures one rank's usage. `flops_per_record`: forward and backward, on all ranks that share a record."""

    def __init__(self, device: torch.device, flops_per_record: Flops = None) -> None:
        self.flops_per_record = flops_per_record
        self.steps = StepTimer(device)
        self._records = self._tokens = 0.0
        self._known_data_s = 0.0  # of `steps.data_s`, at the last `flush`
        self._work = 0.0, 0.0
        self._spent = dict.fromkeys(("training", "validating", "checkpointing", "waiting"), 0.0)
        self._saved = 0.0
        self._flushed_at, self._batches = time.monotonic(), 0
        self._device = device
        self._failed: set[str] = set()
        self._cpu_s: dict[str, float] = {}
        self._measured_at = time.monotonic()
        self._measured("cpu_cores", lambda: self._grown_cpu_s(_processes()))
        self._machine: Mapping[str, float] = {}
        self._ranks: Sequence[UsageShare] = ()

    def trained(self, records: float, tokens: float, data_s: float) -> None:
        """Add trained records and tokens, and the time `data_s` that this rank waited for data, a part of the training
        time in `record`."""
        self._records += records
        self._tokens += tokens
        self.steps.end(data_s)

    def record(self, phase: str, seconds: float, batches: int = 0) -> None:
        """Add time of a phase: training, validating, or waiting (for the search or the other ranks)."""
        self._spent[phase] += seconds
        self._batches += batches
        if phase == "waiting":
            self._spent[phase], self._saved = self._spent[phase] - self._saved, 0.0

    def saved(self, seconds: float) -> None:
        """Add time of saving, a part of the waiting time that is recorded next."""
        self._spent["checkpointing"] += seconds
        self._saved += seconds

    def _measure(self) -> Mapping[str, float]:
        now, device = time.monotonic(), self._device
        elapsed = now - self._measured_at
        if elapsed >= MEASURE_EVERY_S or (not self._machine and elapsed > 0.05):
            figures: dict[str, float | None] = {}
            if (processes := self._measured("processes", _processes)) is not None:
                cpu_s = self._measured("cpu_cores", lambda: self._grown_cpu_s(processes))
                figures["cpu_cores"] = None if cpu_s is None else cpu_s / elapsed
                figures["memory_gb"] = self._measured("memory_gb", lambda: _memory_gb_of(processes))
            if device.type == "cuda":
                figures.update(self._measured("gpu_memory_gb", lambda: _gpu_memory(device)) or {})
                figures["gpu_percent"] = self._measured("gpu_percent", lambda: _gpu_percent(device))
            figures.update(self._measured("step times", self.steps.figures) or {})
            self._machine = {name: value for name, value in figures.items() if value is not None}
            self._measured_at = now
        return self._machine

    def _measured(self, name: str, measure: Callable[[], T]) -> T | None:
        """The result of `measure`; None once it has failed."""
        if name in self._failed:
            return None
        try:
            return measure()
        # Any exception: NVML's errors (MIG devices, missing permissions) have no common base class.
        except Exception as error:
            self._failed.add(name)
            if not isinstance(error, ModuleNotFoundError | OSError):  # there is no library to ask
                log.warning("%s can't be measured from now on: %s: %s", name, type(error).__name__, error)
            return None

    def _grown_cpu_s(self, processes: Sequence[str]) -> float:
        before, self._cpu_s = self._cpu_s, _cpu_s_of(processes)
        return sum(seconds - before.get(process, 0.0) for process, seconds in self._cpu_s.items())

    def share(self) -> UsageShare:
        """This rank's machine usage, at most a second old, and its records and tokens since the last call."""
        share = UsageShare(self._measure(), float(self._records), float(self._tokens))
        self._records = self._tokens = 0.0
        return share

    def add_ranks(self, ranks: Sequence[UsageShare], distinct: Sequence[UsageShare]) -> None:
        """Add the shares of all ranks; `distinct` are those of ranks with different data."""
        self._ranks = ranks
        records, tokens = self._work
        self._work = records + sum(each.records for each in distinct), tokens + sum(each.tokens for each in distinct)

    def flush(self, *, at_once: bool) -> dict[str, float] | None:
        """The usage since the last call, if a report is due or `at_once`; otherwise None.

        It has the seconds spent in each phase: training_s, data_s (waiting for data), validating_s, checkpointing_s
        (while training waited), waiting_s. Phases that took no time are left out. The rates of batches, and of all
        ranks' records, tokens and FLOPs, are over the time of training and waiting for data. Machine usage is reduced
        by `OVER_RANKS`, and step times by `over_ranks`.
        """
        now = time.monotonic()
        if not at_once and now - self._flushed_at < REPORT_EVERY_S:
            return None
        training, data_s = self._spent["training"], self.steps.data_s - self._known_data_s
        seconds = {"training": 0.0, "data": data_s, **self._spent}
        seconds["training"] -= data_s
        figures = {f"{phase}_s": value for phase, value in seconds.items() if value > 0}
        if self._batches and training > 0:
            figures["batches_per_second"] = self._batches / training
            figures.update(self._throughput(training))
        for name, reduce in OVER_RANKS.items():
            if known := [each.machine[name] for each in self._ranks if name in each.machine]:
                figures[name] = reduce(known)
        figures.update(over_ranks([each.machine for each in self._ranks], [each.node for each in self._ranks]))
        self._known_data_s = self.steps.data_s
        self._spent = dict.fromkeys(self._spent, 0.0)
        self._flushed_at, self._batches, self._work = now, 0, (0.0, 0.0)
        return figures or None

    def _throughput(self, seconds: float) -> dict[str, float]:
        records, tokens = (work / seconds for work in self._work)
        figures = {"records_per_second": records, "tokens_per_second": tokens}
        if isinstance(self.flops_per_record, int | float):
            flops = self.flops_per_record * records / max(1, len(self._ranks))
            figures["tflops_per_slot"] = flops / 1e12
            if self._device.type == "cuda" and (peak := peak_flops(torch.cuda.get_device_name(self._device))):
                figures["mfu_percent"] = 100 * flops / peak
        return {name: value for name, value in figures.items() if value > 0}


def _gpu_percent(device: torch.device) -> float:
    try:
        return float(torch.cuda.utilization(device))
    except ModuleNotFoundError:  # torch asks pynvml or amdsmi, which few have installed
        return busy_percent(device)


def _gpu_memory(device: torch.device) -> dict[str, float | None]:
    """Figures of torch's allocator; counts of 0 are None."""
    stats = torch.cuda.memory_stats(device)  # {} before the GPU is used
    return {
        "gpu_memory_gb": stats.get("reserved_bytes.all.current", 0) / 1e9,
        "gpu_peak_memory_gb": stats.get("allocated_bytes.all.peak", 0) / 1e9,
        "gpu_alloc_retries": stats.get("num_alloc_retries") or None,
        "gpu_ooms": stats.get("num_ooms") or None,
    }


def _processes() -> list[str]:
    """This process, and the children of this thread, its DataLoader workers."""
    with contextlib.suppress(OSError):  # not Linux
        return ["self", *Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text().split()]
    return ["self"]


def _cpu_s_of(processes: Sequence[str]) -> dict[str, float]:
    seconds = {"self": time.process_time()}
    for process in processes[1:]:
        with contextlib.suppress(OSError, ValueError):  # the process has ended
            fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
            seconds[process] = (int(fields[11]) + int(fields[12])) / _TICKS
    return seconds


def _memory_gb_of(processes: Sequence[str]) -> float:
    pages = 0
    for process in processes:
        with contextlib.suppress(OSError, ValueError):
            pages += int(Path(f"/proc/{process}/statm").read_text().split()[1])
    return pages * _PAGE / 1e9
