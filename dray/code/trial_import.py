"""Importing a class on trial: in a process of its own, with a time limit, so that code can be refused.

The code may loop, fork or print while it is imported. Whatever it leaves running is killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

from dray.config.entrypoint import ClassName
from dray.errors import EntrypointError
from dray.text import one_line

IMPORT_S = 60.0
"""How long an import may take, after that of torch and dray."""
START_S = 120.0
"""How long a process may take to import torch and dray."""
KILL_S = 5.0
MAX_ANSWER_BYTES = 1 << 20
_PR_SET_CHILD_SUBREAPER = 36

Start: TypeAlias = Callable[..., "subprocess.Popen[bytes]"]
Importer: TypeAlias = Callable[[ClassName, Path], str]
"""Imports a class from a directory on trial. Returns what is wrong; "" if nothing is."""


def import_in_new_process(entrypoint: ClassName, directory: Path, start: Start = subprocess.Popen) -> str:
    """An `Importer` that starts Python anew, which takes seconds. `start`: as `subprocess.Popen`."""
    request = json.dumps([entrypoint.module, entrypoint.name, str(directory), IMPORT_S])
    command = [sys.executable, "-c", f"from {__name__} import main; main()", request]
    here = str(Path(__file__).parents[2])
    path = os.pathsep.join([here, *filter(None, [os.environ.get("PYTHONPATH")])])
    done = start(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    try:
        return str(json.loads(_printed(done, START_S + IMPORT_S + KILL_S)))
    except ValueError:
        return f"the process that imports {entrypoint.module} ended without an answer, or gave none"
    finally:
        done.kill()
        done.wait()
        assert done.stdout is not None
        done.stdout.close()


def _printed(process: subprocess.Popen[bytes], limit_s: float) -> bytes:
    """What a process has printed when it ends, or at the limit. The imported code may print there too, endlessly."""
    assert process.stdout is not None
    pipe = process.stdout.fileno()
    waiting, until, said = select.poll(), time.monotonic() + limit_s, b""
    waiting.register(pipe, select.POLLIN)
    while len(said) <= MAX_ANSWER_BYTES and waiting.poll(max(until - time.monotonic(), 0) * 1000):
        more = os.read(pipe, 1 << 16)
        if not more:
            break
        said += more
    return said


def main() -> None:
    """The process of `import_in_new_process`."""
    module, name, directory, limit_s = json.loads(sys.argv[1])
    print(json.dumps(fault_of_import(ClassName(module, name), Path(directory), limit_s)))


def fault_of_import(entrypoint: ClassName, directory: Path, limit_s: float = IMPORT_S) -> str:
    """Import a class in a child of this process, which has no other. Returns what is wrong; "" if nothing is."""
    import dray.pytorch  # noqa: F401  # not within the limit

    # Children of the child that outlive it become this process's.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(ours)
        _import_and_tell(entrypoint, directory, theirs)
    os.close(theirs)
    try:
        return _answer(child, ours, entrypoint, limit_s)
    finally:
        os.close(ours)
        _kill_children()


def _import_and_tell(entrypoint: ClassName, directory: Path, answer: int) -> None:
    """In the child: import, answer, and end."""
    me = os.getpid()
    with contextlib.suppress(OSError):  # if memory is short, this process is the first to be killed
        Path("/proc/self/oom_score_adj").write_text("1000")
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))  # the reader's limit of memory is not the code's
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(nowhere, stream)
    sys.dont_write_bytecode = True
    fault = ""
    try:
        from dray.code.load import load_entrypoint

        os.chdir(directory)
        load_entrypoint(entrypoint, directory)
    except EntrypointError as error:
        fault = "; ".join(what for _, what in error.faults)
    except BaseException as error:
        fault = f"importing {entrypoint.module} raised {one_line(traceback.format_exception_only(error)[-1])}"
    if os.getpid() == me:  # else it is a process that the import has forked
        with contextlib.suppress(OSError):
            os.write(answer, json.dumps(fault).encode() + b"\n")
    os._exit(0)


def _answer(child: int, pipe: int, entrypoint: ClassName, limit_s: float) -> str:
    until, said = time.monotonic() + limit_s, b""
    ended = os.pidfd_open(child)
    try:
        while not said.endswith(b"\n"):
            ready, _, _ = select.select([pipe, ended], [], [], max(until - time.monotonic(), 0))
            if not ready:
                return f"importing {entrypoint.module} takes longer than {limit_s:g} s"
            more = os.read(pipe, 1 << 16) if pipe in ready else b""
            if not more:
                _, status = os.waitpid(child, 0)
                code = os.waitstatus_to_exitcode(status)
                how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
                return f"importing {entrypoint.module} ended its process ({how})"
            said += more
            if len(said) > MAX_ANSWER_BYTES:
                return f"importing {entrypoint.module} writes to files that it has not opened"
    finally:
        os.close(ended)
    return str(json.loads(said))


def _kill_children() -> None:
    """Kill all children, and theirs, which become this process's when their parents die."""
    until = time.monotonic() + KILL_S
    while time.monotonic() < until:
        for task in Path("/proc/self/task").glob("*/children"):
            for each in task.read_text().split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(each), signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.005)
