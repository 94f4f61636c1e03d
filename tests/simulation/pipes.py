"""In place of `multiprocessing`: processes of a simulated one, and pipes to them."""

from __future__ import annotations

import pickle
import queue
from collections.abc import Callable
from typing import Any

from tests.simulation.kernel import Kernel
from tests.simulation.kernel import Process as KernelProcess

_END = object()


class Pipe:
    """One end of a pipe. It is closed with its `owner`; other processes have closed their copy."""

    owner: KernelProcess | None = None

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._received: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._is_closed = self._is_broken = False
        self.other: Pipe

    def send(self, message: object) -> None:
        if self._is_closed or self.other._is_closed:
            raise BrokenPipeError
        data = pickle.dumps(message)
        self._kernel.at(0.0005, lambda: self.other._arrive(data))

    def _arrive(self, message: object) -> None:
        if not self._is_closed:
            self._received.put(message)

    def recv(self) -> Any:
        if self._is_broken or (data := self._received.get()) is _END:
            self._is_broken = True
            raise EOFError
        return pickle.loads(data)

    def close(self) -> None:
        current = self._kernel.current
        is_copy = current is not None and self.owner is not None and current.process is not self.owner
        if not self._is_closed and not is_copy:
            self._is_closed = True
            self._kernel.at(0.0005, self.other._arrive, _END)


class Process:
    """In place of `multiprocessing.Process`. `machine`: where it runs."""

    def __init__(self, kernel: Kernel, machine: str, target: Callable[..., object], args: tuple[Any, ...]) -> None:
        self._kernel, self._machine, self._target, self._args = kernel, machine, target, args
        self._process: KernelProcess
        self._ended: queue.SimpleQueue[None] = queue.SimpleQueue()

    def start(self) -> None:
        """Start it; it owns the pipes among its arguments."""
        current = self._kernel.current
        assert current is not None
        owner, pipes = current.process, [each for each in self._args if isinstance(each, Pipe)]
        name = f"{owner.name}/process-{len(self._kernel.processes)}"
        self._process = self._kernel.process(name, lambda: self._target(*self._args), self._machine)
        for pipe in pipes:
            pipe.owner = self._process
            self._process.on_end.append(pipe.close)
            owner.on_end.append(pipe.other.close)
        self._process.on_end.append(lambda: self._ended.put(None))

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exitcode(self) -> int | None:
        return self._process.exit_code

    def join(self) -> None:
        if self._process.is_alive:
            self._ended.get()


class Context:
    """In place of a context of `multiprocessing`."""

    def __init__(self, kernel: Kernel, machine: str) -> None:
        self._kernel, self._machine = kernel, machine

    def set_forkserver_preload(self, modules: list[str]) -> None:
        """No-op: simulated processes share modules."""

    def Pipe(self) -> tuple[Pipe, Pipe]:
        one, other = Pipe(self._kernel), Pipe(self._kernel)
        one.other, other.other = other, one
        return one, other

    def Process(self, *, target: Callable[..., object], args: tuple[Any, ...], **_: object) -> Process:
        return Process(self._kernel, self._machine, target, args)
