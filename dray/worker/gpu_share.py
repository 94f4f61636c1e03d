"""A process's share of a GPU's memory: several trials may use one GPU, each in its own process."""

from __future__ import annotations

import time

import torch

CONTEXT_BYTES = 1 << 30
"""What a process uses of a GPU besides its tensors: CUDA's context (534 MiB on an H100) and the kernels that it loads.
torch's allocator does not count it. Not measured: while one process starts, the others allocate."""
FREE = 3 / 4
"""How much of its share of a GPU a process finds free; other programs, such as a desktop, may use the rest."""
WAIT_S = 30.0
CHECK_EVERY_S = 0.2


def wait_for_gpu_memory(device: torch.device, trials: int) -> None:
    """Wait until a process's share of a GPU is free, but no longer than `WAIT_S`: others may use it for good.

    Ray gives a GPU to the next process as soon as one has died, whose memory may take seconds to be freed.
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

    A tensor beyond it raises ``torch.OutOfMemoryError`` here, and the other trials keep their shares. The limit is that
    of torch's allocator: memory that others allocate, such as NCCL, is not limited. A trial may change the limit, so it
    is set again before each.
    """
    device = torch.cuda.current_device()
    total = torch.cuda.get_device_properties(device).total_memory
    share = total / trials
    torch.cuda.set_per_process_memory_fraction(max(share - CONTEXT_BYTES, share / 2) / total, device)
