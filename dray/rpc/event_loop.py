"""The event loop in which a process makes all its decisions, one event after another, and listens for calls."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from typing import Any, Protocol

from dray.rpc.calls import Call, Session
from dray.rpc.connection import Endpoint, listen
from dray.rpc.wire import Malformed

log = logging.getLogger(__name__)

END_S = 1.0  # how long connections may take to end


class Decider(Protocol):
    """The object that an `EventLoop` calls in its thread."""

    def take(self, call: Call) -> None:
        """Handle another process's call. Raises `Malformed`, before any change, for calls that dray does not make."""

    def lost(self, session: Session) -> None:
        """Handle the end of a session with another process."""

    def settle(self) -> None:
        """Carry out the decisions of a burst of calls together, so that the journal waits for the disk only once."""

    def failed(self, error: BaseException) -> None:
        """Handle an exception from one of these methods or from a posted call."""


class EventLoop:
    """Runs posted calls in order, in its own thread. After `listen`, it accepts calls at `endpoint`."""

    endpoint: Endpoint

    def __init__(self, name: str) -> None:
        self._decider: Decider | None = None
        self._early: list[Call] = []
        self._is_due = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def listen(self, host: str) -> None:
        """Accept calls of other processes, under this machine's name for them. The calls wait for `attach`."""
        listening = listen(self._take, host, lost=self._lost)
        self._listener = asyncio.run_coroutine_threadsafe(listening, self._loop).result()
        self.endpoint = self._listener.endpoint

    def attach(self, decider: Decider) -> None:
        """Set the decider."""

        def attach() -> None:
            self._decider = decider
            early, self._early = self._early, []
            for call in early:
                self._take(call)

        self._loop.call_soon_threadsafe(attach)

    def post(self, call: Callable[..., object], *args: Any) -> None:
        """Schedule a call in the loop's thread. Thread-safe; ignored after `close`."""
        try:
            self._loop.call_soon_threadsafe(self.call, call, *args)
        except RuntimeError:
            assert self._loop.is_closed()

    def later(self, seconds: float, call: Callable[..., object], *args: Any) -> None:
        """Schedule a call after a delay. Thread-safe, as `post`."""
        self.post(lambda: self._loop.call_later(seconds, self.call, call, *args))

    def call(self, call: Callable[..., Any], *args: Any) -> None:
        """Run a call now, in the loop's thread. Raises `Malformed`, before any change."""
        assert self._decider is not None
        try:
            call(*args)
        except Malformed:
            raise
        except BaseException as error:
            self._decider.failed(error)
        if not self._is_due:
            self._is_due = True
            self._loop.call_soon(self._settle)

    def close(self) -> None:
        """Finish the posted calls, stop listening, and end the thread. Call it from another thread. Idempotent."""
        if not self._loop.is_closed():
            asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    async def _end(self) -> None:
        await asyncio.sleep(0)  # lets earlier posts run
        self._listener.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        if others:
            await asyncio.wait(others, timeout=END_S)

    def _settle(self) -> None:
        assert self._decider is not None
        self._is_due = False
        try:
            self._decider.settle()
        except BaseException as error:
            self._decider.failed(error)

    def _take(self, call: Call) -> None:
        if self._decider is None:
            self._early.append(call)
            return
        try:
            self.call(self._decider.take, call)
        except Malformed as error:
            log.warning("ended a session that called what no client calls: %s", error)
            call.session.end()

    def _lost(self, session: Session) -> None:
        if self._decider is not None:
            self.call(self._decider.lost, session)
