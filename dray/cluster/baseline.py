"""Puts a worker's process back into the state it was in before a trial, so that trials that share it do not meet."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
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
        root = logging.getLogger()
        root.setLevel(self._log[0])
        root.handlers[:] = self._log[1]
        if torch.cuda.is_available():
            # Cycles keep tensors of the last trial alive until a collection; without GPU memory at stake it can wait.
            gc.collect()
            torch.cuda.empty_cache()
