"""What Ray knows of workers that die, passed on to the desk. Ray Train's controller and its workers import this file,
in the way of the first batch: so it imports little."""

from __future__ import annotations

from typing import Any

from ray.train import UserCallback

from dray.cluster.failure import LOW_MEMORY


class Deaths(UserCallback):  # type: ignore[misc]  # Ray's classes are untyped here
    """Runs beside the controller of a group.

    Args:
        desk: the desk's actor handle.
        group: its name.
    """

    def __init__(self, desk: Any, group: str) -> None:
        self._desk, self._group = desk, group

    def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
        if any(LOW_MEMORY in str(error) for error in worker_exceptions.values()):
            # Not in Ray's words, which are many.
            self._desk.died.remote(self._group, f"Ray has killed it, as its node was {LOW_MEMORY}")
