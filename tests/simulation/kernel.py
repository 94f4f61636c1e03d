"""A deterministic scheduler of simulated processes and their threads, on virtual time.

The code that runs in it is the code that ships. Its threads are real threads that pass a baton: exactly one runs, and
whenever it waits, or with some chance at any primitive or file operation, the seed chooses the next one. The primitives
are in `tests.simulation.primitives`, files in `tests.simulation.files`, connections in `tests.simulation.net`.
"""

from __future__ import annotations

import _thread
import heapq
import os
import signal
import sys
from asyncio import events
from collections.abc import Callable
from random import Random
from types import FrameType
from typing import Any

MAX_STEPS = 100_000
STEP_S = 2e-5
"""How long a thread runs before it waits, in virtual time."""
SIGKILL = -signal.SIGKILL

_start_thread = _thread.start_new_thread
_get_loop, _set_loop = events._get_running_loop, events._set_running_loop


class Killed(BaseException):
    """Raised in every thread of a process that has ended, at each further operation."""


class Failed(AssertionError):
    """A violated invariant."""


class Machine:
    """A machine. `skew_s`: how far its clock is ahead; `full_until`: its disk has no room until then."""

    def __init__(self, name: str) -> None:
        self.name, self.skew_s, self.full_until = name, 0.0, -1.0


class Process:
    """A simulated process, from its start until its main thread returns or it is killed.

    Attributes:
        kill_at: number of the file operation at which it is killed; 0: never.
        on_end: called when it ends, in no thread.
        exit_code: negative for a signal; None while it runs.
    """

    def __init__(self, kernel: Kernel, name: str, machine: Machine) -> None:
        self.kernel, self.name, self.machine = kernel, name, machine
        self.pid = 1000 + len(kernel.processes)
        self.tasks: dict[Task, None] = {}
        self.main: Task
        self.transports: dict[Any, None] = {}
        self.files: dict[Any, None] = {}
        self.file_operations = self.kill_at = 0
        self.on_end: list[Callable[[], object]] = []
        self.is_alive = True
        self.exit_code: int | None = None
        self.handlers: dict[int, Any] = {}
        self.signals: list[int] = []

    def kill(self) -> None:
        self.kernel.end(self, SIGKILL)


class Task:
    """A thread of a simulated process."""

    __slots__ = (
        "baton",
        "ident",
        "is_done",
        "joining",
        "main",
        "name",
        "parked",
        "process",
        "thread",
        "token",
        "woken",
    )

    def __init__(self, process: Process, name: str, main: Callable[[], object]) -> None:
        self.process, self.name, self.main = process, name, main
        self.parked = self.woken = self.is_done = False
        self.token = 0
        self.joining: list[tuple[Task, int]] = []
        self.thread: Any = None  # its `threading.Thread`
        process.kernel.idents += 1
        self.ident = process.kernel.idents
        self.baton = _held()


def _held() -> _thread.LockType:
    lock = _thread.allocate_lock()
    lock.acquire()
    return lock


def _core() -> int:
    """The core on which this thread runs: two processes that choose by a number could both choose the same one."""
    with open("/proc/thread-self/stat", encoding="utf-8") as stat:
        return int(stat.read().rpartition(")")[2].split()[36])


