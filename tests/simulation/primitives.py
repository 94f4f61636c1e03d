"""The primitives of `threading`, `queue`, `time`, `asyncio`, `os` and `signal` that simulated threads use.

`installed` puts them into the modules of the standard library while a schedule runs: these modules are the interface
that production and simulation share.
"""

from __future__ import annotations

import asyncio
import atexit
import builtins
import concurrent.futures.thread
import contextlib
import fcntl
import gc
import io
import logging
import os
import queue
import random
import shutil
import signal
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from random import Random
from typing import Any, ClassVar

import threadpoolctl

from tests.simulation import files
from tests.simulation.kernel import Kernel, Killed, Process, Task
from tests.simulation.net import SimLoop

EPOCH = 1_700_000_000.0
"""Virtual time 0."""
Ticket = tuple[Task, int]


class Primitive:
    """`kernel`: of the schedule that runs."""

    kernel: ClassVar[Kernel]

    def wake_one(self, waiting: deque[Ticket]) -> None:
        """Wake the first thread that still waits."""
        while waiting and not self.kernel.wake(waiting.popleft()):
            pass


class Lock(Primitive):
    def __init__(self) -> None:
        self._is_held = False
        self._waiting: deque[Ticket] = deque()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        kernel = self.kernel
        kernel.pause()
        if kernel.current is None:  # after the schedule
            return True
        deadline = None if timeout < 0 else kernel.now + timeout
        while self._is_held:
            if not blocking or (deadline is not None and kernel.now >= deadline):
                return False
            self._waiting.append(kernel.ticket())
            kernel.park(None if deadline is None else deadline - kernel.now)
        self._is_held = True
        return True

    def release(self) -> None:
        self._is_held = False
        self.wake_one(self._waiting)

    def locked(self) -> bool:
        return self._is_held

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class RLock(Lock):
    def __init__(self) -> None:
        super().__init__()
        self._owner: Task | None = None
        self.depth = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        current = self.kernel.current
        if current is not None and self._owner is current:
            self.depth += 1
            return True
        if not super().acquire(blocking, timeout):
            return False
        self._owner, self.depth = self.kernel.current, 1
        return True

    def release(self) -> None:
        self.depth -= 1
        if self.depth <= 0:
            self._owner = None
            super().release()


class Condition(Primitive):
    def __init__(self, lock: Any = None) -> None:
        self._lock = RLock() if lock is None else lock
        self.acquire, self.release = self._lock.acquire, self._lock.release
        self._waiting: deque[Ticket] = deque()

    def __enter__(self) -> bool:
        acquired: bool = self._lock.acquire()
        return acquired

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        ticket, depth = self.kernel.ticket(), getattr(self._lock, "depth", 1)
        self._waiting.append(ticket)
        for _ in range(depth):
            self._lock.release()
        woken = self.kernel.park(timeout)
        if not woken:
            self._waiting.remove(ticket)
        for _ in range(depth):
            self._lock.acquire()
        return woken

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        deadline = None if timeout is None else self.kernel.now + timeout
        while not (result := predicate()) and (deadline is None or self.kernel.now < deadline):
            self.wait(None if deadline is None else deadline - self.kernel.now)
        return result

    def notify(self, n: int = 1) -> None:
        for _ in range(n):
            self.wake_one(self._waiting)

    def notify_all(self) -> None:
        self.notify(len(self._waiting))


class Event(Primitive):
    def __init__(self) -> None:
        self._is_set = False
        self._waiting: list[Ticket] = []

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        waiting, self._waiting = self._waiting, []
        for ticket in waiting:
            self.kernel.wake(ticket)
        self.kernel.pause()

    def clear(self) -> None:
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        self.kernel.pause()
        if not self._is_set:
            self._waiting.append(self.kernel.ticket())
            self.kernel.park(timeout)
        return self._is_set


