"""What clients send is read in a process of its own, within limits of time and memory.

A patch, an archive or a config of some hundred kilobytes can be made so that reading it takes minutes or gigabytes. In
the server's process, that would hold up all requests and all experiments.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import resource
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from dray.code.trial_import import IMPORT_S, START_S, fault_of_import
from dray.config.entrypoint import ClassName
from dray.errors import ExperimentError
from dray.serve.answers import BadInput
from dray.text import one_line

T = TypeVar("T")

TEMPLATE = "dray.serve.processes"  # what the template of the server's processes has imported
CPU_S = 30
"""How long this may take, in seconds of CPU time: a slow disk is no fault of what was sent."""
MEMORY_BYTES = 2 << 30
"""How much more memory this may take."""
WALL_S = START_S + IMPORT_S + 4 * CPU_S  # after which the process is killed, whatever it does


def outside(function: Callable[..., T], *given: Any) -> T:
    """Call a function of a module in a fork of the template, which has imported torch. Raises what the function does,
    and `BadInput` if it exceeds the limits."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([TEMPLATE])
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(theirs, function, given), daemon=True)
    process.start()
    theirs.close()
    try:
        if not ours.poll(WALL_S):
            raise BadInput(f"reading what was sent takes longer than {WALL_S:.0f} s")
        error, found = ours.recv()
    except (EOFError, OSError):
        raise BadInput("the process that reads what was sent ended without an answer") from None
    finally:
        process.kill()
        process.join()
        ours.close()
    if error is not None:
        raise error
    return found  # type: ignore[no-any-return]


def import_on_trial(entrypoint: ClassName, directory: Path) -> str:
    """A `dray.code.trial_import.Importer` for a process of `outside`, whose limits are not those of the model."""
    with _soft_limits({resource.RLIMIT_CPU: None, resource.RLIMIT_DATA: None}):
        return fault_of_import(entrypoint, directory)


@contextmanager
def limited() -> Iterator[None]:
    """Limit what this process uses within the block, in the main thread; `BadInput` if it would use more."""

    def too_long(number: int, frame: object) -> NoReturn:
        raise BadInput(f"reading what was sent takes more than {CPU_S} s of CPU time")

    used = resource.getrusage(resource.RUSAGE_SELF)
    limits = {
        resource.RLIMIT_CPU: int(used.ru_utime + used.ru_stime) + CPU_S,
        resource.RLIMIT_DATA: _data_bytes() + MEMORY_BYTES,  # not RLIMIT_AS: CUDA reserves more than there is
    }
    before = signal.signal(signal.SIGXCPU, too_long)
    try:
        with _soft_limits(limits):
            yield
    except MemoryError:
        raise BadInput(f"reading what was sent takes more than {MEMORY_BYTES >> 20} MiB of memory") from None
    finally:
        signal.signal(signal.SIGXCPU, before)


@contextmanager
def _soft_limits(limits: Mapping[int, int | None]) -> Iterator[None]:
    """Within the block, the process has these limits, at most its hard ones; None: the hard one."""
    before = {kind: resource.getrlimit(kind) for kind in limits}
    for kind, limit in limits.items():
        hard = before[kind][1]
        soft = hard if limit is None else limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(kind, (soft, hard))
    try:
        yield
    finally:
        for kind, each in before.items():
            resource.setrlimit(kind, each)


def _data_bytes() -> int:
    """The memory that RLIMIT_DATA counts."""
    return int(Path("/proc/self/statm").read_text().split()[5]) * os.sysconf("SC_PAGE_SIZE")


def _answer(answer: Connection, function: Callable[..., Any], given: tuple[Any, ...]) -> None:
    os.setsid()
    with suppress(OSError):  # if memory is short, this process is the first to be killed
        Path("/proc/self/oom_score_adj").write_text("1000")
    told: tuple[Exception | None, Any]
    try:
        with limited():
            told = None, function(*given)
    except Exception as error:
        told = _sendable(error), None
    answer.send(told)


def _sendable(error: Exception) -> Exception:
    with suppress(Exception):
        if type(pickle.loads(pickle.dumps(error))) is type(error):
            return error
    return ExperimentError(one_line(error))
