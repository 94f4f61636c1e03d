"""The demand of an experiment that has no process yet, from its config."""

from __future__ import annotations

from pathlib import Path

from dray.cluster.view import ClusterView
from dray.config.searcher import SingleSearcher
from dray.desk.shares import Demand
from dray.groups.capacity import slot_kind
from dray.records.directory import ExperimentDirectory
from dray.serve.scheduler import MAX_PROCESSES


def guessed(path: Path, view: ClusterView) -> Demand | None:
    """The demand of an experiment without a process, by its config; None if that can't be read."""
    try:
        config = ExperimentDirectory(path).config()
    except (OSError, ValueError):
        return None
    asked, searcher = config.resources, config.searcher
    kind = slot_kind(asked.slot, view) or "gpu"
    unit = 1 if kind == "gpu" else asked.cpus_per_slot
    taken = config.slots_per_trial[0] / asked.trials_per_slot
    limits = (getattr(searcher, name, 0) for name in ("max_trials", "max_concurrent_trials"))
    groups = (
        1 if isinstance(searcher, SingleSearcher) else min((each for each in limits if each), default=MAX_PROCESSES)
    )
    return Demand(name=f"{path.name}-guess", groups=groups, size=taken * unit, kind=kind, unit=unit, shape="guess")
