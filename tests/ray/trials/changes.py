"""The state of its process, or its thread, that a trial may change: for each, a function that reads it, and one that
changes it.

The value read is the same in every process that has not changed it.
"""

from __future__ import annotations

import decimal
import gc
import logging
import multiprocessing
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

ENTERED: list[Any] = []


def enter(context: Any) -> None:
    """Enter a block that is never left."""
    context.__enter__()
    ENTERED.append(context)


def flip(owner: Any, name: str) -> tuple[Callable[[], Any], Callable[[Path], Any]]:
    """A flag that is true or false."""
    return lambda: getattr(owner, name), lambda tmp: setattr(owner, name, not getattr(owner, name))


def own_logger() -> list[object]:
    logger = logging.getLogger("a.trials.own")
    return [logger.level, logger.propagate, logger.disabled, len(logger.handlers)]


def change_logger(tmp: Path) -> None:
    logger = logging.getLogger("a.trials.own")
    logger.setLevel(logging.DEBUG)
    logger.addHandler(logging.FileHandler(tmp / "log"))
    logger.propagate = False


def change_collection(tmp: Path) -> None:
    gc.disable()
    gc.set_threshold(7)


def start_method() -> str | None:
    return multiprocessing.get_start_method(allow_none=True)


def precision() -> list[object]:
    places = (torch.backends.cuda.matmul, torch.backends.cudnn, torch.backends.mkldnn)
    return [torch.get_float32_matmul_precision(), *(getattr(place, "fp32_precision", None) for place in places)]


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
    "sys.path": (lambda: list(sys.path), lambda tmp: sys.path.insert(0, "src")),
    "sys.path replaced": (lambda: "src" in sys.path, lambda tmp: setattr(sys, "path", [*sys.path, "src"])),
    "sys.argv": (lambda: sys.argv[1:], lambda tmp: sys.argv.append("--mine")),
    "warnings to the log": (lambda: warnings.showwarning.__module__, lambda tmp: logging.captureWarnings(True)),
    "logging": (
        lambda: [type(each).__name__ for each in logging.getLogger().handlers],
        lambda tmp: logging.getLogger().addHandler(logging.FileHandler(tmp / "log")),
    ),
    "logging disabled": (
        lambda: logging.root.manager.disable,
        lambda tmp: logging.disable(logging.CRITICAL),
    ),
    "a logger of its own": (own_logger, change_logger),
    "a logger of a library": (
        lambda: logging.getLogger("torch").level,
        lambda tmp: logging.getLogger("torch").setLevel(1),
    ),
    "decimals": (lambda: decimal.getcontext().prec, lambda tmp: setattr(decimal.getcontext(), "prec", 4)),
    "garbage collection": (lambda: [gc.isenabled(), *gc.get_threshold()], change_collection),
    "start method": (start_method, lambda tmp: multiprocessing.set_start_method("spawn", force=True)),
    "numpy's errors": (lambda: sorted(np.geterr().items()), lambda tmp: np.seterr(all="raise")),
    "dtype": (lambda: str(torch.get_default_dtype()), lambda tmp: torch.set_default_dtype(torch.float64)),
    "device": (lambda: str(torch.ones(1).device), lambda tmp: torch.set_default_device("meta")),
    "device of a block": (lambda: str(torch.ones(1).device), lambda tmp: enter(torch.device("meta"))),
    "threads": (torch.get_num_threads, lambda tmp: torch.set_num_threads(torch.get_num_threads() + 1)),
    "precision": (precision, lambda tmp: torch.set_float32_matmul_precision("medium")),
    "TF32 of convolutions": flip(torch.backends.cudnn, "allow_tf32"),
    "benchmark": flip(torch.backends.cudnn, "benchmark"),
    "cudnn": flip(torch.backends.cudnn, "enabled"),
    "denormals": (
        lambda: (torch.tensor([1e-40]) * torch.tensor([1.0])).item(),
        lambda tmp: torch.set_flush_denormal(True),
    ),
    "gradients": (torch.is_grad_enabled, lambda tmp: torch.set_grad_enabled(False)),
    "autocast": (lambda: torch.is_autocast_enabled("cpu"), lambda tmp: enter(torch.autocast("cpu"))),
    "inference": (torch.is_inference_mode_enabled, lambda tmp: enter(torch.inference_mode())),
    "warnings": (lambda: len(warnings.filters), lambda tmp: warnings.filterwarnings("error", "mine")),
}
