"""A process's share of a GPU's memory: several trials may use one GPU, each in its own process."""

from __future__ import annotations

import time

import torch

CONTEXT_BYTES = 1 << 30
"""GPU memory of a process besides its tensors: CUDA's context (534 MiB on an H100) and loaded kernels. torch's
allocator does not count it, and it can't be measured, because other processes allocate while one starts."""
FREE = 3 / 4
"""The part of its share of a GPU that a process must find free; other programs, such as a desktop, may use the rest."""
WAIT_S = 30.0
CHECK_EVERY_S = 0.2


def wait_for_gpu_memory(device: torch.device, trials: int) -> None:
    """Wait until a process's share of a GPU is free, for `WAIT_S` at most, as other programs may keep using it.

    Ray gives a GPU to the next process as soon as the previous one has died, but freeing its memory may take seconds.
    """
    deadline = time.monotonic() + WAIT_S
    while _free_part(device) < FREE / trials and time.monotonic() < deadline:
        time.sleep(CHECK_EVERY_S)


def _free_part(device: torch.device) -> float:
    try:
        free, total = torch.cuda.mem_get_info(device)
    except RuntimeError as error:  # no room for CUDA's context
        if "out of memory" in str(error):
            return 0.0
        raise
    return free / total


def limit_gpu_memory(trials: int) -> None:
    """Limit this process to its share of the current device's memory.

    A tensor beyond the limit raises ``torch.OutOfMemoryError`` here, and the other trials keep their shares. It is the
    limit of torch's allocator: other memory, such as NCCL's, is not limited. It is set before each trial, because a
    trial may change it.
    """
    device = torch.cuda.current_device()
    total = torch.cuda.get_device_properties(device).total_memory
    share = total / trials
    torch.cuda.set_per_process_memory_fraction(max(share - CONTEXT_BYTES, share / 2) / total, device)
