"""The child processes of this process."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
from collections.abc import Container
from pathlib import Path

END_S = 2.0
"""How long a child may take to end after each signal, and a trial's threads to end on their own."""

# Helpers of Python and torch, which serve the whole process and end with it.
_HELPERS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver", "compile_worker", "torch_shm_manager")


def children(spare: Container[int] = ()) -> dict[int, str]:
    """The living children and their command lines, without `spare` and the helpers of Python and torch."""
    try:
        # A single system call if there are none. Zombies are left for their waiters.
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return {}
    found: dict[int, None] = {}  # in order
    for _ in range(2):  # an ending thread passes its children to another one, which may have been read already
        for task in Path("/proc/self/task").glob("*/children"):
            with contextlib.suppress(OSError):  # the thread has ended
                found |= dict.fromkeys(int(child) for child in task.read_text().split())
    commands = {child: _command(child) for child in found if child not in spare and is_alive(child)}
    return {child: command for child, command in commands.items() if not any(one in command for one in _HELPERS)}


def is_alive(process: int) -> bool:
    """Whether the process exists and is not a zombie."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def _command(process: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    return ""


def end_children(spare: Container[int] = ()) -> dict[int, str]:
    """End the children that `children` returns, and return them."""
    found = children(spare)
    left = set(found)
    for number in (signal.SIGTERM, signal.SIGKILL):
        for child in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, number)
        deadline = time.monotonic() + END_S
        while left and time.monotonic() < deadline:
            multiprocessing.active_children()  # reaps the children that it knows
            left = {child for child in left if is_alive(child)}
            time.sleep(0.01 if left else 0)
    return found
