"""What a trial can change for its whole process, or its thread: how each is looked at, and how it is changed.

What is seen is the same in every process that has not changed it.
"""

from __future__ import annotations

import decimal
import gc
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
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

ENTERED: list[Any] = []


def enter(context: Any) -> None:
    """Enter a block that is never left."""
    context.__enter__()
    ENTERED.append(context)


def umask() -> int:
    now = os.umask(0)
    os.umask(now)
    return now


def flip(owner: Any, name: str) -> tuple[Callable[[], Any], Callable[[Path], Any]]:
    """A flag that is true or false."""
    return lambda: getattr(owner, name), lambda tmp: setattr(owner, name, not getattr(owner, name))


def own_logger() -> list[object]:
    logger = logging.getLogger("a.trials.own")
    return [logger.level, logger.propagate, logger.disabled, len(logger.handlers), len(logger.filters)]


def change_logger(tmp: Path) -> None:
    logger = logging.getLogger("a.trials.own")
    logger.setLevel(logging.DEBUG)
    logger.addHandler(logging.FileHandler(tmp / "log"))
    logger.propagate = False


def change_a_librarys_logger(tmp: Path) -> None:
    logging.getLogger("torch").setLevel(1)
    logging.getLogger("torch").addFilter(print)


def a_librarys_logger() -> list[int]:
    logger = logging.getLogger("torch")
    return [logger.level, len(logger.filters)]


def change_decimals_of_threads(tmp: Path) -> None:
    decimal.DefaultContext.prec = 3
    decimal.DefaultContext.traps[decimal.Inexact] = True


def change_collection(tmp: Path) -> None:
    gc.disable()
    gc.set_threshold(7)


def start_method() -> str | None:
    return multiprocessing.get_start_method(allow_none=True)


def precision() -> list[object]:
    places = (torch.backends.cuda.matmul, torch.backends.cudnn, torch.backends.mkldnn)
    return [torch.get_float32_matmul_precision(), *(getattr(place, "fp32_precision", None) for place in places)]


def hooks() -> list[int]:
    names = ("_global_forward_hooks", "_global_forward_pre_hooks", "_global_parameter_registration_hooks")
    return [len(vars(sys.modules["torch.nn.modules.module"])[name]) for name in names]


def add_hooks(tmp: Path) -> None:
    nn.modules.module.register_module_forward_hook(print)
    nn.modules.module.register_module_parameter_registration_hook(print)


def cut_files(tmp: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft - 1, hard))


FINDER: Any = types.SimpleNamespace(find_spec=lambda *_: None)
matmul, attention = torch.backends.cuda.matmul, torch.backends.cuda
sparse = torch.sparse.check_sparse_tensor_invariants

