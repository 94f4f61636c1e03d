"""Why processes of worker groups died, as far as Ray and the kernel of their node know."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray

from dray.cluster.nodes import on_node
from dray.desk.failure import LOST_NODE, LOW_MEMORY

NODE_DIED = "node has died"
"""What Ray says about a process whose node it has lost."""
ANSWER_TIMEOUT_S = 5.0
"""How long a node may take to report what its kernel has killed."""


def why_it_died(error: Exception) -> str:
    """Why a worker's process died, as far as Ray knows, or "".

    Ray's own message is not used: it is long, and names neither the exit code nor the signal.

    Args:
        error: raised by a call to the worker.
    """
    if LOW_MEMORY in str(error):
        return f"Ray killed it, because its node was {LOW_MEMORY}"
    return LOST_NODE if NODE_DIED in str(error) else ""


def oom_kills() -> tuple[str, int]:
    """The name of this node, and how many processes its kernel has killed for lack of memory, in this container or on
    the machine."""
    return os.uname().nodename, _kills()


def oom_kills_of(node: str, runtime_env: Mapping[str, Any]) -> int | None:
    """The same count for a node by Ray's id; None if it does not answer."""
    if node == ray.get_runtime_context().get_node_id():
        return _kills()  # without a process for it
    task = on_node(oom_kills, node, runtime_env=dict(runtime_env) or None)
    try:
        _, kills = ray.get(task.remote(), timeout=ANSWER_TIMEOUT_S)
        return int(kills)
    except ray.exceptions.RayError:
        return None


def _kills() -> int:
    for place in ("/sys/fs/cgroup/memory.events", "/proc/vmstat"):
        with contextlib.suppress(OSError, StopIteration, ValueError):
            lines = (line.split() for line in Path(place).read_text().splitlines())
            return next(int(value) for name, value in lines if name == "oom_kill")
    return 0
