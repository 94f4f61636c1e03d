"""Isolates trials that share a process: each starts from the process's initial state, or in a new process.

A trial runs in its own thread, so thread-local state ends with it. Process-wide state is restored afterwards: the
settings listed in ``dray.worker.isolation.settings``, and here loggers, warnings and GPU memory. Leaks
(``dray.worker.isolation.leaks``) are a reason to replace the process. Compiled code is kept while it is valid for the
next trial (``dray.worker.isolation.compiled``).

Changes to modules (a patched library function, a global of the trial's module) are not undone, nor are the many
settings that trials rarely change. ``resources.reuse_workers: false`` gives each trial new processes.
"""

from __future__ import annotations

import contextvars
import gc
import logging
import sys
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeAlias, TypeVar

import torch

from dray.imports import is_installed
from dray.memory import gpu_in_use
from dray.text import counted
from dray.training.parallel.device import on_this_gpu
from dray.training.parallel.mesh import forget_operations
from dray.worker.isolation.compiled import Compiled
from dray.worker.isolation.leaks import Leaks, end_groups, group_names, groups_of_trial
from dray.worker.isolation.settings import PYTHON, TORCH, Setting

T = TypeVar("T")

COLLECT_EVERY = 100
"""Garbage collections are at least this many times their own duration apart."""


Settings: TypeAlias = list[tuple[Setting, Any]]
"""Settings of this process, with their values."""


def settings_now() -> Settings:
    return [(setting, setting.get()) for setting in (*PYTHON, *TORCH)]


class ProcessSnapshot:
    """The state of this process at the creation of the object, before the first trial.

    Args:
        before_code: the settings before any trial's code was loaded; by default the present ones.
    """

    def __init__(self, *, owns_gpu: bool = True, before_code: Settings | None = None) -> None:
        # Later collections then visit only objects of trials, which takes 1 ms instead of 100. No collection before: it
        # would delay the first batch by those 100 ms, and free little.
        gc.freeze()
        self._collect_at = 0.0
        self._compiled = Compiled(TORCH)
        self._settings = settings_now()
        self._before_code = self._settings if before_code is None else before_code
        self._threads = torch.get_num_threads()
        self._loggers = {logger: _state(logger) for logger in _loggers()}
        self._leaks = Leaks(owns_gpu=owns_gpu)

    def load(self, load: Callable[[], T]) -> T:
        """Load other code. What it sets while it is imported is restored after each of its trials; what the previous
        code has set is undone."""
        _put(self._before_code)
        loaded = load()
        self._settings = settings_now()
        return loaded

    def run(
        self,
        trial: Callable[[], T],
        has_failed: Callable[[T], bool] = lambda _: False,
        kept: Callable[[], int] = lambda: 0,
    ) -> tuple[T, list[str]]:
        """Run a trial in a new thread, then restore this process. Exceptions of the trial are raised here.

        Args:
            has_failed: returns whether a result is a failure. The process groups of a failed trial are not ended: a
            rank
                that failed alone would wait for collectives that others have not begun.
            kept: returns how many bytes the trial has left in memory on purpose.

        Returns:
            The trial's result, and the reasons not to run another trial in this process; [] if it is clean.
        """
        result: Future[T] = Future()
        groups = group_names()
        # torch's compiler keeps its settings in a context, and the model's code may have set some during its import.
        context = contextvars.copy_context()

        def run() -> None:
            try:
                with self._compiled.for_a_trial():
                    result.set_result(trial())
            except BaseException as error:
                result.set_exception(error)

        with warnings.catch_warnings():
            thread = threading.Thread(target=context.run, args=(on_this_gpu(run),), name="trial", daemon=True)
            thread.start()
            thread.join()
            logging.captureWarnings(False)
        del thread
        failed = result.exception() is not None or has_failed(result.result())
        reasons = self._restore(groups_of_trial(groups), failed, kept())
        return result.result(), reasons

    def _restore(self, groups: list[Any], failed: bool, kept: int) -> list[str]:
        if groups:
            forget_operations()
        # Collected first, because garbage may own worker processes, threads, files and memory.
        self._collect(at_once=bool(groups))
        reasons = _put(self._settings)
        # Set unconditionally: torch.get_num_threads() returns the calling thread's number, not the trial's.
        torch.set_num_threads(self._threads)
        self._restore_loggers()
        # Warnings that are shown once per process must be shown again to the next trial.
        warnings.onceregistry.clear()  # type: ignore[attr-defined]
        try:
            if groups and failed:
                reasons.append(f"its failed trial has left {counted(len(groups), 'process group')}")
            elif groups:
                reasons += end_groups(groups)
            if gpu_in_use():
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
                torch.cuda.reset_accumulated_memory_stats()
            return reasons + self._leaks.clean_up(kept)
        except RuntimeError as error:  # after an error on the device, every call fails
            return [*reasons, f"the GPU fails: {error}"]

    def _collect(self, at_once: bool) -> None:
        """Collect the garbage of trials, at once or if worker processes or GPU memory may depend on it.

        Otherwise it is rare enough to take at most 1% of the time: it is slow after a trial has imported much.
        """
        start = time.monotonic()
        if at_once or start >= self._collect_at or gpu_in_use() or self._leaks.has_children():
            gc.collect()
            end = time.monotonic()
            self._collect_at = end + COLLECT_EVERY * (end - start)

    def _restore_loggers(self) -> None:
        for logger in _loggers():
            if logger not in self._loggers:
                # A library sets up its loggers once, at its import. All other new loggers are the trial's.
                module = sys.modules.get(logger.name.partition(".")[0])
                file = getattr(module, "__file__", None)
                self._loggers[logger] = _state(logger) if file and is_installed(file) else _NEW
            if (state := self._loggers[logger]) != _state(logger):
                logger.setLevel(state[0])
                logger.propagate, logger.disabled, logger.handlers[:] = state[1:]


def _put(settings: Settings) -> list[str]:
    """Restore settings. Returns the reasons why some can't be."""
    reasons = []
    for setting, value in settings:
        try:
            # Only if it has changed: some setters take milliseconds.
            if setting.get() != value:
                setting.put(value)
        except Exception as error:
            reasons.append(f"can't restore {setting.name}: {error}")
    return reasons


_NEW: tuple[Any, ...] = (logging.NOTSET, True, False, [])


def _loggers() -> list[logging.Logger]:
    loggers = [logger for logger in logging.root.manager.loggerDict.values() if isinstance(logger, logging.Logger)]
    return [logging.root, *loggers]


def _state(logger: logging.Logger) -> tuple[Any, ...]:
    return logger.level, logger.propagate, logger.disabled, logger.handlers[:]
