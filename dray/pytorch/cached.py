"""`cached` and `pretrained`: keep a function's results, or a pretrained model, for later trials in the same process."""

from __future__ import annotations

import functools
import inspect
import itertools
import logging
import os
import threading
import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Generic, ParamSpec, TypeVar, cast

import torch

from dray import memory
from dray.pytorch.context import PyTorchTrialContext
from dray.pytorch.trial import PyTorchTrial
from dray.training import rng
from dray.training.pretrained import Pretrained

P = ParamSpec("P")
T = TypeVar("T")
M = TypeVar("M", bound=torch.nn.Module)

log = logging.getLogger(__name__)

LOW_MEMORY = 1 / 10  # the available share of memory below which values are dropped; at 1/20 Ray kills workers

_BOUND_TO_TRIAL = (torch.Tensor, torch.nn.Module, PyTorchTrial, PyTorchTrialContext)


def cached(make: Callable[P, T]) -> Callable[P, T]:
    """Keep a function's results for later calls with equal arguments, including those of later trials in the process.

    Use it for values that don't depend on the trial, such as a dataset: successive trials of an experiment share a
    process, which makes each value once.

    >>> @cached
    ... def squares(count: int) -> torch.Tensor:
    ...     return torch.arange(count) ** 2
    >>> squares(4)
    tensor([0, 1, 4, 9])
    >>> squares(4) is squares(count=4)
    True

    All trials get the same object. Treat it as read-only, and make everything that is random or differs between trials,
    such as the DataLoader, on top of it. The function should depend only on its arguments. While it runs, Python's,
    NumPy's and torch's RNGs are seeded with 0; afterwards their states are restored. So a random split is the same in
    every process, and the trial's own random numbers do not depend on whether the value was kept or made.

    If less than a tenth of the machine's memory is available when a trial begins or a value is made, the least recently
    used values are dropped, and made again when needed. GPU memory is not watched.

    Each rank is a process with its own values. Forked DataLoader workers inherit them.

    Args:
        make: a function or class at the top level of a module. Its arguments must be hashable values that are equal
            from trial to trial: paths, numbers, strings.

    Raises:
        ValueError: the function is defined within another function, so each trial would have a different one.
        TypeError: an argument of a call belongs to one trial (a context, a model, a tensor), or can't be hashed.
    """
    return CachedFunction("cached", make)


@dataclass(slots=True)
class _Kept(Generic[T]):
    value: T
    size: int
    gpu_size: int
    used: int


class CachedFunction(Generic[P, T]):
    """A function whose values are kept while the function exists, or until memory is low. `name` is the decorator's."""

    def __init__(self, name: str, make: Callable[P, T]) -> None:
        if "<locals>" in getattr(make, "__qualname__", "<locals>"):
            raise ValueError(
                f"{name}() can't keep values of {make!r}, which is a new function each time the code around it runs; "
                "define it at the top level of a module"
            )
        functools.update_wrapper(self, make)
        self._make, self._signature = make, inspect.signature(make)
        self.kept: dict[Hashable, _Kept[T]] = {}
        _functions.add(self)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        key = self._key(*args, **kwargs)
        with _lock:
            kept = self.kept.get(key)
            if kept is None:
                drop_if_low()
                before = bytes_without_kept()
                with rng.seeded(0):
                    value = self._make(*args, **kwargs)
                size, gpu_size = (max(now - then, 0) for now, then in zip(bytes_without_kept(), before, strict=True))
                kept = self.kept[key] = _Kept(value, size, gpu_size, used=0)
            kept.used = next(_uses)
            return kept.value

    def forget(self, *args: P.args, **kwargs: P.kwargs) -> None:
        """Drop the value for these arguments."""
        with _lock:
            self.kept.pop(self._key(*args, **kwargs), None)

    def __reduce__(self) -> str:
        return str(self._make.__qualname__)  # pickled by name, like a function, without the values

    def _key(self, *args: P.args, **kwargs: P.kwargs) -> Hashable:
        given = self._signature.bind(*args, **kwargs)
        given.apply_defaults()
        for value in (*given.args, *given.kwargs.values()):
            if isinstance(value, _BOUND_TO_TRIAL):
                raise TypeError(
                    f"{self._make.__qualname__}() is cached from trial to trial, but got a {type(value).__name__}, "
                    "which belongs to one trial; pass plain values, such as context.get_hparam(...)"
                )
        named = sorted(given.kwargs.items())
        # The types are part of the key, because 1, 1.0 and True are equal.
        key = given.args, tuple(named), tuple(type(value) for value in (*given.args, *dict(named).values()))
        try:
            hash(key)
        except TypeError as error:
            raise TypeError(
                f"{self._make.__qualname__}() is cached by its arguments, of which one can't be hashed ({error}); pass "
                "plain values, such as a tuple instead of a list"
            ) from None
        return key