class Kernel:
    """A schedule.

    Args:
        preempt: how often a thread is interrupted at a primitive or a file operation.
        lines: gets a line for each event that is noted.
        preempt_in: the ends of names of files between whose lines threads may be interrupted too.
    """

    def __init__(
        self,
        seed: object,
        *,
        preempt: float = 0.05,
        lines: list[str] | None = None,
        preempt_in: tuple[str, ...] = (),
    ) -> None:
        self.random = Random(f"kernel:{seed}")
        self.preempt, self.lines, self.preempt_in = preempt, lines, preempt_in
        self.now = 0.0
        self.steps = self.switches = self.idents = self._pushed = 0
        self.digest = 0
        """A hash of all that the seed has chosen."""
        self.failure: BaseException | None = None
        self.is_over = False
        self.processes: list[Process] = []
        self.machines: dict[str, Machine] = {}
        self.current: Task | None = None
        self._ready: list[Task] = []
        self._heap: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []
        self._hub = _held()
        self._is_unwinding = False

    def note(self, line: str) -> None:
        """Log an event."""
        if self.lines is not None and not self._is_unwinding:
            who = "" if self.current is None else f"{self.current.process.name}/{self.current.name}"
            self.lines.append(f"{self.steps:6d} {self.now:10.3f}  {who:32s} {line}")

    def fail(self, why: str) -> None:
        """End the schedule, because an invariant is violated. The code that runs could catch an exception."""
        if not self._is_unwinding:
            self.note(f"FAILED: {why}")
            self.failure = self.failure or Failed(why)

    # ------------------------------------------------------------------ time
    def at(self, delay: float, call: Callable[..., object], *args: Any) -> None:
        """Call this after a delay in seconds, in no thread."""
        self._pushed += 1
        heapq.heappush(self._heap, (self.now + delay, self._pushed, call, args))

    # ------------------------------------------------------------------ processes and threads
    def machine(self, name: str) -> Machine:
        return self.machines.setdefault(name, Machine(name))

    def process(self, name: str, main: Callable[[], object], machine: str = "") -> Process:
        """Start a process; `machine`: by default one of its own."""
        process = Process(self, name, self.machine(machine or name))
        self.processes.append(process)
        process.main = self.spawn(process, "main", main)
        return process

    def spawn(self, process: Process, name: str, main: Callable[[], object]) -> Task:
        """Start a thread."""
        task = Task(process, name, main)
        process.tasks[task] = None
        _start_thread(self._carry, (task,))
        self._ready.append(task)
        return task

    def _carry(self, task: Task) -> None:
        """Run a task, in a thread of its own."""
        task.baton.acquire()
        try:
            self._run(task)
            following = self.current = self._next()
        except BaseException as error:  # a fault of the simulation: nobody would have the baton
            self.failure, following = self.failure or error, None
        (self._hub if following is None else following.baton).release()

    def _run(self, task: Task) -> None:
        process, code = task.process, 0
        try:
            if self.preempt_in:
                sys.settrace(self._trace)
            if process.is_alive:
                task.main()
        except Killed:
            pass
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 1
        except BaseException as error:
            if process.is_alive and self.failure is None:
                self.note(f"FAILED: {error!r}")
                self.failure = error
        _set_loop(None)
        task.is_done = True
        del process.tasks[task]
        for ticket in task.joining:
            self.wake(ticket)
        if task is process.main and process.is_alive:
            self.end(process, code)  # its other threads are daemons

    def end(self, process: Process, code: int) -> None:
        """End a process, as by a signal or by its last statement. It does nothing from now on."""
        if not process.is_alive:
            return
        process.is_alive, process.exit_code = False, code
        self.note(f"{process.name} ends with {code}")
        for task in process.tasks:
            if task.parked:
                task.parked = False
                task.token += 1
                self._ready.append(task)
        for file in process.files:
            file.abandon()  # releases its locks
        for transport in list(process.transports):
            transport.died()
        for call in process.on_end:
            self._call(call)

    def deliver(self, process: Process, number: int) -> None:
        """Send a signal to a process. Its main thread handles it."""
        if not process.is_alive:
            return
        if number == signal.SIGKILL:
            self.end(process, SIGKILL)
            return
        process.signals.append(number)
        if process.main.parked:
            process.main.parked = False
            self._ready.append(process.main)

    def _handle_signals(self, task: Task) -> None:
        process = task.process
        while process.signals and task is process.main:
            number = process.signals.pop(0)
            handler = process.handlers.get(number, signal.SIG_DFL)
            if callable(handler):
                handler(number, None)
            elif handler is signal.SIG_DFL:
                self.end(process, -number)
                raise Killed

    # ------------------------------------------------------------------ switching
    def ticket(self) -> tuple[Task, int]:
        """What `wake` needs, taken before `park`; no other thread may run between them."""
        assert self.current is not None
        return self.current, self.current.token

    def park(self, timeout: float | None = None) -> bool:
        """Wait for `wake`. Returns whether it came before the timeout."""
        task = self.current
        assert task is not None, "only simulated threads may wait"
        if not task.process.is_alive:
            raise Killed
        token, task.woken = task.token, False
        if timeout is not None:
            self.at(max(timeout, 0.0), self._end_park, task, token, False)
        while task.token == token:
            task.parked = True
            self._leave(task)
        return task.woken

    def wake(self, ticket: tuple[Task, int]) -> bool:
        """End a `park`. Returns False if it has ended already."""
        return self._end_park(*ticket, True)

    def _end_park(self, task: Task, token: int, woken: bool) -> bool:
        if task.token != token or task.is_done:
            return False
        task.token += 1
        task.woken = woken
        if task.parked:
            task.parked = False
            self._ready.append(task)
        return True

    def pause(self) -> None:
        """Maybe let another thread run. Raises `Killed` in a process that has ended."""
        task = self.current
        if task is None:
            return
        if not task.process.is_alive:
            raise Killed
        if self.preempt and self.random.random() < self.preempt:
            self._ready.append(task)
            self._leave(task)
        elif task.process.signals:
            self._handle_signals(task)

    def _leave(self, task: Task) -> None:
        """Let another thread run until it is this one's turn."""
        loop = _get_loop()
        following = self._next()
        if following is not task:
            self.switches += 1
            if loop is not None:
                _set_loop(None)
            self.current = following
            (self._hub if following is None else following.baton).release()
            task.baton.acquire()
            if loop is not None:
                _set_loop(loop)
        else:
            self.current = task
        if not task.process.is_alive:
            raise Killed
        if task.process.signals:
            self._handle_signals(task)

    def _next(self) -> Task | None:
        """The next thread; None at the end."""
        ready, heap = self._ready, self._heap
        self.current = None
        while True:
            self.steps += 1
            if self.is_over or self.failure is not None or self.steps > MAX_STEPS:
                return None
            self.now += STEP_S
            while heap and heap[0][0] <= self.now:
                _, _, call, args = heapq.heappop(heap)
                self._call(call, *args)
            if ready:
                index = self.random.randrange(len(ready)) if len(ready) > 1 else 0
                task = ready[index]
                ready[index] = ready[-1]
                ready.pop()
                self.digest = hash((self.digest, task.ident, self.steps))
                return task
            if not heap:
                return None
            if not self.is_over:
                self.now = max(self.now, heap[0][0])

    def _call(self, call: Callable[..., object], *args: Any) -> None:
        """Call this in no thread."""
        current, self.current = self.current, None
        try:
            call(*args)
        except Exception as error:
            self.note(f"FAILED: {error!r}")
            self.failure = self.failure or error
        self.current = current

    def _trace(self, frame: FrameType, event: str, arg: object) -> Any:
        return self._trace_line if frame.f_code.co_filename.endswith(self.preempt_in) else None

    def _trace_line(self, frame: FrameType, event: str, arg: object) -> Any:
        """Maybe let another thread run between two lines."""
        task = self.current
        if event == "line" and task is not None and task.process.is_alive and self.random.random() < self.preempt:
            self._ready.append(task)
            self._leave(task)
        return self._trace_line

    # ------------------------------------------------------------------ the whole
    def stop(self) -> None:
        """End the schedule soon."""
        self.is_over = True

    def run(self) -> None:
        """Run until `stop`, and then end all processes. Call it within `tests.simulation.primitives.installed`.

        Raises:
            Failed: an invariant is violated, nothing is left to do, or it does not end.
            BaseException: an exception that a thread has not caught.
        """
        self._proceed()
        is_stuck = not self.is_over and self.failure is None
        waiting = [f"{task.process.name}/{task.name}" for process in self.processes for task in process.tasks]
        steps, now = self.steps, self.now
        self._unwind()
        self.steps, self.now = steps, now
        if self.failure is not None:
            raise self.failure
        if is_stuck:
            raise Failed(f"it does not end, or nothing is left to do: {waiting} wait after {steps} steps")

    def _proceed(self) -> None:
        following = self.current = self._next()
        if following is not None:
            # Only one thread runs at a time: on one core the baton is passed without waking another core.
            cores = os.sched_getaffinity(0)
            os.sched_setaffinity(0, {_core()})
            try:
                following.baton.release()
                self._hub.acquire()
            finally:
                os.sched_setaffinity(0, cores)
        self.current = None

    def _unwind(self) -> None:
        """Let all threads end, so that none is left over."""
        failure, self.failure, self.is_over, self.preempt, self.steps = self.failure, None, False, 0.0, 0
        self._is_unwinding = True
        self._heap.clear()
        for process in self.processes:
            process.on_end.clear()
            self.end(process, SIGKILL)
        self._heap.clear()
        self._ready = [task for process in self.processes for task in process.tasks]
        for task in self._ready:
            task.parked = False
        self._proceed()
        self.failure = failure
