"""The settings of a process that a trial can change: each can be read, and restored.

Not included: thread-local state (grad mode, autocast, inference mode, the default device, flushed denormals, decimal
and numpy contexts, torch function modes), because each trial has a thread of its own; random states, which every trial
seeds; and what a trial writes into modules that are not its own, which only a new process undoes.
"""

from __future__ import annotations

import contextlib
import decimal
import gc
import importlib
import locale
import logging
import multiprocessing
import os
import resource
import signal
import socket
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.backends.cuda
import torch.backends.mha
import torch.backends.mkldnn
import torch.backends.opt_einsum
import torch.backends.quantized
import torch.distributions
import torch.multiprocessing
import torch.nn.modules.module
import torch.utils.deterministic


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting.

    Attributes:
        name: for messages.
        get: returns its value now, to be compared by ``==``; nothing that a trial does later changes that value.
        put: sets it to such a value.
    """

    name: str
    get: Callable[[], Any]
    put: Callable[[Any], Any]


def of_python() -> Iterator[Setting]:
    """Python's. They are restored in this order, before torch's."""
    yield Setting("the environment", lambda: dict(os.environ), _put_environment)
    # The directory may be gone.
    yield Setting("the working directory", _directory, os.chdir)
    yield Setting("the umask", _umask, os.umask)
    for module, name in (
        (sys, "path"), (sys, "argv"), (sys, "meta_path"), (sys, "path_hooks"), (gc, "callbacks"),
    ):  # fmt: skip
        yield _contents(module, name)
    for module, name in (
        (sys, "stdin"), (sys, "excepthook"), (sys, "unraisablehook"), (sys, "displayhook"),
        (sys, "dont_write_bytecode"), (threading, "excepthook"), (tempfile, "tempdir"), (logging, "raiseExceptions"),
    ):  # fmt: skip
        yield _attribute(module, name)
    yield Setting("the recursion limit", sys.getrecursionlimit, sys.setrecursionlimit)
    yield Setting("the switch interval", sys.getswitchinterval, sys.setswitchinterval)
    yield Setting("the trace function of threads", threading.gettrace, threading.settrace)
    yield Setting("the profile function of threads", threading.getprofile, threading.setprofile)
    yield Setting("the garbage collection", lambda: (gc.isenabled(), gc.get_threshold(), gc.get_debug()), _put_gc)
    yield Setting("the warnings", lambda: (warnings.filters[:], warnings.showwarning), _put_warnings)
    yield Setting("the locale", lambda: locale.setlocale(locale.LC_ALL), lambda it: locale.setlocale(locale.LC_ALL, it))
    yield Setting("the default decimal context", _decimal, _put_decimal)
    yield Setting("the socket timeout", socket.getdefaulttimeout, socket.setdefaulttimeout)
    yield Setting("the resource limits", _limits, _put_limits)
    for timer in (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF):
        yield _timer(timer)
    # Programs set it first of all, and without force it can be set only once.
    yield Setting(
        "the start method",
        lambda: multiprocessing.get_start_method(allow_none=True),
        lambda method: multiprocessing.set_start_method(method, force=True),
    )
    yield Setting("numpy's print options", np.get_printoptions, lambda it: np.set_printoptions(**it))
    yield Setting(
        "numpy's generator",
        np.random.get_bit_generator,  # type: ignore[attr-defined]
        np.random.set_bit_generator,  # type: ignore[attr-defined]
    )


def of_torch() -> Iterator[Setting]:
    """Those that this version of torch has."""
    # This comes first: none of the others can be set while it is frozen.
    frozen, flag = torch.backends.disable_global_flags.__globals__, "__allow_nonbracketed_mutation_flag"
    yield Setting("torch's flags, frozen", lambda: frozen.get(flag), lambda value: frozen.update({flag: value}))
    yield Setting("the default dtype", torch.get_default_dtype, torch.set_default_dtype)
    # It can be set only once: if a trial has done so, restoring it fails, and a new process is needed.
    yield Setting("torch's inter-op threads", torch.get_num_interop_threads, torch.set_num_interop_threads)
    yield Setting(
        "determinism",
        lambda: (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
        # Not by set_deterministic_debug_mode(), which leaves the compiler as it is.
        lambda it: torch.use_deterministic_algorithms(it[0], warn_only=it[1]),
    )
    yield _attribute(torch.utils.deterministic, "fill_uninitialized_memory")
    yield Setting(
        "anomaly mode",
        lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        lambda it: torch.set_anomaly_enabled(*it),
    )
    yield Setting("repeated warnings", torch.is_warn_always_enabled, torch.set_warn_always)
    yield Setting(
        "the validation of distributions",
        lambda: torch.distributions.Distribution._validate_args,
        torch.distributions.Distribution.set_default_validate_args,
    )
    yield Setting(
        "the sharing strategy",
        torch.multiprocessing.get_sharing_strategy,
        torch.multiprocessing.set_sharing_strategy,
    )
    yield Setting("the print options", lambda: dict(vars(torch._tensor_str.PRINT_OPTS)), _put_print_options)
    yield Setting("the precision of float32", _precision, _put_precision)
    backends = torch.backends
    for module, names in (
        (backends.cudnn, ("enabled", "benchmark", "deterministic", "benchmark_limit")),
        (backends.mkldnn, ("enabled", "deterministic")),
        (backends.opt_einsum, ("enabled", "strategy")),
        (backends.quantized, ("engine",)),
        (
            backends.cuda.matmul,
            (
                "allow_fp16_reduced_precision_reduction",
                "allow_bf16_reduced_precision_reduction",
                "allow_fp16_accumulation",
            ),
        ),
    ):
        for name in names:
            yield from _if_there(_attribute(module, name))
    for get, put in (
        ("flash_sdp_enabled", "enable_flash_sdp"),
        ("mem_efficient_sdp_enabled", "enable_mem_efficient_sdp"),
        ("math_sdp_enabled", "enable_math_sdp"),
        ("cudnn_sdp_enabled", "enable_cudnn_sdp"),
        ("fp16_bf16_reduction_math_sdp_allowed", "allow_fp16_bf16_reduction_math_sdp"),
        ("preferred_linalg_library", "preferred_linalg_library"),
        ("preferred_blas_library", "preferred_blas_library"),
    ):
        if hasattr(backends.cuda, get):
            yield from _if_there(Setting(get, getattr(backends.cuda, get), getattr(backends.cuda, put)))
    yield Setting("the fast path of attention", backends.mha.get_fastpath_enabled, backends.mha.set_fastpath_enabled)
    yield from _if_there(
        Setting("nnpack", lambda: torch._C._get_nnpack_enabled(), lambda on: torch._C._set_nnpack_enabled(on))
    )
    invariants = torch.sparse.check_sparse_tensor_invariants
    yield Setting("the checks of sparse tensors", invariants.is_enabled, lambda on: _switch(invariants, on))
    for get, put in (
        ("get_overwrite_module_params_on_conversion", "set_overwrite_module_params_on_conversion"),
        ("get_swap_module_params_on_conversion", "set_swap_module_params_on_conversion"),
    ):
        yield Setting(put, getattr(torch.__future__, get), getattr(torch.__future__, put))
    for module in (torch.nn.modules.module, importlib.import_module("torch.optim.optimizer")):
        for name, value in vars(module).items():
            if name.startswith("_global_") and isinstance(value, dict):
                yield _contents(module, name)
    if torch.cuda.is_available():
        yield Setting("the checks of synchronisation", torch.cuda.get_sync_debug_mode, torch.cuda.set_sync_debug_mode)


# -------------------------------------------------------------------------------------------------------- kinds of them
def _attribute(owner: Any, name: str) -> Setting:
    return Setting(f"{_named(owner)}.{name}", lambda: getattr(owner, name), lambda value: setattr(owner, name, value))


def _contents(owner: Any, name: str) -> Setting:
    """A list or a dict that others refer to: the same object is restored, with its contents."""
    kept = getattr(owner, name)

    def get() -> Any:
        now = getattr(owner, name)
        return id(now), now.copy()

    def put(before: tuple[int, Any]) -> None:
        setattr(owner, name, kept)
        kept.clear()
        (kept.extend if isinstance(kept, list) else kept.update)(before[1])

    return Setting(f"{_named(owner)}.{name}", get, put)


def _named(owner: Any) -> str:
    return str(getattr(owner, "__name__", type(owner).__name__))


def _if_there(setting: Setting) -> Iterator[Setting]:
    """The setting if it exists: not every version or build of torch has all of them."""
    with contextlib.suppress(AttributeError, RuntimeError):
        if setting.get() is not None:
            yield setting


# ------------------------------------------------------------------------------------------------------------ of Python
def _put_environment(before: dict[str, str]) -> None:
    for name in set(os.environ) - set(before):
        del os.environ[name]
    os.environ.update(before)


def _directory() -> str | None:
    try:
        return os.getcwd()
    except FileNotFoundError:  # removed by the trial
        return None


def _umask() -> int:
    # There is no other way to read it.
    now = os.umask(0o077)
    os.umask(now)
    return now


def _put_gc(before: tuple[bool, tuple[int, int, int], int]) -> None:
    enabled, threshold, debug = before
    (gc.enable if enabled else gc.disable)()
    gc.set_threshold(*threshold)
    gc.set_debug(debug)


def _put_warnings(before: tuple[list[Any], Any]) -> None:
    logging.captureWarnings(False)
    filters, warnings.showwarning = before
    warnings.filters[:] = filters  # type: ignore[index]  # a list, though it is declared as a Sequence


_DECIMAL = ("prec", "rounding", "Emin", "Emax", "capitals", "clamp")


def _decimal() -> tuple[Any, ...]:
    context = decimal.DefaultContext
    return *(getattr(context, name) for name in _DECIMAL), dict(context.flags), dict(context.traps)


def _put_decimal(before: tuple[Any, ...]) -> None:
    context = decimal.DefaultContext
    for name, value in zip(_DECIMAL, before, strict=False):
        setattr(context, name, value)
    context.flags, context.traps = before[-2:]


_LIMITS = [value for name, value in sorted(vars(resource).items()) if name.startswith("RLIMIT_")]


def _limits() -> list[tuple[int, int]]:
    return [resource.getrlimit(limit) for limit in _LIMITS]


def _put_limits(before: list[tuple[int, int]]) -> None:
    for limit, value in zip(_LIMITS, before, strict=True):
        if resource.getrlimit(limit) != value:
            resource.setrlimit(limit, value)


def _timer(number: int) -> Setting:
    # Only whether it runs: its time changes whenever it is read.
    return Setting(f"timer {number}", lambda: signal.getitimer(number) != (0.0, 0.0), lambda on: _stop(number, on))


def _stop(timer: int, on: bool) -> None:
    if not on:
        signal.setitimer(timer, 0)


# ------------------------------------------------------------------------------------------------------------- of torch
def _switch(invariants: Any, on: bool) -> None:
    (invariants.enable if on else invariants.disable)()


def _put_print_options(before: dict[str, Any]) -> None:
    for name, value in before.items():
        setattr(torch._tensor_str.PRINT_OPTS, name, value)


# Torch's names of the places where the precision of float32 can be set, the more general ones first.
_PRECISIONS = [
    ("generic", "all"),
    *((backend, operation) for backend in ("cuda", "mkldnn") for operation in ("all", "matmul", "conv", "rnn")),
]


def _precision() -> tuple[Any, ...]:
    """The precision of computations in float32: the older settings and, if torch has them, the newer."""
    older: list[Any] = []
    for get in (
        torch.get_float32_matmul_precision,
        lambda: torch.backends.cudnn.allow_tf32,
        lambda: torch.backends.cuda.matmul.allow_tf32,
    ):
        try:
            older.append(get())
        except RuntimeError:  # torch refuses to read these once the newer ones have been set otherwise
            older.append("overruled")
    return *older, *_newer()


def _newer() -> list[str]:
    get = getattr(torch._C, "_get_fp32_precision_getter", None)
    return [] if get is None else [get(*place) for place in _PRECISIONS]


def _put_precision(before: tuple[Any, ...]) -> None:
    torch.set_float32_matmul_precision(before[0])
    torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = before[1:3]
    newer = before[3:]
    if not newer:
        return
    put = torch._C._set_fp32_precision_setter
    # A place that is not set takes the value of the more general one: so unset all, then set what still differs.
    for place in _PRECISIONS:
        put(*place, "none")
    for number, (place, value) in enumerate(zip(_PRECISIONS, newer, strict=True)):
        if _newer()[number] != value:
            put(*place, value)
