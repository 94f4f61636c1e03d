"""Signal and exit handlers that a trial's code registers as if the process were its own.

A worker's process serves many trials, Ray owns its main thread, and a trial runs in a different thread, where
``signal.signal()`` raises an error. That would end programs that only want to stop gracefully.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from dray.imports import is_installed

log = logging.getLogger("dray")


@contextlib.contextmanager
def redirect_handlers() -> Iterator[None]:
    """Accept handlers of signals and of the process's exit within the block.

    Signal handlers are never called: a program's handler would save its work on a request to stop, and here dray does
    that. Handlers of SIGALRM are rejected, as in Python outside of the main thread.

    Exit handlers that the trial's own code registers with ``atexit`` are called at the end of the block, the last one
    first. Exit handlers of libraries, which stay imported, are called when the process exits.
    """
    original = signal.signal, atexit.register, atexit.unregister
    set_original, register_original, unregister_original = original
    exits: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = []

    def set_handler(signalnum: int, handler: Any) -> Any:
        # The main thread is Ray's, or belongs to a process that the trial has forked.
        if threading.current_thread() is threading.main_thread() or signalnum == signal.SIGALRM:
            return set_original(signalnum, handler)
        if callable(handler):
            log.warning(
                "the handler of %s will not be called: Ray handles a worker's signals, and dray saves trials that are "
                "asked to stop",
                signal.Signals(signalnum).name,
            )
        return signal.getsignal(signalnum)

    def register(func: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        if is_installed(sys._getframe(1).f_code.co_filename):
            return register_original(func, *args, **kwargs)
        exits.append((func, args, kwargs))
        return func

    def unregister(func: Callable[..., Any], /) -> None:
        exits[:] = [entry for entry in exits if entry[0] != func]
        unregister_original(func)

    signal.signal, atexit.register, atexit.unregister = set_handler, register, unregister
    try:
        yield
    finally:
        signal.signal, atexit.register, atexit.unregister = original
        while exits:
            func, args, kwargs = exits.pop()
            try:
                func(*args, **kwargs)
            except Exception:  # as Python does
                log.exception("an exit handler failed")
