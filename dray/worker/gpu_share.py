"""The memory of a GPU that several trials share, each in its own process."""

from __future__ import annotations

import torch

CONTEXT_BYTES = 512 << 20
"""What a process uses of a GPU besides its tensors: CUDA's context and loaded kernels (some 300 MB at first, pytorch
issue 107667). torch's allocator does not count it."""


def limit_gpu_memory(trials: int) -> None:
    """Limit this process to its share of the current device's memory.

    A tensor beyond it raises ``torch.OutOfMemoryError`` here, and the other trials keep their shares. The limit is that
    of torch's allocator: memory that others allocate, such as NCCL, is not limited. A trial may change the limit, so it
    is set again before each.

    Args:
        trials: how many share the device.
    """
    device = torch.cuda.current_device()
    total = torch.cuda.get_device_properties(device).total_memory
    share = total / trials
    torch.cuda.set_per_process_memory_fraction(max(share - CONTEXT_BYTES, share / 2) / total, device)