class Semaphore(Primitive):
    def __init__(self, value: int = 1) -> None:
        self._value = value
        self._waiting: deque[Ticket] = deque()

    def acquire(self, blocking: bool = True, timeout: float | None = None) -> bool:
        kernel = self.kernel
        kernel.pause()
        deadline = None if timeout is None else kernel.now + timeout
        while self._value <= 0:
            if not blocking or (deadline is not None and kernel.now >= deadline):
                return False
            self._waiting.append(kernel.ticket())
            kernel.park(None if deadline is None else deadline - kernel.now)
        self._value -= 1
        return True

    def release(self, n: int = 1) -> None:
        self._value += n
        for _ in range(n):
            self.wake_one(self._waiting)

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class SimpleQueue(Primitive):
    def __init__(self) -> None:
        self._items: deque[Any] = deque()
        self._count = Semaphore(0)

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        self._items.append(item)
        self._count.release()

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        if not self._count.acquire(block, timeout):
            raise queue.Empty
        return self._items.popleft()

    def put_nowait(self, item: Any) -> None:
        self.put(item)

    def get_nowait(self) -> Any:
        return self.get(False)

    def empty(self) -> bool:
        return not self._items

    def qsize(self) -> int:
        return len(self._items)


class Thread(Primitive):
    def __init__(
        self,
        group: None = None,
        target: Callable[..., object] | None = None,
        name: str | None = None,
        args: Any = (),
        kwargs: Any = None,
        *,
        daemon: bool | None = None,
    ) -> None:
        self._target, self.name, self._args, self._kwargs = target, name or "thread", args, kwargs or {}
        self.daemon = daemon
        self._task: Task | None = None
        self.kernel.idents += 1
        self._number = self.kernel.idents

    def __hash__(self) -> int:
        return self._number  # executors keep threads in sets, whose order must not depend on addresses

    def start(self) -> None:
        current = self.kernel.current
        assert current is not None
        if not current.process.is_alive:
            raise Killed
        self._task = self.kernel.spawn(current.process, self.name, self.run)
        self._task.thread = self

    def run(self) -> None:
        if self._target is not None:
            self._target(*self._args, **self._kwargs)

    def join(self, timeout: float | None = None) -> None:
        assert self._task is not None
        if not self._task.is_done:
            self._task.joining.append(self.kernel.ticket())
            self.kernel.park(timeout)

    def is_alive(self) -> bool:
        return self._task is not None and not self._task.is_done

    @property
    def ident(self) -> int | None:
        return None if self._task is None else self._task.ident

    native_id = ident


class _Main:
    """A thread that the kernel has started."""

    daemon = True

    def __init__(self, task: Task) -> None:
        self.name, self.ident = task.name, task.ident


def _thread_of(task: Task) -> Any:
    if task.thread is None:
        task.thread = _Main(task)
    return task.thread


