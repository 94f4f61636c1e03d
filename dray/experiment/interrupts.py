"""Signals that stop a run: SIGINT (Ctrl-C, or from another process), SIGTERM, and SIGHUP (from a closed terminal)."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from types import FrameType, TracebackType
from typing import Any, ClassVar

TOGETHER_S = 1.0
"""Signals within this time count as one: `timeout` signals its child and the child's group, and both the shell and the
kernel announce a closed terminal."""
STDERR = 2


class Interrupts:
    """In a ``with`` block, the first signal raises ``KeyboardInterrupt`` with the signal's name or, within `held`, is
    only noted. A later signal acts as it would outside of the block: usually it ends the process.

    A SIGHUP that the process ignores, as under ``nohup``, stays ignored. The block has an effect only in the main
    thread.
    """

    begun: ClassVar[bool] = False  # whether a run has begun in this process

    def __init__(self) -> None:
        self.final_message = ""  # printed on the second signal
        self._first: signal.Signals | None = None
        self._at = 0.0
        self._held = False
        self._before: dict[int, Any] = {}

    @property
    def wanted(self) -> bool:
        """Whether a signal has arrived."""
        return self._first is not None

    def check(self) -> None:
        """Raise ``KeyboardInterrupt`` if a signal has arrived."""
        if self._first is not None:
            raise KeyboardInterrupt(self._first.name)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """In the block, the first signal is noted and raises nothing."""
        self._held = True
        try:
            self.check()  # it may have arrived before: Python can't raise from a signal handler everywhere
            yield
        finally:
            self._held = False

    def __enter__(self) -> Interrupts:
        Interrupts.begun = True
        if threading.current_thread() is threading.main_thread():
            self._before = set_handlers(self._received)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        restore_handlers(self._before)

    def _received(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._first is None:
            self._first, self._at = signal.Signals(number), now
            if not self._held:
                self.check()
        elif now - self._at > TOGETHER_S:
            with contextlib.suppress(OSError):
                # print() may have been interrupted by this signal.
                os.write(STDERR, self.final_message.encode())
            restore_handlers(self._before)
            signal.raise_signal(number)


def set_handlers(handler: Callable[[int, FrameType | None], None]) -> dict[int, Any]:
    """Install a handler for the signals, and return the previous handlers. Only in the main thread."""
    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    return {number: signal.signal(number, handler) for number in numbers}


def restore_handlers(before: Mapping[int, Any]) -> None:
    """Undo `set_handlers`."""
    for number, handler in before.items():
        signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: not set from Python


def signal_of(error: KeyboardInterrupt) -> signal.Signals:
    """The signal that raised the exception; SIGINT if unknown."""
    name = str(error.args[0]) if error.args else ""
    return signal.Signals[name] if name in signal.Signals.__members__ else signal.SIGINT
