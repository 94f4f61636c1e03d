"""Isolates trials that share a process: each finds the process as the first one found it, or gets a new one.

A trial runs in a thread of its own, so that thread-local state ends with it. State of the process is restored where
that is possible (``dray.worker.isolation.settings``, and here modules, loggers and warnings). What can't be
restored, such as a thread that runs on, is a reason to replace the process. Compiled code stays where it is right for
the next trial too (``dray.worker.isolation.compiled``).

Not undone: what a trial writes into modules (a patched function of a library, a global of its own module), because
nothing tells it from what a library keeps on purpose. ``resources.reuse_workers: false`` gives each trial processes of
its own.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import sys
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from dray.imports import is_installed
from dray.memory import gpu_in_use
from dray.worker.isolation.compiled import Compiled
from dray.worker.isolation.leftovers import Leftovers
from dray.worker.isolation.settings import of_python, of_torch

T = TypeVar("T")

COLLECTS_EVERY = 100
"""No garbage collection for this many times as long as the last one took."""


class Baseline:
    """The state of this process when this object was made, which is before the first trial."""

    def __init__(self) -> None:
        # Later collections then look only at what trials have made, which takes 1 ms instead of 100. There is no
        # collection before: it would delay the first batch by those 100 ms, for little.
        gc.freeze()
        self._collects_at = 0.0
        of_torchs = list(of_torch())
        self._compiled = Compiled(of_torchs)
        self._settings = [*of_python(), *of_torchs]
        self._values = [setting.get() for setting in self._settings]
        self._threads = torch.get_num_threads()
        self._modules = dict(sys.modules)
        self._loggers = _Loggers()
        self._device = torch.cuda.current_device() if gpu_in_use() else None
        self._leftovers = Leftovers()

    def run(self, trial: Callable[[], T]) -> tuple[T, list[str]]:
        """Run a trial, then restore everything.

        Returns:
            What it returned, and why the process should run no other trial; empty if it can.

        Raises:
            BaseException: what the trial raised.
        """
        result: list[T] = []
        raised: list[BaseException] = []
        compiled = self._compiled.for_a_trial()

        def run() -> None:
            if self._device is not None:
                torch.cuda.set_device(self._device)
            try:
                with compiled():
                    result.append(trial())
            except BaseException as error:
                raised.append(error)

        thread = threading.Thread(target=run, name="trial", daemon=True)
        thread.start()
        thread.join()
        del thread
        reasons = self.restore()
        if raised:
            raise raised.pop()
        return result[0], reasons

    def restore(self) -> list[str]:
        """Restore everything. Returns why the process should run no other trial; empty if it can."""
        reasons = []
        # This comes first: collected objects end their worker processes and threads, close files and free memory.
        self._collect()
        for setting, value in zip(self._settings, self._values, strict=True):
            try:
                # Only if it has changed: some setters take milliseconds.
                if setting.get() != value:
                    setting.put(value)
            except Exception as error:
                reasons.append(f"can't restore {setting.name}: {error}")
        # Always set: torch.get_num_threads() would return this thread's number.
        torch.set_num_threads(self._threads)
        self._restore_modules()
        self._loggers.restore()
        # As in a new process, a warning that has been shown is shown again.
        warnings.onceregistry.clear()  # type: ignore[attr-defined]
        _filters_mutated()
        _reset_stance()
        if gpu_in_use():
            try:
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            except RuntimeError as error:  # after an error on the device nothing works any more
                reasons.append(f"the GPU fails: {error}")
        try:
            return reasons + self._leftovers.found()
        except RuntimeError as error:  # a GPU that is lost can't be asked how much of its memory is in use
            return [*reasons, f"the GPU fails: {error}"]

    def _collect(self) -> None:
        """Collect the garbage of trials: at once if worker processes or GPU memory may depend on it.

        Otherwise so seldom that it takes no more than 1% of the time: it is slow once a trial has imported much.
        """
        began = time.monotonic()
        if began >= self._collects_at or gpu_in_use() or self._leftovers.has_children():
            gc.collect()
            now = time.monotonic()
            self._collects_at = now + COLLECTS_EVERY * (now - began)

    def _restore_modules(self) -> None:
        """Undo removals and replacements in ``sys.modules``; what the trial has imported stays."""
        if sys.modules != self._modules:  # there are thousands, and seldom a change
            sys.modules.update(self._modules)
            self._modules = dict(sys.modules)


class _Loggers:
    """Levels and handlers of all loggers."""

    def __init__(self) -> None:
        manager = logging.root.manager
        self._disabled, self._class, self._factory = (
            manager.disable,
            logging.getLoggerClass(),
            logging.getLogRecordFactory(),
        )
        self._kept = {logger: _of(logger) for logger in _all()}

    def restore(self) -> None:
        if logging.root.manager.disable != self._disabled:
            logging.disable(self._disabled)
        logging.setLoggerClass(self._class)
        logging.setLogRecordFactory(self._factory)
        for logger in _all():
            kept = self._kept.get(logger)
            if kept is None:
                # A library sets up its loggers when it is imported, which happens once; others are the trial's.
                module = sys.modules.get(logger.name.partition(".")[0])
                place = getattr(module, "__file__", None)
                kept = _of(logger) if place is not None and is_installed(place) else _UNTOUCHED
                self._kept[logger] = kept
            # Set only what has changed: there are hundreds.
            if (
                logger.level != kept[0]
                or logger.propagate != kept[1]
                or logger.disabled != kept[2]
                or logger.handlers != kept[3]
                or logger.filters != kept[4]
            ):
                logger.setLevel(kept[0])
                logger.propagate, logger.disabled = kept[1:3]
                logger.handlers[:], logger.filters[:] = kept[3:]


_UNTOUCHED: tuple[Any, ...] = (logging.NOTSET, True, False, [], [])


def _all() -> list[logging.Logger]:
    loggers = [logger for logger in logging.root.manager.loggerDict.values() if isinstance(logger, logging.Logger)]
    return [logging.root, *loggers]


def _of(logger: logging.Logger) -> tuple[Any, ...]:
    return logger.level, logger.propagate, logger.disabled, logger.handlers[:], logger.filters[:]


def _filters_mutated() -> None:
    """Make modules forget which warnings they have shown, as ``warnings.simplefilter()`` does."""
    # Python 3.14 has renamed it.
    with contextlib.suppress(AttributeError):
        warnings._filters_mutated()  # type: ignore[attr-defined]


def _reset_stance() -> None:
    """Compile again, if a trial has switched that off."""
    dynamo: Any = sys.modules.get("torch._dynamo.eval_frame")
    stance = getattr(dynamo, "_stance", None)
    if stance is not None and stance.stance != "default":
        torch.compiler.set_stance("default")
