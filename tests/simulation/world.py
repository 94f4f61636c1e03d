"""The simulated world: one seed gives one order of events.

A heap has what is still to happen, by virtual time. Processes are objects that are called by events and may be killed
between any two; what they wait for is written as a generator that yields a `Future`, or seconds. They send each other
messages over `Link`s, which may be cut: the real `dray.desk.stream.Stream` is at both ends. What a process wrote to a
`Disk` outlives it.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Callable, Generator, Mapping
from functools import partial
from random import Random
from typing import Any

from dray.desk.stream import Stream
from dray.desk.wire import pack, unpack
from searchers.journal import Journal

TICK_S = 5.0
"""How often processes look around when nothing happens: 0.25 s in reality, where time costs nothing."""
PATIENCE_S = 600.0
"""If no process gets a message, or goes on, for so long, none ever will."""
MAX_STEPS = 30_000

Steps = Generator["Future | float", Any, Any]


class Failed(AssertionError):
    """An invariant does not hold."""


class Unreachable(Exception):
    """The process at the other end is gone."""


class Killed(BaseException):
    """The running process was killed in the middle of what it does."""


class World:
    """The clock, the heap, the random numbers, and the lines that say what happened.

    Args:
        seed: of everything.
        lines: gets a line for each step; None: nobody reads it.
        wire: encode messages as on a real connection.
    """

    def __init__(
        self, seed: object, lines: list[str] | None = None, *, wire: bool = False, slow_s: float = 0.3
    ) -> None:
        self.random = Random(f"world:{seed}")
        self.now = 0.0
        self.steps = 0
        self.lines, self._wire, self.slow_s = lines, wire, slow_s
        self._heap: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []
        self._pushed = 0
        self._kept: list[Any] = []
        self.is_over = False
        self.waiting: Process | None = None
        """The last rank that has asked for a decision."""
        self.progress_at = 0.0
        """When a process last went on, or got a message."""
        self.processes: list[Process] = []
        self.links: list[Link] = []
        self.faults: list[tuple[int, Callable[[], None]]] = []
        """By the number of the step before which each happens, the last one first."""

    def note(self, line: str) -> None:
        """Write down what happens; call it only if there are `lines`."""
        assert self.lines is not None
        self.lines.append(f"{self.steps:6d} {self.now:10.3f}  {line}")

    def at(self, delay: float, call: Callable[..., object], *args: Any) -> None:
        """Call this in so many seconds."""
        self.when(self.now + delay, call, *args)

    def when(self, time: float, call: Callable[..., object], *args: Any) -> None:
        """Call this at that time."""
        self._pushed += 1
        heapq.heappush(self._heap, (time, self._pushed, call, args))

    def delay(self) -> float:
        """Of a message, or of a process that is about to run."""
        chance = self.random.random()
        return 0.0005 + 0.004 * chance if chance < 0.97 else self.slow_s * self.random.random()

    def run(self, waits: Callable[[], str]) -> None:
        """Let everything happen until it `is_over`.

        Args:
            waits: what is unfinished, for the error if nothing ever happens again.
        """
        heap, faults = self._heap, self.faults
        next_tick = 0.0
        while not self.is_over:
            if heap and heap[0][0] <= next_tick:
                self.now, _, call, args = heapq.heappop(heap)
                self.steps += 1
                call(*args)
                while faults and faults[-1][0] <= self.steps:
                    faults.pop()[1]()
                if self.steps > MAX_STEPS:
                    raise Failed(f"it does not end: {waits()}")
            else:
                if next_tick > self.progress_at + PATIENCE_S:
                    raise Failed(f"nothing will ever happen again: {waits()}")
                self.now = next_tick
                next_tick += TICK_S
                self.processes = [process for process in self.processes if process.alive]
                for process in self.processes:
                    process.tick()

    def drain(self) -> None:
        """Let happen what is on its way."""
        heap = self._heap
        while heap:
            self.now, _, call, args = heapq.heappop(heap)
            self.steps += 1
            call(*args)

    # ------------------------------------------------------------------ what is sent
    def keep(self, value: Any) -> bytes:
        """Bytes that stand for a value, as a pickle does."""
        self._kept.append(value)
        return len(self._kept).to_bytes(4, "big")

    def kept(self, data: bytes) -> Any:
        """The value that these bytes stand for."""
        return self._kept[int.from_bytes(data, "big") - 1]

    def encoded(self, message: tuple[Any, ...]) -> bytes:
        """A message as bytes."""
        return pack(message) if self._wire else self.keep(message)

    def decoded(self, data: memoryview) -> Any:
        """The message."""
        return unpack(data) if self._wire else self._kept[int.from_bytes(data, "big") - 1]


class Future:
    """A value that will be known, or an error. Only the first one counts."""

    __slots__ = ("_waiting", "done", "error", "value")

    def __init__(self) -> None:
        self.done = False
        self.value: Any = None
        self.error: Exception | None = None
        self._waiting: list[Callable[[Future], None]] = []

    def resolve(self, value: Any = None, error: Exception | None = None) -> None:
        """Now it is known: whoever waits goes on at once."""
        if not self.done:
            self.done, self.value, self.error = True, value, error
            waiting, self._waiting = self._waiting, []
            for call in waiting:
                call(self)

    def then(self, call: Callable[[Future], None]) -> None:
        """Call this once it is known, at once if it is."""
        if self.done:
            call(self)
        else:
            self._waiting.append(call)


def proceed(process: Process, steps: Steps, known: Future | None = None) -> None:
    """Let a process go on until it waits, or has ended."""
    process.world.progress_at = process.world.now
    while process.alive:
        try:
            if known is None:
                waits = steps.send(None)
            elif known.error is not None:
                waits = steps.throw(known.error)
            else:
                waits = steps.send(known.value)
        except StopIteration:
            return
        if not isinstance(waits, Future):
            process.world.at(waits, proceed, process, steps)
            return
        if not waits.done:
            waits.then(partial(proceed, process, steps))
            return
        known = waits


class Process:
    """Something that runs until it ends, or is killed.

    Args:
        name: for people.
    """

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name, self.alive = world, name, True
        self.links: dict[Link, None] = {}
        world.processes.append(self)

    def tick(self) -> None:
        """Some time has passed."""

    def take(self, call: Call) -> None:
        """Another process calls."""
        raise AssertionError(f"{self.name} does not listen")

    def lost(self, session: object) -> None:
        """Another process that has called is gone."""

    def end(self) -> None:
        """It is gone, whatever it was about to do. The others notice some time later."""
        if self.alive:
            self.alive = False
            for link in list(self.links):
                link.close(self)


# ---------------------------------------------------------------------------------------------------------- messages
class Call:
    """A call that a process has received: as `dray.desk.connection.Call`."""

    __slots__ = ("args", "method", "number", "session")

    def __init__(self, session: End, number: int, method: str, args: tuple[Any, ...]) -> None:
        self.session, self.number, self.method, self.args = session, number, method, args

    def __repr__(self) -> str:
        return f"{self.session}.{self.method}{self.args}"

    def answer(self, value: Any = None) -> None:
        if self.number:
            self.session.send((self.number, value))


class _Channel:
    """One direction of a connection: frames arrive in order, or, once it is cut, not at all.

    Those that are sent at the same moment usually arrive together.
    """

    __slots__ = ("_last", "_latest", "_sent_at", "_to", "_world", "is_open")

    def __init__(self, world: World, to: End) -> None:
        self._world, self._to, self._last, self.is_open = world, to, 0.0, True
        self._sent_at = -1.0
        self._latest: list[bytes] = []

    def send(self, *parts: bytes) -> None:
        world = self._world
        if self._sent_at == world.now and world.random.random() < 0.8:
            self._latest.append(b"".join(parts))
            return
        self._sent_at, self._latest = world.now, [b"".join(parts)]
        self._last = max(self._last, world.now + world.delay())
        world.when(self._last, self._arrive, self._latest)

    def _arrive(self, frames: list[bytes]) -> None:
        self._world.progress_at = self._world.now
        for frame in frames:
            if self.is_open and self._to.process.alive:
                self._to.receive(frame)

    def abort(self) -> None:
        self.is_open = False


class End:
    """One end of a link."""

    __slots__ = ("_take", "process", "stream")

    def __init__(self, process: Process, take: Callable[[End, Any], None]) -> None:
        self.process, self._take, self.stream = process, take, Stream()

    def __repr__(self) -> str:
        return self.process.name

    def send(self, message: tuple[Any, ...]) -> None:
        self.stream.send(self.process.world.encoded(message))

    def receive(self, frame: bytes) -> None:
        message = self.stream.receive(frame)
        if message is not None:
            world = self.process.world
            value = world.decoded(message)
            if world.lines is not None:
                world.note(f"{self.process.name} <- {value}")
            self._take(self, value)


class Link:
    """A session between two processes: its messages arrive once each, in order, however often it is cut."""

    def __init__(self, client: Connection, server: Process) -> None:
        world = self._world = server.world
        self.connection = client
        self.client = client.end
        self.server = End(server, _serve)
        for end in (self.client, self.server):
            end.process.links[self] = None
        world.links.append(self)
        self._join()

    def _join(self) -> None:
        self._up, self._down = _Channel(self._world, self.server), _Channel(self._world, self.client)
        counts = self.client.stream.count(), self.server.stream.count()
        self.client.stream.resume(self._up, counts[1])  # type: ignore[arg-type]
        self.server.stream.resume(self._down, counts[0])  # type: ignore[arg-type]

    @property
    def is_open(self) -> bool:
        return self._up.is_open

    def cut(self) -> None:
        """What is on its way is lost; some time later there is another connection."""
        self._sever()
        self._world.at(self._world.random.uniform(0.1, 30.0), self._resume)

    def _sever(self) -> None:
        for channel, end in ((self._up, self.client), (self._down, self.server)):
            channel.is_open = False
            end.stream.channel = None

    def _resume(self) -> None:
        if self in self._world.links:
            self._join()

    def close(self, ended: Process) -> None:
        """One of the processes has ended: what it has sent last may be lost."""
        world = self._world
        if self not in world.links:
            return
        world.links.remove(self)
        other = self.server if ended is self.client.process else self.client
        other.process.links.pop(self, None)
        ended.links.pop(self, None)
        channel = self._up if ended is self.client.process else self._down
        if world.random.random() < 0.5:  # else what is on its way arrives
            channel.is_open = False
        gone = self.connection.fail if other is self.client else self._lost
        world.at(world.random.uniform(0.0, 5.0) if world.random.random() < 0.3 else world.delay(), gone)

    def _lost(self) -> None:
        if self.server.process.alive:
            self.server.process.lost(self.server)


def _serve(session: End, message: Any) -> None:
    number, method, args = message
    session.process.take(Call(session, number, method, args))


class Connection:
    """A client's end: as `dray.desk.connection.Connection`.

    Args:
        push: called with each message without a call.
    """

    def __init__(self, process: Process, server: Process | None, push: Callable[[Any], None] | None = None) -> None:
        self._world, self._push = process.world, push
        self._calls: dict[int, Future] = {}
        self._number = 0
        self.is_gone = server is None or not server.alive
        self.end = End(process, self._take)
        self.link = None if self.is_gone or server is None else Link(self, server)

    def call(self, method: str, *args: Any) -> Future:
        """Call a method; its answer may be `Unreachable`."""
        future = Future()
        if self.is_gone:
            future.resolve(error=Unreachable())
        else:
            self._number += 1
            self._calls[self._number] = future
            self.end.send((self._number, method, args))
        return future

    def tell(self, method: str, *args: Any) -> None:
        """Call a method that gives no answer."""
        if not self.is_gone:
            self.end.send((0, method, args))

    def _take(self, end: End, message: Any) -> None:
        number, value = message
        if self.is_gone:
            return
        if number:
            self._calls.pop(number).resolve(value)
        else:
            assert self._push is not None
            self._push(value)

    def fail(self) -> None:
        """The other process is gone."""
        if self.end.process.alive and not self.is_gone:
            self.is_gone = True
            calls, self._calls = self._calls, {}
            for future in calls.values():
                future.resolve(error=Unreachable())

    def close(self) -> None:
        """Say goodbye: what was sent arrives."""
        self.is_gone = True
        if self.link is not None and self.link in self._world.links and self.link.is_open:
            self._world.links.remove(self.link)
            self.link.server.process.links.pop(self.link, None)
            self.end.process.links.pop(self.link, None)


# ---------------------------------------------------------------------------------------------------------- the disk
class Disk:
    """A file to which lines are appended. What was not forced to it is lost at a kill, or torn.

    Attributes:
        data: its content.
        full_until: writes fail until then.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self.data = b""
        self.full_until = 0.0
        self.kills_writer = False
        """The process that writes next is killed while it does."""

    @property
    def is_full(self) -> bool:
        return self._world.now < self.full_until

    def write(self, line: bytes) -> None:
        """Append a line, and force it to the disk."""
        if self.kills_writer:
            self.kills_writer = False
            self.data += line[: self._world.random.randrange(len(line) + 1)]
            raise Killed
        if self.is_full:
            raise OSError(28, "No space left on device")  # the journal removes what was written of the line
        self.data += line


class DiskJournal(Journal):
    """The real journal, on a simulated disk.

    Args:
        written: called with the records that are on the disk now.
    """

    def __init__(self, disk: Disk, written: Callable[[Mapping[str, Any]], None]) -> None:
        self._disk, self._written = disk, written
        self._waiting: list[Mapping[str, Any]] = []
        self._lines: list[bytes] = []
        self._together = False
        whole = disk.data.rfind(b"\n") + 1
        disk.data = disk.data[:whole]  # a torn line is removed

    def append(self, record: Mapping[str, Any], *, wait: bool = True) -> None:
        self._lines.append(json.dumps(record, allow_nan=False, separators=(",", ":")).encode() + b"\n")
        self._waiting.append(record)
        if wait and not self._together:
            self.flush()

    def flush(self) -> None:
        """Write what waits."""
        line, self._lines = b"".join(self._lines), []
        waiting, self._waiting = self._waiting, []
        if line:
            self._disk.write(line)
            for record in waiting:
                self._written(record)
