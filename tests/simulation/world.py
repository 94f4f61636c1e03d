"""The simulated world, in which a seed determines the order of events.

A heap contains future events by virtual time. Processes are objects that are called by events and may be killed
between any two; code that waits is a generator that yields a `Future`, or seconds. Processes send each other
messages over `Link`s, which may be cut, with the real `dray.desk.stream.Stream` at both ends. Data written to a
`Disk` outlives the process.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Callable, Generator, Mapping
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from dray.desk.connection import DeskUnreachable
from dray.desk.stream import Stream
from dray.desk.wire import pack, unpack
from searchers.journal import Journal

TICK_S = 5.0
"""How often processes look around when nothing happens: 0.25 s in reality, where time costs nothing."""
PATIENCE_S = 600.0
"""If no process gets a message, or goes on, for so long, none ever will."""
MAX_STEPS = 30_000

encoded = json.JSONEncoder(allow_nan=False, separators=(",", ":")).encode
Steps = Generator["Future | float", Any, Any]


class Failed(AssertionError):
    """A violated invariant."""


class Killed(BaseException):
    """Raised in a running process that is killed."""


class World:
    """The clock, the heap, the random numbers, and the log.

    Args:
        lines: gets a line for each step; None: no log.
        wire: whether messages are encoded as on a real connection.
        slow_s: latency of the slowest messages.

    Attributes:
        waiting: the last rank that requested a decision.
        progress_at: time at which a process last ran or received a message.
        faults: sorted by step, the last one first; each occurs before its step.
    """

    def __init__(self, seed: object, lines: list[str] | None, *, wire: bool, slow_s: float) -> None:
        self.random = Random(f"world:{seed}")
        self.now = self.progress_at = 0.0
        self.steps = self._pushed = 0
        self.lines, self._wire, self._slow_s = lines, wire, slow_s
        self._heap: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []
        self._kept: list[Any] = []
        self.is_over = False
        self.waiting: Process | None = None
        self.processes: list[Process] = []
        self.links: dict[Link, None] = {}
        self.faults: list[tuple[int, Callable[[], None]]] = []

    def note(self, line: str) -> None:
        """Log an event; call this only if there are `lines`."""
        assert self.lines is not None
        self.lines.append(f"{self.steps:6d} {self.now:10.3f}  {line}")

    def at(self, delay: float, call: Callable[..., object], *args: Any) -> None:
        """Call this after a delay in seconds."""
        self.when(self.now + delay, call, *args)

    def when(self, time: float, call: Callable[..., object], *args: Any) -> None:
        """Call this at a given time; calls at equal times keep their order."""
        self._pushed += 1
        heapq.heappush(self._heap, (time, self._pushed, call, args))

    def delay(self) -> float:
        """Draw the latency of a message, or of a process that is about to run."""
        chance = self.random.random()
        return 0.0005 + 0.004 * chance if chance < 0.97 else self._slow_s * self.random.random()

    def run(self, waits: Callable[[], str]) -> None:
        """Run all events until `is_over`, and then those under way.

        Args:
            waits: describes unfinished work, for the error if no event is left.
        """
        heap, faults, pop = self._heap, self.faults, heapq.heappop
        next_tick = 0.0
        while heap or not self.is_over:
            if heap and (heap[0][0] <= next_tick or self.is_over):
                self.now, _, call, args = pop(heap)
                self.steps += 1
                call(*args)
                while faults and faults[-1][0] <= self.steps and not self.is_over:
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

    # ------------------------------------------------------------------ encoding
    def keep(self, value: Any) -> bytes:
        """Encode a value as bytes, like pickle."""
        self._kept.append(value)
        return len(self._kept).to_bytes(4, "big")

    def kept(self, data: bytes | memoryview) -> Any:
        """Decode the value."""
        return self._kept[int.from_bytes(data, "big") - 1]

    def encoded(self, message: tuple[Any, ...]) -> bytes:
        return pack(message) if self._wire else self.keep(message)

    def decoded(self, data: memoryview) -> Any:
        return unpack(data) if self._wire else self.kept(data)


class Future:
    """A future value or error. Only the first one counts."""

    __slots__ = ("_waiting", "done", "error", "value")

    def __init__(self) -> None:
        self.done = False
        self.value: Any = None
        self.error: Exception | None = None
        self._waiting: list[Callable[[Future], None]] = []

    def resolve(self, value: Any = None, error: Exception | None = None) -> None:
        """Set the value; waiting processes continue at once."""
        if not self.done:
            self.done, self.value, self.error = True, value, error
            for call in self._waiting:
                call(self)

    def then(self, call: Callable[[Future], None]) -> None:
        """Call this once the value is known, possibly at once."""
        if self.done:
            call(self)
        else:
            self._waiting.append(call)


def proceed(process: Process, steps: Steps, known: Future | None = None) -> None:
    """Run a process until it waits or has ended."""
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
    """An entity that runs until it ends or is killed."""

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name, self.alive = world, name, True
        self.links: dict[Link, None] = {}
        world.processes.append(self)

    def tick(self) -> None:
        """No-op at the end of a delay."""

    def take(self, call: Call) -> None:
        """Handle a call of another process."""
        raise AssertionError(f"{self.name} does not listen")

    def lost(self, session: Any) -> None:
        """Handle the end of a process that has called; by default a no-op."""

    def end(self) -> None:
        """Kill the process at once. The others notice some time later."""
        if self.alive:
            self.alive = False
            for link in list(self.links):
                link.close(self)


# ---------------------------------------------------------------------------------------------------------- messages
class Call:
    """A call that a process has received, like `dray.desk.connection.Call`."""

    __slots__ = ("args", "method", "number", "session")

    def __init__(self, session: End, number: int, method: str, args: tuple[Any, ...]) -> None:
        self.session, self.number, self.method, self.args = session, number, method, args

    def __repr__(self) -> str:
        return f"{self.session.process.name}.{self.method}{self.args}"

    def answer(self, value: Any = None) -> None:
        if self.number:
            self.session.send((self.number, value))

    def fail(self, text: str) -> None:
        raise Failed(text)


class Channel:
    """One direction of a connection. Frames arrive in order or, once it is cut, not at all.

    Frames sent at the same time usually arrive together.
    """

    __slots__ = ("_arrives_at", "_latest", "_sent_at", "_to", "_world", "is_open")

    def __init__(self, to: End) -> None:
        self._world, self._to, self.is_open = to.process.world, to, True
        self._arrives_at, self._sent_at = 0.0, -1.0
        self._latest: list[bytes] = []

    def send(self, *parts: bytes) -> None:
        world, frame = self._world, b"".join(parts)
        if self._sent_at == world.now and world.random.random() < 0.8:
            self._latest.append(frame)
            return
        self._sent_at, self._latest = world.now, [frame]
        self._arrives_at = max(self._arrives_at, world.now + world.delay())
        world.when(self._arrives_at, self._arrive, self._latest)

    def _arrive(self, frames: list[bytes]) -> None:
        world, to = self._world, self._to
        world.progress_at = world.now
        for frame in frames:
            if self.is_open and to.process.alive and (message := to.stream.receive(frame)) is not None:
                value = world.decoded(message)
                if world.lines is not None:
                    world.note(f"{to.process.name} <- {value}")
                to.take(value)

    def abort(self) -> None:
        self.is_open = False


class End:
    """One end of a link; `take` is called with each message, `gone` if the other process has ended."""

    __slots__ = ("gone", "process", "stream", "take")

    def __init__(self, process: Process, take: Callable[[Any], None], gone: Callable[[], None]) -> None:
        self.process, self.take, self.gone, self.stream = process, take, gone, Stream()

    def send(self, message: tuple[Any, ...]) -> None:
        self.stream.send(self.process.world.encoded(message))

    def push(self, value: Any) -> None:
        self.send((0, value))


class Link:
    """A session between two processes. Each message arrives exactly once and in order, even if the link is cut."""

    def __init__(self, client: End, server: End) -> None:
        self.client, self.server, self._world = client, server, client.process.world
        for each in (self._world, client.process, server.process):
            each.links[self] = None
        self._join()

    def _join(self) -> None:
        self._up, self._down = Channel(self.server), Channel(self.client)
        counts = self.client.stream.count(), self.server.stream.count()
        self.client.stream.resume(self._up, counts[1])  # type: ignore[arg-type]
        self.server.stream.resume(self._down, counts[0])  # type: ignore[arg-type]

    @property
    def is_open(self) -> bool:
        return self._up.is_open

    def cut(self) -> None:
        """Lose frames in transit; some time later there is another connection."""
        for channel, end in ((self._up, self.client), (self._down, self.server)):
            channel.is_open = False
            end.stream.channel = None
        self._world.at(self._world.random.uniform(0.1, 30.0), lambda: self in self._world.links and self._join())

    def forget(self) -> None:
        for each in (self._world, self.client.process, self.server.process):
            each.links.pop(self, None)

    def close(self, ended: Process) -> None:
        """Handle the end of one of the processes; its last messages may be lost."""
        self.forget()
        random = self._world.random
        is_client = ended is self.client.process
        if random.random() < 0.5:  # otherwise frames in transit arrive
            (self._up if is_client else self._down).is_open = False
        other = self.server if is_client else self.client
        self._world.at(5 * random.random() if random.random() < 0.3 else self._world.delay(), other.gone)


class Connection:
    """A client's end, like `dray.desk.connection.Connection`. `push` is called with each message without a call."""

    def __init__(self, process: Process, server: Process | None, push: Callable[[Any], None] | None = None) -> None:
        self._push = push
        self._calls: dict[int, Future] = {}
        self._number = 0
        self.is_lost = server is None or not server.alive
        self._end = End(process, self._take, self._gone)
        if server is not None and server.alive:

            def serve(message: Any) -> None:
                server.take(Call(session, *message))

            session = End(server, serve, lambda: server.alive and server.lost(session))
            self._link = Link(self._end, session)

    def call(self, method: str, *args: Any) -> Future:
        """Call a method; its answer may be `DeskUnreachable`."""
        future = Future()
        if self.is_lost:
            future.resolve(error=DeskUnreachable(""))
        else:
            self._number += 1
            self._calls[self._number] = future
            self._end.send((self._number, method, args))
        return future

    def tell(self, method: str, *args: Any) -> None:
        """Call a method without an answer."""
        if not self.is_lost:
            self._end.send((0, method, args))

    def _take(self, message: Any) -> None:
        number, value = message
        if self.is_lost:
            return
        if number:
            self._calls.pop(number).resolve(value)
        else:
            assert self._push is not None
            self._push(value)

    def _gone(self) -> None:
        if self._end.process.alive and not self.is_lost:
            self.is_lost = True
            for future in list(self._calls.values()):
                future.resolve(error=DeskUnreachable(""))

    def close(self) -> None:
        """Close the session; sent messages arrive."""
        if not self.is_lost and self._link.is_open:
            self._link.forget()
        self.is_lost = True


