"""asyncio on virtual time, and a network between simulated machines."""

from __future__ import annotations

import asyncio
import errno
import os
from asyncio import base_events, events
from collections import deque
from collections.abc import Callable
from typing import Any

from tests.simulation.kernel import Kernel, Killed, Process

_set_loop = events._set_running_loop
LOST_S = 180.0
"""A connection on which nothing arrives for so long is lost: `TCP_USER_TIMEOUT`, and the same with keepalives."""


class SimLoop(base_events.BaseEventLoop):
    """asyncio's own scheduling. In place of waiting for sockets, its thread parks."""

    def __init__(self, kernel: Kernel) -> None:
        super().__init__()
        assert kernel.current is not None
        self._kernel, self.owner = kernel, kernel.current.process
        self._selector, self._clock_resolution = self, 1e-9
        self._is_signaled, self._waits = False, None  # type: ignore[var-annotated]

    def time(self) -> float:
        return self._kernel.now

    def select(self, timeout: float | None) -> tuple[()]:
        kernel = self._kernel
        _set_loop(None)
        if (timeout is None or timeout > 0) and not self._is_signaled:
            self._waits = kernel.ticket()
            try:
                kernel.park(timeout)
            finally:
                self._waits = None
        else:
            kernel.pause()
        self._is_signaled = False
        _set_loop(self)
        return ()

    def _process_events(self, event_list: object) -> None:
        """No-op: the network calls `arrive`."""

    def _write_to_self(self) -> None:
        self._is_signaled = True
        if self._waits is not None:
            self._kernel.wake(self._waits)

    def call_soon_threadsafe(self, callback: Any, *args: Any, context: Any = None) -> asyncio.Handle:
        self._kernel.pause()
        return super().call_soon_threadsafe(callback, *args, context=context)

    def arrive(self, callback: Callable[..., object], *args: Any) -> None:
        """Call this because of the network, which is in no thread."""
        if not self.is_closed() and self.owner.is_alive:
            self._ready.append(asyncio.Handle(callback, args, self))  # type: ignore[attr-defined]
            self._write_to_self()

    def create_task(self, coro: Any, **options: Any) -> asyncio.Task[Any]:
        task = super().create_task(coro, **options)
        task._log_destroy_pending = False  # type: ignore[attr-defined]  # tasks of killed processes never end
        return task

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if not isinstance(context.get("exception"), Killed):
            super().call_exception_handler(context)

    # ------------------------------------------------------------------ connections
    async def create_connection(self, factory: Any, host: str, port: object, **_: Any) -> Any:
        net = NETS[self._kernel]
        await asyncio.sleep(net.delay())
        server = net.listeners.get((host, port))
        there = None if server is None else server.loop.owner
        while there is not None and net.cut_until(self.owner, there) > self._kernel.now:
            await asyncio.sleep(1.0)  # its packets are lost
        if server is None or there is None or not there.is_alive or server.loop.is_closed():
            raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
        protocol = factory()
        mine, other = Transport(self, net, protocol), Transport(server.loop, net, None)
        mine.peer, other.peer = other, mine
        self._kernel.at(net.delay(), server.accept, other)
        protocol.connection_made(mine)
        return mine, protocol

    async def create_server(self, factory: Any, host: Any, port: int, **_: Any) -> SimServer:
        return NETS[self._kernel].listen(self, factory, port)


NETS: dict[Kernel, Net] = {}
"""The network of the schedule that runs."""


class Net:
    """The network of a schedule. `slow_s`: latency of the slowest messages."""

    def __init__(self, kernel: Kernel, *, slow_s: float = 0.5) -> None:
        self.kernel, self._slow_s, self._port = kernel, slow_s, 5000
        self.listeners: dict[tuple[str, object], SimServer] = {}
        self._cuts: dict[frozenset[str], float] = {}
        NETS.clear()
        NETS[kernel] = self

    def delay(self) -> float:
        chance = self.kernel.random.random()
        return 0.0002 + 0.002 * chance if chance < 0.97 else self._slow_s * self.kernel.random.random()

    def listen(self, loop: SimLoop, factory: Any, port: int) -> SimServer:
        self._port += 1
        server = SimServer(loop, factory, port or self._port, self)
        self.listeners[loop.owner.name, server.port] = server
        return server

    def cut_until(self, one: Process, other: Process) -> float:
        return self._cuts.get(frozenset((one.machine.name, other.machine.name)), -1.0) if self._cuts else -1.0

    # ------------------------------------------------------------------ faults
    def reset(self, process: Process) -> None:
        """Let the connections of a process be lost, as by a firewall. Each side notices at another time."""
        self.kernel.note(f"the connections of {process.name} are lost")
        for transport in list(process.transports):
            transport.lose()

    def cut(self, one: str, other: str, seconds: float) -> None:
        """Let no packet pass between two machines for some time."""
        self.kernel.note(f"no packets between {one} and {other} for {seconds:.0f} s")
        self._cuts[frozenset((one, other))] = until = self.kernel.now + seconds
        if seconds <= LOST_S:
            return
        for process in self.kernel.processes:
            for each in process.transports:
                if self.cut_until(process, each.peer.loop.owner) == until:
                    each.is_lost = True
                    self.kernel.at(LOST_S + 60 * self.kernel.random.random(), each.end, _timed_out())


