"""Ends a process whose trial makes no progress, and writes the stacks of all its threads to the trial's log."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import threading
import time
from collections.abc import Callable, Iterator

from dray.worker.children import end_children

LOOKS = 10
"""How often a trial is checked within its time."""
SLACK = 1.5
"""A process that can't even check its trial, because something holds Python's lock, gets this many times its time."""
FAREWELL_S = 5.0
"""How long telling that a trial hangs may take."""


@contextlib.contextmanager
def ended_if_it_hangs(
    within_s: float | None, *, pulse: Callable[[], object], log: int, tell: Callable[[str], None], grace_s: float = 0.0
) -> Iterator[None]:
    """End this process if ``pulse`` stays the same for ``within_s`` seconds in the block.

    Python's watchdog (``faulthandler``) does so even if no Python thread can run; then ``tell`` is not called.

    Args:
        within_s: seconds; None: never.
        pulse: its value changes with any progress.
        log: a file descriptor that the stacks are written to.
        tell: called before the end, in another thread, with what happened.
        grace_s: seconds from writing the stacks to ending the process.
    """
    if within_s is None:
        yield
        return
    over = threading.Event()

    def watch(within_s: float) -> None:
        seen, at, shown = pulse(), time.monotonic(), False
        while True:
            faulthandler.dump_traceback_later(SLACK * within_s + grace_s, exit=True, file=log)
            while not over.wait(within_s / LOOKS):
                if (now := pulse()) != seen:
                    seen, at, shown = now, time.monotonic(), False
                    break
                if time.monotonic() - at >= within_s and not shown:
                    _show(_told(within_s), log)
                    shown = True
                if time.monotonic() - at >= within_s + grace_s:
                    _end(_told(within_s), tell)
            if over.is_set():
                return

    thread = threading.Thread(target=watch, args=(within_s,), name="dray-hang", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        faulthandler.cancel_dump_traceback_later()


def _told(within_s: float) -> str:
    return f"no batch trained or validated, and no checkpoint saved, for {within_s:g} s (hang_timeout_s)"


def _show(told: str, log: int) -> None:
    os.write(log, f"dray: {told}; what all threads were doing:\n".encode())
    faulthandler.dump_traceback(log, all_threads=True)


def _end(told: str, tell: Callable[[str], None]) -> None:
    telling = threading.Thread(target=tell, args=(told,), name="dray-hang-told", daemon=True)
    telling.start()
    telling.join(FAREWELL_S)
    end_children()
    # An exception would not reach the trial.
    os._exit(1)