CHANGES: dict[str, tuple[Callable[[], Any], Callable[[Path], Any]]] = {
    # First, for they import torch's compiler.
    "determinism": (torch.get_deterministic_debug_mode, lambda tmp: torch.use_deterministic_algorithms(True)),
    "determinism, warned of": (
        torch.get_deterministic_debug_mode,
        lambda tmp: torch.use_deterministic_algorithms(True, warn_only=True),
    ),
    "determinism of compiled code": (
        lambda: getattr(sys.modules.get("torch._inductor.config"), "deterministic", False),
        lambda tmp: torch.use_deterministic_algorithms(True),
    ),
    "environment": (
        lambda: [os.environ.get("M"), os.environ["PATH"]],
        lambda tmp: os.environ.update(MY="1", PATH="/"),
    ),
    "working directory": (os.getcwd, os.chdir),
    "umask": (umask, lambda tmp: os.umask(umask() ^ 0o055)),
    "sys.path": (lambda: list(sys.path), lambda tmp: sys.path.insert(0, "src")),
    "sys.path replaced": (lambda: "src" in sys.path, lambda tmp: setattr(sys, "path", [*sys.path, "src"])),
    "sys.argv": (lambda: sys.argv[1:], lambda tmp: sys.argv.append("--mine")),
    # Modules that nobody imports a second time.
    "sys.modules: replaced": (
        lambda: hasattr(sys.modules.get("torch.quasirandom"), "SobolEngine"),
        lambda tmp: sys.modules.update({"torch.quasirandom": types.ModuleType("quasirandom")}),
    ),
    "sys.modules: removed": (lambda: "torch._lowrank" in sys.modules, lambda tmp: sys.modules.pop("torch._lowrank")),
    "import hooks": (lambda: FINDER in sys.meta_path, lambda tmp: sys.meta_path.append(FINDER)),
    "excepthook": (lambda: sys.excepthook is print, lambda tmp: setattr(sys, "excepthook", print)),
    "excepthook of threads": (
        lambda: threading.excepthook is print,
        lambda tmp: setattr(threading, "excepthook", print),
    ),
    "tracing of threads": (lambda: threading.gettrace() is print, lambda tmp: threading.settrace(print)),
    "warnings to the log": (lambda: warnings.showwarning.__module__, lambda tmp: logging.captureWarnings(True)),
    "logging": (
        lambda: [type(each).__name__ for each in logging.getLogger().handlers],
        lambda tmp: logging.getLogger().addHandler(logging.FileHandler(tmp / "log")),
    ),
    "a logger of its own": (own_logger, change_logger),
    "a logger of a library": (a_librarys_logger, change_a_librarys_logger),
    "logging switched off": (lambda: logging.root.manager.disable, lambda tmp: logging.disable()),
    "class of loggers": (
        lambda: logging.getLoggerClass().__name__,
        lambda tmp: logging.setLoggerClass(type("Mine", (logging.getLoggerClass(),), {})),
    ),
    "records of the log": (
        lambda: logging.getLogRecordFactory() is dict,
        lambda tmp: logging.setLogRecordFactory(dict),
    ),
    "locale": (lambda: locale.setlocale(locale.LC_ALL), lambda tmp: locale.setlocale(locale.LC_TIME, "C.UTF-8")),
    "decimals": (lambda: decimal.getcontext().prec, lambda tmp: setattr(decimal.getcontext(), "prec", 4)),
    "decimals of threads": (
        lambda: [decimal.DefaultContext.prec, decimal.DefaultContext.traps[decimal.Inexact]],
        change_decimals_of_threads,
    ),
    "garbage collection": (lambda: [gc.isenabled(), *gc.get_threshold()], change_collection),
    "start method": (start_method, lambda tmp: multiprocessing.set_start_method("spawn", force=True)),
    "sharing strategy": (
        torch.multiprocessing.get_sharing_strategy,
        lambda tmp: torch.multiprocessing.set_sharing_strategy("file_system"),
    ),
    "recursion": (sys.getrecursionlimit, lambda tmp: sys.setrecursionlimit(12_345)),
    "open files": (lambda: resource.getrlimit(resource.RLIMIT_NOFILE)[0], cut_files),
    "timer": (
        lambda: signal.getitimer(signal.ITIMER_VIRTUAL)[0] > 0,
        lambda tmp: signal.setitimer(signal.ITIMER_VIRTUAL, 1000),
    ),
    "socket timeout": (socket.getdefaulttimeout, lambda tmp: socket.setdefaulttimeout(30)),
    "temporary directory": (lambda: tempfile.tempdir, lambda tmp: setattr(tempfile, "tempdir", str(tmp))),
    "stdin": (lambda: sys.stdin is None, lambda tmp: setattr(sys, "stdin", None)),
    "numpy's errors": (lambda: sorted(np.geterr().items()), lambda tmp: np.seterr(all="raise")),
    "numpy's printing": (lambda: repr(np.array([1 / 3])), lambda tmp: np.set_printoptions(precision=2)),
    "numpy's generator": (
        lambda: type(np.random.get_bit_generator()).__name__,  # type: ignore[attr-defined]
        lambda tmp: np.random.set_bit_generator(np.random.PCG64(1)),  # type: ignore[attr-defined]
    ),
    "dtype": (lambda: str(torch.get_default_dtype()), lambda tmp: torch.set_default_dtype(torch.float64)),
    "device": (lambda: str(torch.ones(1).device), lambda tmp: torch.set_default_device("meta")),
    "device of a block": (lambda: str(torch.ones(1).device), lambda tmp: enter(torch.device("meta"))),
    "threads": (torch.get_num_threads, lambda tmp: torch.set_num_threads(torch.get_num_threads() + 1)),
    "uninitialised memory": flip(torch.utils.deterministic, "fill_uninitialized_memory"),
    "precision": (precision, lambda tmp: torch.set_float32_matmul_precision("medium")),
    "TF32 of convolutions": flip(torch.backends.cudnn, "allow_tf32"),
    "benchmark": flip(torch.backends.cudnn, "benchmark"),
    "cudnn": flip(torch.backends.cudnn, "enabled"),
    "mkldnn": flip(torch.backends.mkldnn, "enabled"),
    "einsum": flip(torch.backends.opt_einsum, "enabled"),
    "reduced precision": flip(matmul, "allow_bf16_reduced_precision_reduction"),
    "attention: flash": (attention.flash_sdp_enabled, lambda tmp: attention.enable_flash_sdp(False)),
    "attention: memory": (
        attention.mem_efficient_sdp_enabled,
        lambda tmp: attention.enable_mem_efficient_sdp(False),
    ),
    "attention: math": (attention.math_sdp_enabled, lambda tmp: attention.enable_math_sdp(False)),
    "attention: fast path": (
        torch.backends.mha.get_fastpath_enabled,
        lambda tmp: torch.backends.mha.set_fastpath_enabled(False),
    ),
    "anomalies": (torch.is_anomaly_enabled, lambda tmp: torch.autograd.set_detect_anomaly(True)),
    "repeated warnings": (torch.is_warn_always_enabled, lambda tmp: torch.set_warn_always(True)),
    "denormals": (
        lambda: (torch.tensor([1e-40]) * torch.tensor([1.0])).item(),
        lambda tmp: torch.set_flush_denormal(True),
    ),
    "distributions": (
        lambda: torch.distributions.Normal(0.0, 1.0)._validate_args,
        lambda tmp: torch.distributions.Distribution.set_default_validate_args(False),
    ),
    "printing": (lambda: repr(torch.tensor([1 / 3], device="cpu")), lambda tmp: torch.set_printoptions(precision=2)),
    "hooks of all modules": (hooks, add_hooks),
    "checks of sparse tensors": (sparse.is_enabled, lambda tmp: sparse.enable()),
    "gradients": (torch.is_grad_enabled, lambda tmp: torch.set_grad_enabled(False)),
    "autocast": (lambda: torch.is_autocast_enabled("cpu"), lambda tmp: enter(torch.autocast("cpu"))),
    "inference": (torch.is_inference_mode_enabled, lambda tmp: enter(torch.inference_mode())),
    "warnings": (lambda: len(warnings.filters), lambda tmp: warnings.simplefilter("error")),
}
