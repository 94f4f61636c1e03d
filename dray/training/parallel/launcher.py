"""The ranks of a program that passes none: those of its own process group, or those that torchrun has started."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from dray.training.parallel import ddp
from dray.training.parallel.device import backend_for, own_device
from dray.training.parallel.distributed import DistributedContext

_groups = itertools.count()


def launched() -> bool:
    """Whether torchrun, or a launcher built on it (`accelerate launch`), started this process."""
    # RANK and WORLD_SIZE don't say so: dray's and Ray Train's workers set them too, and a shell or a notebook may keep
    # them.
    return dist.is_available() and dist.is_torchelastic_launched()


@contextlib.contextmanager
def process_group(config: Mapping[str, Any] | None) -> Iterator[DistributedContext]:
    """The ranks of this program; with torchrun's, torch.distributed is initialised for the block unless it is already.

    A program that has initialised it without the variables that torchrun sets gets a NotUnderTorchrun.
    """
    initialised = dist.is_available() and dist.is_initialized()
    with contextlib.ExitStack() as stack:
        if not initialised and launched():
            device = own_device(int(os.environ["LOCAL_RANK"]), config)
            gpu = device.type == "cuda"
            if gpu:  # first: NCCL connects the current devices
                torch.cuda.set_device(device)
            store, rank, size = next(rendezvous("env://"))
            # A prefix of its own: in torchrun's store an earlier group has left its addresses.
            store = dist.PrefixStore(f"dray/{next(_groups)}", store)  # type: ignore[attr-defined]
            dist.init_process_group(backend_for(device), store=store, rank=rank, world_size=size)
            initialised = True
            stack.callback(_end, device)
        if not initialised or dist.get_world_size() == 1:
            yield DistributedContext()
            return
        peers = DistributedContext.from_torch_distributed()
        stack.callback(peers.close)
        yield peers


def _end(device: torch.device) -> None:
    if dist.is_initialized():  # the program may have ended it
        with contextlib.suppress(RuntimeError):  # it has failed; another error says why
            ddp.end_group(device)
