"""`pretrained`: keeps a pretrained model for later trials in the same process, and out of checkpoints."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

import torch

from dray import memory
from dray.pytorch.cached import CachedFunction
from dray.training.pretrained import Pretrained

P = ParamSpec("P")
M = TypeVar("M", bound=torch.nn.Module)

log = logging.getLogger(__name__)


def pretrained(load: Callable[P, M]) -> Callable[P, M]:
    """Load a pretrained model once per process, share its frozen weights among trials, leave them out of checkpoints.

    For fine-tuning with adapters, such as LoRA, or a new head: each call returns a module of its own, to which the
    trial may add layers, but whose parameters are frozen and in memory only once. The next trial in the process starts
    without loading them. A checkpoint has what the trial trains, and the SHA-256 of each pretrained weight; the trial
    that resumes from it must load the same weights, which is checked.

    >>> @pretrained
    ... def base(width: int) -> torch.nn.Module:
    ...     return torch.nn.Linear(width, width)
    >>> first, second = base(2), base(2)
    >>> first is second, first.weight.data_ptr() == second.weight.data_ptr()
    (False, True)

    To train a part of it, set `requires_grad` on its parameters before `wrap_model`: these get memory of their own,
    and are in checkpoints like any other. Buffers belong to each trial. If a trial writes into a frozen weight, which
    torch can't prevent, its checkpoints have that weight, and the next trial loads the model again.

    With several processes the weights are not sent from rank to rank: each loads them, and `Trainer.fit()` checks that
    they are the same. With `FullyShard`, a trial copies its shards from them; then they are in a temporary file, one on
    each machine, instead of each process's memory.

    Args:
        load: returns a `torch.nn.Module`. A function as `pytorch.cached` takes it: at the top level of a module, with
            arguments that are paths, numbers or strings. It is called, and its values are kept and dropped, as there.
            Once the trial uses a GPU, the weights are kept there.

    Raises:
        ValueError: the function is defined within another function.
        TypeError: a call returns no module, or has an argument as `cached` refuses it.
    """
    return _PretrainedFunction(load)


def _fits(module: torch.nn.Module) -> bool:
    """Whether the GPU has room for a module."""
    free, _ = torch.cuda.mem_get_info()
    return sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers())) <= free


class _PretrainedFunction(CachedFunction[P, M]):
    """A function whose modules are kept; returns copies of them."""

    def __init__(self, load: Callable[P, M]) -> None:
        @functools.wraps(load)
        def keep(*args: P.args, **kwargs: P.kwargs) -> Pretrained[M]:
            module = load(*args, **kwargs)
            if not isinstance(module, torch.nn.Module):
                raise TypeError(f"@pytorch.pretrained keeps modules, but {load.__qualname__}() returned {module!r}")
            # One that is larger is to be sharded, and its shards are copied to the GPU.
            return Pretrained(module.cuda() if memory.gpu_in_use() and _fits(module) else module)

        super().__init__("pretrained", cast("Callable[P, M]", keep))

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> M:
        kept = cast("Pretrained[M]", super().__call__(*args, **kwargs))
        if not kept.is_intact():
            log.warning("%s() is called again: an earlier trial has changed its weights", self._make.__qualname__)
            self.forget(*args, **kwargs)
            kept = cast("Pretrained[M]", super().__call__(*args, **kwargs))
        return kept.copy()