def simulated(kernel: Kernel) -> dict[Any, dict[str, Any]]:
    """What replaces the attributes of modules, by module."""
    real: dict[str, Callable[..., Any]] = {
        name: getattr(module, name)
        for module, names in (
            (threading, ("current_thread", "main_thread", "get_ident")),
            (os, ("getpid",)),
            (signal, ("signal", "getsignal")),
            (traceback, ("format_exception",)),
        )
        for name in names
    }
    entropy = Random(f"entropy:{kernel.random.random()}")

    def skew() -> float:
        return EPOCH if kernel.current is None else EPOCH + kernel.current.process.machine.skew_s

    def sleep(seconds: float) -> None:
        kernel.park(seconds)

    def current_thread() -> Any:
        return real["current_thread"]() if kernel.current is None else _thread_of(kernel.current)

    def process_of(pid: int) -> Process:
        for each in kernel.processes:
            if each.pid == pid and each.is_alive:
                return each
        raise ProcessLookupError

    def format_exception(*given: Any, **options: Any) -> list[str]:
        if kernel.current is not None and not kernel.current.process.is_alive:
            raise Killed  # nobody reads it, and it takes milliseconds
        return real["format_exception"](*given, **options)  # type: ignore[no-any-return]

    def leave(code: int) -> None:
        assert kernel.current is not None
        kernel.end(kernel.current.process, code)
        raise Killed

    def set_handler(number: int, handler: Any) -> Any:
        if kernel.current is None:
            return real["signal"](number, handler)
        handlers = kernel.current.process.handlers
        before, handlers[number] = handlers.get(number, signal.SIG_DFL), handler
        return before

    def current_process() -> Process | None:
        return None if kernel.current is None else kernel.current.process

    return {
        threading: {
            "Lock": Lock,
            "RLock": RLock,
            "Condition": Condition,
            "Event": Event,
            "Semaphore": Semaphore,
            "Thread": Thread,
            "get_ident": lambda: real["get_ident"]() if kernel.current is None else kernel.current.ident,
            "current_thread": current_thread,
            "main_thread": lambda: (
                real["main_thread"]() if kernel.current is None else _thread_of(kernel.current.process.main)
            ),
        },
        threadpoolctl: {"current_thread": current_thread},  # which has imported it
        queue: {"SimpleQueue": SimpleQueue},
        time: {
            "time": lambda: skew() + kernel.now,
            "time_ns": lambda: int(1e9 * (skew() + kernel.now)),
            "monotonic": lambda: kernel.now,
            "perf_counter": lambda: kernel.now,
            "sleep": sleep,
        },
        asyncio: {"new_event_loop": lambda: SimLoop(kernel)},
        atexit: {"register": lambda function, *args, **kwargs: function},
        concurrent.futures.thread: {"_global_shutdown_lock": Lock()},
        signal: {
            "signal": set_handler,
            "getsignal": lambda number: (
                real["getsignal"](number)
                if (process := current_process()) is None
                else process.handlers.get(number, signal.SIG_DFL)
            ),
            "raise_signal": lambda number: kernel.deliver(current_process(), number),  # type: ignore[arg-type]
        },
        os: {
            "getpid": lambda: real["getpid"]() if (process := current_process()) is None else process.pid,
            "kill": lambda pid, number: kernel.deliver(process_of(pid), number),
            "_exit": leave,
            "urandom": entropy.randbytes,
            "nice": lambda increment: 0,
            "setsid": lambda: None,
            **files.FUNCTIONS,
        },
        fcntl: {"flock": files.flock},
        io: {"open": files.open_file},
        builtins: {"open": files.open_file},
        shutil: {"_use_fd_functions": False},  # the names of files are in its calls
        traceback: {"format_exception": format_exception},
        random: {"_urandom": entropy.randbytes},
        logging.root.manager: {"_clear_cache": lambda: None},  # slow, and nothing is logged
        sys: {"stdout": io.StringIO(), "stderr": io.StringIO()},
    }


@contextlib.contextmanager
def installed(
    kernel: Kernel, disk: files.Disk | None = None, others: Mapping[Any, Mapping[str, Any]] | None = None
) -> Iterator[None]:
    """Replace the primitives in the block, in which the kernel runs.

    Args:
        disk: the files of its processes.
        others: further replacements of attributes, by module.
    """
    new = {**simulated(kernel), **(others or {})}
    old = {module: {name: getattr(module, name) for name in names} for module, names in new.items()}
    Primitive.kernel = kernel
    collects, logs, handlers, level = (
        gc.isenabled(),
        logging.root.manager.disable,
        logging.root.handlers[:],
        logging.root.level,
    )
    gc.disable()  # destructors would run at places that depend on what ran before
    if logs < logging.CRITICAL:
        logging.disable()  # slow where it is repeated
    for module, names in new.items():
        for name, value in names.items():
            setattr(module, name, value)
    try:
        with files.in_use(kernel, disk):
            yield
    finally:
        for module, names in old.items():
            for name, value in names.items():
                setattr(module, name, value)
        concurrent.futures.thread._threads_queues.clear()
        if logs < logging.CRITICAL:
            logging.disable(logs)
        logging.root.handlers[:] = handlers
        logging.root.setLevel(level)
        if collects:
            gc.enable()
