"""What clients send is read in a process of its own, within limits of time and memory.

A patch, an archive or a config of some hundred kilobytes can be made so that reading it takes minutes or gigabytes. In
the server's process, that would hold up all requests and all experiments.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from dray.errors import Invalid

T = TypeVar("T")

CPU_S = 30.0
WALL_S = 300  # longer than `dray.code.trial_import` takes at most
MEMORY_BYTES = 4 << 30  # with the modules that the process begins with: torch takes 1 GiB


def outside(function: Callable[..., T], *given: Any) -> T:
    """Call a function of a module in a new process, a fork of the one that experiments' processes are forked from.
    Raises what the function does, and `Invalid` if it exceeds the limits."""
    limits = CPU_S, WALL_S, MEMORY_BYTES
    with ProcessPoolExecutor(1, multiprocessing.get_context("forkserver"), _limit, limits) as pool:
        try:
            return pool.submit(function, *given).result()
        except (BrokenProcessPool, MemoryError):
            within = f"{CPU_S:g} s of CPU time and {MEMORY_BYTES >> 20:,} MiB of memory"
            raise Invalid(f"what was sent can't be read within {within}") from None


def _limit(cpu_s: float, wall_s: int, memory_bytes: int) -> None:
    """Limit this process. Its children inherit only the limit of memory, which `dray.code.trial_import` lifts."""
    os.setsid()  # Ctrl-C in the server's terminal is for the server
    with suppress(OSError):  # if memory is short, this process is the first to be killed
        Path("/proc/self/oom_score_adj").write_text("1000")
    signal.setitimer(signal.ITIMER_PROF, cpu_s)  # a slow disk is no fault of what was sent
    signal.alarm(wall_s)
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]  # not RLIMIT_AS: CUDA reserves more than there is
    soft = memory_bytes if hard == resource.RLIM_INFINITY else min(memory_bytes, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
