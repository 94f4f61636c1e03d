"""The process-wide settings that training code changes, with functions that read and restore them.

Not listed: thread-local state (grad mode, autocast, the default device), because each trial has its own thread; the
random number generators, which every trial seeds; and settings that rarely differ between trials, such as attention
kernels, anomaly detection, the locale or print options. Those need ``resources.reuse_workers: false``.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import multiprocessing
import operator
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.backends import cuda, cudnn

from dray.training.parallel import ddp


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting: its name for messages, a function that returns a copy of its current value for comparisons with
    ``==``, and a function that sets it."""

    name: str
    get: Callable[[], Any]
    put: Callable[[Any], Any]


# -------------------------------------------------------------------------------------------------------------- Python
def _set_environment(value: dict[str, str]) -> None:
    for name in set(os.environ) - set(value):
        del os.environ[name]
    os.environ.update(value)


def _working_directory() -> str | None:
    with contextlib.suppress(FileNotFoundError):  # removed by the trial
        return os.getcwd()
    return None


def _set_collection(value: tuple[bool, tuple[int, int, int]]) -> None:
    (gc.enable if value[0] else gc.disable)()
    gc.set_threshold(*value[1])


_whole = slice(None)

PYTHON = [
    Setting("the environment", lambda: dict(os.environ), _set_environment),
    Setting("the working directory", _working_directory, os.chdir),
    Setting("sys.path", lambda: sys.path[:], lambda value: operator.setitem(sys.path, _whole, value)),
    Setting("sys.argv", lambda: sys.argv[:], lambda value: operator.setitem(sys.argv, _whole, value)),
    Setting("garbage collection", lambda: (gc.isenabled(), gc.get_threshold()), _set_collection),
    Setting("logging.disable()", lambda: logging.root.manager.disable, logging.disable),
    # A program sets it with init_process_group(timeout=...).
    Setting("the timeout of collectives", ddp.timeout, ddp.set_timeout),
    # A second trial that sets it without force=True would fail.
    Setting(
        "the start method of processes",
        partial(multiprocessing.get_start_method, allow_none=True),
        partial(multiprocessing.set_start_method, force=True),
    ),
]


# --------------------------------------------------------------------------------------------------------------- torch
# The places of float32 precisions in torch >= 2.9, the general ones first; an unset one has the general one's value.
_PLACES = [
    ("generic", "all"),
    *((backend, operation) for backend in ("cuda", "mkldnn") for operation in ("all", "matmul", "conv", "rnn")),
]
_get_precision: Callable[..., str] = getattr(torch._C, "_get_fp32_precision_getter", lambda *_: "none")
_set_precision: Callable[..., object] = getattr(torch._C, "_set_fp32_precision_setter", lambda *_: None)


def float32_precision() -> tuple[Any, ...]:
    """The precision of float32 operations (TF32, bfloat16), from torch's older API and from its newer one."""
    values: list[Any] = []
    for get in (torch.get_float32_matmul_precision, lambda: cudnn.allow_tf32, lambda: cuda.matmul.allow_tf32):
        try:
            values.append(get())
        except RuntimeError:  # torch refuses to read these after a change by the newer API
            values.append(None)
    return *values, *(_get_precision(*place) for place in _PLACES)


def _set_float32_precision(value: tuple[Any, ...]) -> None:
    torch.set_float32_matmul_precision(value[0])
    cudnn.allow_tf32, cuda.matmul.allow_tf32 = value[1:3]
    for place in _PLACES:
        _set_precision(*place, "none")
    for place, precision in zip(_PLACES, value[3:], strict=True):
        if _get_precision(*place) != precision:
            _set_precision(*place, precision)


TORCH = [
    Setting("the default dtype", torch.get_default_dtype, torch.set_default_dtype),
    Setting(
        "determinism",
        lambda: (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
        # set_deterministic_debug_mode() would not restore the compiler's own flag.
        lambda value: torch.use_deterministic_algorithms(value[0], warn_only=value[1]),
    ),
    *(
        Setting(f"cudnn.{name}", partial(getattr, cudnn, name), partial(setattr, cudnn, name))
        for name in ("enabled", "benchmark", "deterministic")
    ),
    Setting("the precision of float32", float32_precision, _set_float32_precision),
    # It can be set only once: restoring it fails, and the next trial gets a new process.
    Setting("the number of inter-op threads", torch.get_num_interop_threads, torch.set_num_interop_threads),
]
"""Compiled code may depend on these."""