# ---------------------------------------------------------------------------------------------------------- the disk
class Disk:
    """A file to which lines are appended. Data that was not forced to disk is lost or torn when the process is killed.

    Attributes:
        full_until: writes fail until then.
        kills_writer: whether the next process that writes is killed while writing.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self.data = b""
        self.full_until = 0.0
        self.kills_writer = False

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
            raise OSError(28, "No space left on device")  # the journal removes the partly written line
        self.data += line


class DiskJournal(Journal):
    """The real journal, on a simulated disk. `written` is called with each record once it is on the disk."""

    def __init__(self, disk: Disk, written: Callable[[Mapping[str, Any]], object]) -> None:
        self.path = Path("journal.jsonl")
        self._disk, self._written = disk, written
        self._waiting: list[Mapping[str, Any]] = []
        disk.data = disk.data[: disk.data.rfind(b"\n") + 1]  # a torn line is removed

    def append(self, record: Mapping[str, Any], *, wait: bool = True) -> None:
        self._waiting.append(record)
        if wait:
            self.flush()

    def flush(self) -> None:
        """Write pending records."""
        waiting, self._waiting = self._waiting, []
        if waiting:
            self._disk.write("".join(f"{encoded(record)}\n" for record in waiting).encode())
            for record in waiting:
                self._written(record)
