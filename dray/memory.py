"""Memory use of this process, and the memory and cores of its machine or container."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
from pathlib import Path

import torch

_PAGE = os.sysconf("SC_PAGE_SIZE")
_CGROUP = Path("/sys/fs/cgroup")


def own_memory() -> int:
    """Bytes of memory that this process does not share; 0 if unknown."""
    with contextlib.suppress(OSError):
        resident, shared = Path("/proc/self/statm").read_text().split()[1:3]
        return (int(resident) - int(shared)) * _PAGE
    return 0


def gpu_in_use() -> bool:
    """Whether this process has used a GPU."""
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def machine_memory() -> int:
    """Bytes of memory of this machine, or of the container of this process."""
    limits = [os.sysconf("SC_PHYS_PAGES") * _PAGE]
    for place in (_CGROUP / "memory.max", _CGROUP / "memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):  # "max", without a limit
            limits.append(int(place.read_text()))
    return min(limits)


def machine_cores(cgroup: Path = _CGROUP) -> int:
    """CPU cores that this process may use, of this machine or of its container; at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError):  # "max", without a limit
        quota, period = (cgroup / "cpu.max").read_text().split()
        cores = min(cores, int(quota) // int(period))
    return max(1, cores)


MACHINE_MEMORY = machine_memory()


def available_memory(cgroup: Path = _CGROUP, meminfo: Path = Path("/proc/meminfo")) -> int:
    """Bytes that are still available on this machine or in this container; all memory if unknown."""
    available = [MACHINE_MEMORY]
    with contextlib.suppress(OSError, ValueError):
        fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        available.append(int(fields["MemAvailable"].split()[0]) << 10)
    # cgroup versions 2 and 1. Cached files count as used but can be evicted, so they are left out, as in MemAvailable.
    for limit, used, files in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
    ):
        with contextlib.suppress(OSError, ValueError, KeyError):  # "max", without a limit
            stat = (cgroup / used).with_name("memory.stat").read_text()
            cached = int(dict(line.split() for line in stat.splitlines())[files])
            available.append(int((cgroup / limit).read_text()) - int((cgroup / used).read_text()) + cached)
    return max(min(available), 0)


def give_back() -> None:
    """Collect garbage, and release freed memory held by the C library, and by torch for copies to GPUs."""
    gc.collect()
    if gpu_in_use():
        torch._C._host_emptyCache()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