def _timed_out() -> OSError:
    return TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))


def _reset() -> OSError:
    return ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))


class SimServer:
    """A listening socket."""

    def __init__(self, loop: SimLoop, factory: Any, port: int, net: Net) -> None:
        self.loop, self._factory, self.port, self._net = loop, factory, port, net
        self.sockets = [self]

    def getsockname(self) -> tuple[str, int]:
        return "0.0.0.0", self.port

    def close(self) -> None:
        self._net.listeners.pop((self.loop.owner.name, self.port), None)

    def accept(self, transport: Transport) -> None:
        def made() -> None:
            transport.protocol = self._factory()
            transport.protocol.connection_made(transport)
            early, transport.early = transport.early, []
            for call, args in early:
                call(*args)

        self.loop.arrive(made)


class _Socket:
    def setsockopt(self, *_: object) -> None:
        """No-op: the options are those of `LOST_S`."""


class Transport(asyncio.Transport):
    """One end of a connection. `is_lost`: nothing that is sent, or on its way, arrives at the other end."""

    peer: Transport

    def __init__(self, loop: SimLoop, net: Net, protocol: Any) -> None:
        super().__init__({"socket": _Socket(), "peername": ("", 0), "sockname": ("", 0)})
        self.loop, self._net, self.protocol = loop, net, protocol
        self._is_closing = self._is_over = self.is_lost = False
        self._arrives = 0.0
        self._paused: deque[bytes] | None = None
        self.early: list[tuple[Callable[..., object], tuple[Any, ...]]] = []
        loop.owner.transports[self] = None

    # ------------------------------------------------------------------ sending
    def write(self, data: bytes | bytearray | memoryview) -> None:
        if not self._is_closing:
            self._send(self.peer.receive, bytes(data))

    def _send(self, call: Callable[..., object], *args: Any) -> None:
        if self.loop.owner.is_alive and not self.is_lost:
            kernel = self._net.kernel
            self._arrives = max(self._arrives, kernel.now + self._net.delay())
            kernel.at(self._arrives - kernel.now, self._arrive, call, args)

    def _arrive(self, call: Callable[..., object], args: tuple[Any, ...]) -> None:
        now = self._net.kernel.now
        if (until := self._net.cut_until(self.loop.owner, self.peer.loop.owner)) > now:
            self._net.kernel.at(until - now, self._arrive, call, args)
        elif not self.is_lost:
            call(*args)

    def close(self) -> None:
        if not self._is_closing and self.loop.owner.is_alive:
            self._is_closing = True
            self._send(self.peer.eof)
            self.loop.call_soon(self.end, None)

    def abort(self) -> None:
        if not self._is_over and self.loop.owner.is_alive:
            self._is_closing = True
            self._send(self.peer.end, _reset())
            self.loop.call_soon(self.end, None)

    def is_closing(self) -> bool:
        return self._is_closing

    # ------------------------------------------------------------------ faults
    def died(self) -> None:
        """The process of this end has ended; what it has sent may be lost."""
        kernel, random = self._net.kernel, self._net.kernel.random
        late = 5 * random.random() if random.random() < 0.3 else self._net.delay()
        self._is_over = True
        if random.random() < 0.5:
            self.is_lost = True
        kernel.at(max(late, self._arrives - kernel.now), self._arrive_end)

    def _arrive_end(self) -> None:
        now, until = self._net.kernel.now, self._net.cut_until(self.loop.owner, self.peer.loop.owner)
        if until > now:
            self._net.kernel.at(until - now, self._arrive_end)
        else:
            self.peer.end(_reset())

    def lose(self) -> None:
        kernel, random = self._net.kernel, self._net.kernel.random
        for each in (self, self.peer):
            each.is_lost = True
            kernel.at(60 * random.random() if random.random() < 0.3 else self._net.delay(), each.end, _timed_out())

    # ------------------------------------------------------------------ receiving
    def _when_made(self, call: Callable[..., object], *args: Any) -> None:
        if self.protocol is None:
            self.early.append((call, args))
        else:
            self.loop.arrive(call, *args)

    def receive(self, data: bytes) -> None:
        self._when_made(self._received, data)

    def _received(self, data: bytes) -> None:
        if self._paused is not None:
            self._paused.append(data)
        elif not self._is_closing:
            self.protocol.data_received(data)

    def eof(self) -> None:
        self._when_made(lambda: None if self._is_closing else self.protocol.eof_received())

    def end(self, error: OSError | None) -> None:
        """Handle the end of the connection."""

        def end() -> None:
            if not self._is_over:
                self._is_over = self._is_closing = True
                self.loop.owner.transports.pop(self, None)
                self.protocol.connection_lost(error)

        self._when_made(end)

    def pause_reading(self) -> None:
        self._paused = self._paused if self._paused is not None else deque()

    def resume_reading(self) -> None:
        paused, self._paused = self._paused, None
        for data in paused or ():
            self._received(data)

    def is_reading(self) -> bool:
        return self._paused is None

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """No-op: nothing is buffered."""

    def get_write_buffer_size(self) -> int:
        return 0
