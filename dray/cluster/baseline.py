"""Puts a worker's process back into the state it was in before a trial, so that trials that share it do not meet."""

from __future__ import annotations

import contextlib
import gc
import logging
import multiprocessing
import os
import sys
import threading
import warnings
from collections.abc import Iterator

import torch


class Baseline:
    """What a trial can change for its whole process, as it was when this object was made.

    Random states are not among it: every trial seeds them before its first line.
    """

    def __init__(self) -> None:
        self._environment = dict(os.environ)
        self._directory = os.getcwd()
        self._dtype = torch.get_default_dtype()
        self._threads = torch.get_num_threads()
        self._deterministic = torch.are_deterministic_algorithms_enabled()
        self._precision = torch.get_float32_matmul_precision()
        self._cudnn = {
            name: getattr(torch.backends.cudnn, name) for name in ("benchmark", "deterministic", "allow_tf32")
        }
        self._path, self._argv = list(sys.path), list(sys.argv)
        self._hooks = (sys.excepthook, threading.excepthook)
        self._start_method = multiprocessing.get_start_method(allow_none=True)
        self._recursion = sys.getrecursionlimit()
        self._warnings = list(warnings.filters)
        root = logging.getLogger()
        self._log = (root.level, list(root.handlers))

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Run the body, then restore everything."""
        try:
            yield
        finally:
            self.restore()

    def restore(self) -> None:
        """Undo what has changed. Unchanged settings are not touched: some setters cost milliseconds."""
        if os.environ != self._environment:
            for name in set(os.environ) - set(self._environment):
                del os.environ[name]
            os.environ.update(self._environment)
        os.chdir(self._directory)
        sys.path[:], sys.argv[:] = self._path, self._argv
        sys.excepthook, threading.excepthook = self._hooks
        if multiprocessing.get_start_method(allow_none=True) != self._start_method:
            # Programs set it as their first act, and it can be set but once.
            multiprocessing.set_start_method(self._start_method, force=True)
        if sys.getrecursionlimit() != self._recursion:
            sys.setrecursionlimit(self._recursion)
        if warnings.filters != self._warnings:
            warnings.filters[:] = self._warnings  # type: ignore[index]  # a list, though it is declared as a Sequence
            # As warnings.simplefilter() does: modules remember what they have shown under the filters of before.
            warnings._filters_mutated()  # type: ignore[attr-defined]
        if torch.get_default_dtype() != self._dtype:
            torch.set_default_dtype(self._dtype)
        torch.set_default_device(None)
        if torch.get_num_threads() != self._threads:
            torch.set_num_threads(self._threads)
        if torch.are_deterministic_algorithms_enabled() != self._deterministic:
            torch.use_deterministic_algorithms(self._deterministic)
        if torch.get_float32_matmul_precision() != self._precision:
            torch.set_float32_matmul_precision(self._precision)
        for name, value in self._cudnn.items():
            if getattr(torch.backends.cudnn, name) != value:
                setattr(torch.backends.cudnn, name, value)
        torch.set_grad_enabled(True)
        dynamo = sys.modules.get("torch._dynamo.eval_frame")
        if dynamo is not None and dynamo.cached_backends:
            # Else the models of a few trials fill the cache of one function, and those that follow run uncompiled.
            torch._dynamo.reset()
        root = logging.getLogger()
        root.setLevel(self._log[0])
        root.handlers[:] = self._log[1]
        if torch.cuda.is_available():
            # Cycles keep tensors of the last trial alive until a collection; without GPU memory at stake it can wait.
            gc.collect()
            torch.cuda.empty_cache()
