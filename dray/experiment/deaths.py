"""The deaths of a trial's processes, explained by what these printed last."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from dray.desk.failure import Failure, failure_printed
from dray.desk.messages import TrialLeft
from dray.worker.log.tail import last_output, with_log_tail


def with_last_lines(left: TrialLeft, logs: Path, *, can_read: bool = True) -> TrialLeft:
    """A death with the last lines of the log of a dead process: of several, the one that a GPU's error has ended, which
    becomes the failure, with its node if the GPU may be broken."""
    found = {rank: log for rank in left.dead if can_read and (log := logs / f"rank_{rank}.log").exists()}
    if not found:
        return replace(left, error=f"{left.error}; what it printed is in {logs}")
    was = left.failure or Failure(kind="died")
    nodes = dict(zip(left.dead, left.nodes, strict=False))
    for rank, log in found.items() if was.kind == "died" else ():
        if (failure := failure_printed(last_output(log), nodes.get(rank, ""), was.batches)) is not None:
            who = f"rank {rank}: " if len(left.dead) > 1 else ""
            error = f"{left.error}: {who}{failure.where}"
            return replace(left, error=with_log_tail(error, log), failure=failure)
    return replace(left, error=with_log_tail(left.error, next(iter(found.values()))))
