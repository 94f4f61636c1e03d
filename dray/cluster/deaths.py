"""Tells the desk what Ray knows about workers that died. Ray Train's controller and its workers import this file before
the first batch, so it imports little."""

from __future__ import annotations

from typing import Any

from ray.exceptions import RayActorError
from ray.train import UserCallback

from dray.cluster.failure import LOW_MEMORY

NODE_DIED = "node has died"
"""What Ray says about a process whose node it has lost."""


class Deaths(UserCallback):  # type: ignore[misc]  # Ray's classes are untyped here
    """Runs in the controller of a worker group.

    Args:
        desk: the desk's actor handle.
        group: the group's name.
    """

    def __init__(self, desk: Any, group: str) -> None:
        self._desk, self._group = desk, group

    def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
        told = {rank: why_it_died(error) for rank, error in worker_exceptions.items()}
        if dead := {rank: why for rank, why in told.items() if why is not None}:
            self._desk.died.remote(self._group, dead)


def why_it_died(error: Exception) -> str | None:
    """Why a worker's process died, as far as Ray knows, or ""; None if it lives.

    Ray's own message is not used: it is long, and names neither the exit code nor the signal.

    Args:
        error: the worker's, as Ray Train's controller has it.
    """
    if LOW_MEMORY in str(error):
        return f"Ray killed it, because its node was {LOW_MEMORY}"
    if not isinstance(getattr(error, "health_check_failure", None), RayActorError):
        return None
    return "Ray has lost the node" if NODE_DIED in str(error) else ""
