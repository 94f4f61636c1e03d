"""What a trial takes of time and of its machine: looked at with its reports, never at a batch."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import torch

EVERY_S = 5.0
"""How often figures are reported, beside those where a search decides, and at the end of a trial."""
LOOK_EVERY_S = 1.0
"""How often a machine is looked at: that takes some 0.1 ms."""

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class Machine:
    """What one rank, with the processes that load its data, takes of its machine.

    Attributes:
        cpu_cores: CPU time by time.
        memory_gb: resident; what processes share is counted in each.
        gpu_memory_gb: that torch holds of its GPU; None without one.
        gpu_percent: of the time that something ran on the GPU; None where ``pynvml`` is not installed.
    """

    cpu_cores: float
    memory_gb: float
    gpu_memory_gb: float | None = None
    gpu_percent: float | None = None


class Usage:
    """One rank's books.

    Args:
        device: that it trains on.

    Attributes:
        data_s: seconds spent so far on waiting for data, a part of what `spent` is told of training.
    """

    __slots__ = (
        "_asks_gpu",
        "_batches",
        "_cpu_s",
        "_device",
        "_looked",
        "_machine",
        "_ranks",
        "_saved",
        "_spent",
        "_taken",
        "data_s",
    )

    def __init__(self, device: torch.device) -> None:
        self.data_s = 0.0
        self._spent = dict.fromkeys(("training", "validating", "checkpointing", "waiting"), 0.0)
        self._saved = 0.0
        self._taken, self._batches = time.monotonic(), 0
        self._device = device
        self._asks_gpu = device.type == "cuda"
        self._cpu_s, self._looked = _cpu_s_of(_processes()), time.monotonic()
        self._machine: Machine | None = None
        self._ranks: Sequence[Machine] = ()

    def spent(self, phase: str, seconds: float, batches: int = 0) -> None:
        """Note time of one of the phases training, validating and waiting (for a search, or for the other ranks)."""
        self._spent[phase] += seconds
        self._batches += batches
        if phase == "waiting":
            self._spent[phase], self._saved = self._spent[phase] - self._saved, 0.0

    def saved(self, seconds: float) -> None:
        """Note time of saving, a part of what `spent` is told of waiting next."""
        self._spent["checkpointing"] += seconds
        self._saved += seconds

    def machine(self) -> Machine | None:
        """What this rank takes, as of a second ago at most."""
        now = time.monotonic()
        elapsed = now - self._looked
        if elapsed >= LOOK_EVERY_S or (self._machine is None and elapsed > 0.05):
            processes = _processes()
            cpu_s = _cpu_s_of(processes)
            grown = sum(seconds - self._cpu_s.get(process, 0.0) for process, seconds in cpu_s.items())
            percent = _gpu_percent(self._device) if self._asks_gpu else None
            self._asks_gpu = percent is not None
            held = torch.cuda.memory_reserved(self._device) / 1e9 if self._device.type == "cuda" else None
            self._machine = Machine(
                cpu_cores=grown / elapsed,
                memory_gb=_memory_gb_of(processes),
                gpu_memory_gb=held,
                gpu_percent=percent,
            )
            self._cpu_s, self._looked = cpu_s, now
        return self._machine

    def hear(self, ranks: Sequence[Machine | None]) -> None:
        """What all ranks take."""
        self._ranks = [machine for machine in ranks if machine is not None]

    def take(self, *, at_once: bool) -> dict[str, float] | None:
        """The figures since they were taken last, if it is time, or `at_once`; what is zero is not among them.

        Seconds by phase: training_s, data_s (waiting for it), validating_s, checkpointing_s (while training waited),
        waiting_s. batches_per_second, of training and waiting for data. Of all ranks together cpu_cores and memory_gb;
        of a mean rank gpu_percent; of the one that has most gpu_memory_gb.
        """
        now = time.monotonic()
        if not at_once and now - self._taken < EVERY_S:
            return None
        training = self._spent["training"]
        seconds = {
            "training_s": max(training - self.data_s, 0.0),
            "data_s": self.data_s,
            "validating_s": self._spent["validating"],
            "checkpointing_s": self._spent["checkpointing"],
            "waiting_s": self._spent["waiting"],
        }
        found = {name: value for name, value in seconds.items() if value > 0}
        if self._batches and training > 0:
            found["batches_per_second"] = self._batches / training
        if self._ranks:
            found["cpu_cores"] = sum(machine.cpu_cores for machine in self._ranks)
            found["memory_gb"] = sum(machine.memory_gb for machine in self._ranks)
            if percents := [machine.gpu_percent for machine in self._ranks if machine.gpu_percent is not None]:
                found["gpu_percent"] = fmean(percents)
            if held := [machine.gpu_memory_gb for machine in self._ranks if machine.gpu_memory_gb is not None]:
                found["gpu_memory_gb"] = max(held)
        self.data_s = 0.0
        self._spent = dict.fromkeys(self._spent, 0.0)
        self._taken, self._batches = now, 0
        return found or None


def _processes() -> list[str]:
    """This process, and those that this thread has started: they load its data."""
    with contextlib.suppress(OSError):  # no Linux
        return ["self", *Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text().split()]
    return ["self"]


def _cpu_s_of(processes: Sequence[str]) -> dict[str, float]:
    """CPU time of each."""
    found = {"self": time.process_time()}
    for process in processes[1:]:
        with contextlib.suppress(OSError, ValueError):  # it has ended
            fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
            found[process] = (int(fields[11]) + int(fields[12])) / _TICKS
    return found


def _memory_gb_of(processes: Sequence[str]) -> float:
    pages = 0
    for process in processes:
        with contextlib.suppress(OSError, ValueError):
            pages += int(Path(f"/proc/{process}/statm").read_text().split()[1])
    return pages * _PAGE / 1e9


def _gpu_percent(device: torch.device) -> float | None:
    try:
        return float(torch.cuda.utilization(device))
    except (ModuleNotFoundError, RuntimeError, AttributeError):  # pynvml is not installed, or does not know this GPU
        return None
