"""Requests to stop a local run: SIGTERM, and Ctrl-C while it trains."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType

#: A launcher may forward a Ctrl-C that the terminal has also sent: within this time, both count as one request.
SAME_REQUEST_S = 0.5


class StopSignals:
    """Turns signals into a request to stop, which the run obeys at its next batch."""

    def __init__(self) -> None:
        self.requested_by = ""  # "SIGTERM" or "Ctrl-C"; "" if no stop was requested
        self._interrupted_at: float | None = None

    @property
    def interrupted(self) -> bool:
        """Whether Ctrl-C was pressed since training began."""
        return self._interrupted_at is not None

    def sigterm(self) -> contextlib.AbstractContextManager[None]:
        """Within the block, SIGTERM requests a stop."""

        def request_stop(number: int, frame: FrameType | None) -> None:
            self.requested_by = "SIGTERM"

        return _handled(signal.SIGTERM, request_stop)

    def ctrl_c(self) -> contextlib.AbstractContextManager[None]:
        """Within the block, Ctrl-C requests a stop, and a second one raises KeyboardInterrupt at once.

        Nothing changes if the program has its own handler or ignores Ctrl-C.
        """
        self._interrupted_at = None
        if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            return contextlib.nullcontext()

        # The workers of a DataLoader inherit this handler, so a Ctrl-C in the terminal does not end them before the
        # current batch is finished.
        def request_stop(number: int, frame: FrameType | None) -> None:
            now = time.monotonic()
            if self._interrupted_at is not None and now > self._interrupted_at + SAME_REQUEST_S:
                raise KeyboardInterrupt
            self.requested_by = "Ctrl-C"
            self._interrupted_at = self._interrupted_at or now

        return _handled(signal.SIGINT, request_stop)


def print_no_traceback(ended_by: BaseException) -> None:
    """If the exception ends the process, print no traceback: the user has seen the reason already."""
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if error is not ended_by:
            before(kind, error, trace)

    sys.excepthook = hook


@contextlib.contextmanager
def _handled(number: signal.Signals, handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Handle a signal within the block. No-op outside the main thread, which alone may set a handler."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        if before is not None:  # None: set by C code, which can't be restored
            signal.signal(number, before)
