"""Signal and exit handlers that a trial's code registers for a process that is not its own.

A worker's process serves many trials, its main thread is Ray's, and a trial runs in another thread, where
``signal.signal()`` raises an error. That would end programs which only want to stop gracefully.
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

# Signals of timers, which end a process without a handler.
_TIMERS = (signal.SIGALRM, signal.SIGVTALRM, signal.SIGPROF)


@contextlib.contextmanager
def handlers_of_a_trial() -> Iterator[None]:
    """Redirect the registration of handlers within the block.

    Signal handlers are remembered and returned by ``signal.getsignal()``, but never called. A program's handler would
    save its work when it is told to end; here dray does that.

    Exit handlers that the trial's own code registers with ``atexit`` are called at the end of the block, the last one
    first, as at the end of a process. Those of libraries, which stay imported, are called when this process ends.

    Raises:
        ValueError: by ``signal.signal()`` for a timer's signal, which would not reach the trial's code.
    """
    before = signal.signal, signal.getsignal, atexit.register, atexit.unregister
    handlers: dict[int, Any] = {}
    exits: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = []

    def set_handler(signalnum: int, handler: Any) -> Any:
        if threading.current_thread() is threading.main_thread():  # Ray's, or that of a process the trial has started
            return before[0](signalnum, handler)
        number = signal.Signals(signalnum)
        if number in _TIMERS:
            raise ValueError(
                f"a handler of {number.name} would never be called: signals reach only the main thread, and a trial "
                "of an experiment runs in another one; use threading.Timer, or check time.monotonic() in the training "
                "loop"
            )
        if callable(handler):
            log.warning(
                "the handler of %s will not be called: Ray handles a worker's signals; dray itself saves trials that "
                "are told to stop",
                number.name,
            )
        previous = get_handler(number)
        handlers[number] = handler
        return previous

    def get_handler(signalnum: int) -> Any:
        return handlers[signalnum] if signalnum in handlers else before[1](signalnum)

    def register(func: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        if is_installed(sys._getframe(1).f_code.co_filename):
            return before[2](func, *args, **kwargs)
        exits.append((func, args, kwargs))
        return func

    def unregister(func: Callable[..., Any], /) -> None:
        exits[:] = [entry for entry in exits if entry[0] != func]
        before[3](func)

    _put(set_handler, get_handler, register, unregister)
    try:
        yield
    finally:
        _put(*before)
        while exits:
            function, arguments, keywords = exits.pop()
            try:
                function(*arguments, **keywords)
            except Exception:  # as Python does
                log.exception("an exit handler failed")


def _put(set_handler: Any, get_handler: Any, register: Any, unregister: Any) -> None:
    signal.signal, signal.getsignal = set_handler, get_handler
    atexit.register, atexit.unregister = register, unregister
