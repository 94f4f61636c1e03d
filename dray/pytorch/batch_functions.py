"""What the data loader and the context do, as functions for your own loops."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import BatchSampler

from dray.pytorch import samplers
from dray.pytorch.data import ToDevice, batch_length


def to_device(data: Any, device: torch.device, warned_types: set[type] | None = None) -> Any:
    """Move a batch to a device, as `context.to_device`.

    Args:
        data: tensors, arrays, whatever has a method `to`; and dicts, lists and tuples of them. Anything else stays.
        device: the device to move it to.
        warned_types: types that were warned about before; others are warned about once, and added.

    >>> to_device({"x": [torch.zeros(2)]}, torch.device("cpu"))
    {'x': [tensor([0., 0.])]}
    """
    move = ToDevice(device)
    if warned_types is not None:
        move._warned = warned_types
    return move(data)


def data_length(data: Any) -> int:
    """Records in a batch, as `PyTorchTrial.get_batch_length` counts them.

    Raises:
        ValueError: the batch is empty.
        TypeError: it is of another type.

    >>> data_length([torch.zeros(3, 2), torch.zeros(3)])
    3
    """
    return batch_length(data)


def adapt_batch_sampler(
    batch_sampler: BatchSampler, repeat: bool = False, skip: int = 0, num_replicas: int = 1, rank: int = 0
) -> BatchSampler:
    """One process's share of the batches, from where it resumes.

    Args:
        batch_sampler: gives all batches, in the same order in all processes.
        repeat: repeat them endlessly.
        skip: batches of this process to leave out at the beginning.
        num_replicas: number of processes.
        rank: which of them this is, from 0.

    >>> every = BatchSampler(range(8), batch_size=2, drop_last=False)
    >>> list(adapt_batch_sampler(every, skip=1, num_replicas=2, rank=1))
    [[6, 7]]
    """
    if repeat:
        batch_sampler = samplers.RepeatBatchSampler(batch_sampler)
    if num_replicas > 1:
        batch_sampler = samplers.DistributedBatchSampler(batch_sampler, num_replicas, rank)
    return samplers.SkipBatchSampler(batch_sampler, skip) if skip > 0 else batch_sampler