_functions: weakref.WeakSet[CachedFunction[Any, Any]] = weakref.WeakSet()
_uses = itertools.count()
_lock = threading.RLock()  # a single one, because a cached function may call another


def _unlock() -> None:
    """Replace the lock in a forked process, where the thread that may hold it does not exist."""
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_unlock)


def _in_file(value: object) -> bool:
    """Whether dropping a value would free no memory."""
    return isinstance(value, Pretrained) and value.in_file


def kept_bytes() -> tuple[int, int]:
    """The bytes that the kept values take in this process and on its GPU, measured when each was made."""
    with _lock:
        kept = [kept for function in _functions for kept in function.kept.values()]
        kept = [each for each in kept if not _in_file(each.value)]
        return sum(each.size for each in kept), sum(each.gpu_size for each in kept)


def drop_if_low() -> None:
    """Drop the least recently used values while less than `LOW_MEMORY` of the machine's memory is available."""
    with _lock:
        kept = [
            (kept.used, key, function)
            for function in _functions
            for key, kept in function.kept.items()
            if not _in_file(kept.value)
        ]
        for _, key, function in sorted(kept, key=lambda each: each[0]):
            if memory.available_memory() >= LOW_MEMORY * memory.MACHINE_MEMORY:
                return
            memory.give_back()  # the memory that earlier trials have freed may suffice
            if memory.available_memory() >= LOW_MEMORY * memory.MACHINE_MEMORY:
                return
            del function.kept[key]
        if kept:
            memory.give_back()


def drop_all() -> bool:
    """Drop all values, and return whether there were any."""
    with _lock:
        had_values = any(function.kept for function in _functions)
        for function in _functions:
            function.kept.clear()
        return had_values


def bytes_without_kept() -> tuple[int, int]:
    """The bytes that this process and its GPU use, without the kept values: making one may keep others too."""
    size, gpu_size = kept_bytes()
    gpu = torch.cuda.memory_allocated() if memory.gpu_in_use() else 0
    return memory.own_memory() - size, gpu - gpu_size


def pretrained(load: Callable[P, M]) -> Callable[P, M]:
    """Load a pretrained model once per process, share its frozen weights among trials, leave them out of checkpoints.

    For fine-tuning with adapters (LoRA) or a new head. Each call returns a new module, to which the trial may add
    layers; its pretrained parameters are frozen, and in memory only once. A checkpoint holds the parameters that the
    trial trains, and the SHA-256 of each pretrained weight: a trial that resumes from it must load the same weights.

    >>> @pretrained
    ... def base(width: int) -> torch.nn.Module:
    ...     return torch.nn.Linear(width, width)
    >>> first, second = base(2), base(2)
    >>> first is second, first.weight.data_ptr() == second.weight.data_ptr()
    (False, True)

    To train a part of the model, set `requires_grad` on its parameters before `wrap_model`: they get their own memory,
    and are saved in checkpoints like any other. Each trial has its own buffers. If a trial writes into a frozen weight,
    which torch can't prevent, its checkpoints include that weight, and the next trial loads the model again.

    Each rank loads the weights, and `Trainer.fit()` checks that they are equal. With `FullyShard`, a trial copies its
    shards from them, after which the weights are in one temporary file per machine instead of each process's memory.

    Args:
        load: a function as for `pytorch.cached`, at the top level of a module and with paths, numbers or strings as
            arguments, that returns a `torch.nn.Module`. Once the trial uses a GPU, the weights are kept there.

    Raises:
        ValueError: the function is defined within another function.
        TypeError: a call returns something other than a module, or has an argument that `cached` refuses.
    """
    return _PretrainedFunction(load)


def _fits(module: torch.nn.Module) -> bool:
    free, _ = torch.cuda.mem_get_info()
    return sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers())) <= free


class _PretrainedFunction(CachedFunction[P, M]):
    def __init__(self, load: Callable[P, M]) -> None:
        @functools.wraps(load)
        def keep(*args: P.args, **kwargs: P.kwargs) -> Pretrained[M]:
            module = load(*args, **kwargs)
            if not isinstance(module, torch.nn.Module):
                raise TypeError(f"@pytorch.pretrained keeps modules, but {load.__qualname__}() returned {module!r}")
            # A larger module will be sharded, and only its shards copied to the GPU.
            return Pretrained(module.cuda() if memory.gpu_in_use() and _fits(module) else module)

        super().__init__("pretrained", cast("Callable[P, M]", keep))

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> M:
        kept = cast("Pretrained[M]", super().__call__(*args, **kwargs))
        if not kept.is_intact():
            log.warning("%s() is called again: an earlier trial has changed its weights", self._make.__qualname__)
            self.forget(*args, **kwargs)
            kept = cast("Pretrained[M]", super().__call__(*args, **kwargs))
        return kept.copy()
