"""What a program that runs as a trial of an experiment can ask about itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dray.compat import lacks


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialInfo:
    """One trial of an experiment.

    Args:
        trial_id, experiment_id: their numbers.
        trial_seed: what `pytorch.init()` seeds with.
        hparams: the hyperparameters that the search chose.
        config: the experiment's config, with its secrets; not shown with the rest.
        steps_completed: batches that the latest checkpoint was saved after; 0 for a fresh trial.
    """

    trial_id: int
    experiment_id: int
    trial_seed: int
    hparams: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict, repr=False)
    steps_completed: int = 0

    # Programs that were written for Determined read these two by its own names.
    @property
    def _config(self) -> Mapping[str, Any]:
        return self.config

    @property
    def _steps_completed(self) -> int:
        return self.steps_completed


@lacks("determined.ClusterInfo")
@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterInfo:
    """Where this process runs.

    Args:
        task_type: "TRIAL".
        trial: which trial this is.
        latest_checkpoint: pass it to `Trainer.fit(latest_checkpoint=...)`; None for a fresh trial.
        slot_ids: this node's slots, one a worker.
        container_addrs: one address a node.
        container_rank: this node's place among them.
        user_data: the experiment's `data` section, with its secrets; not shown with the rest.
    """

    task_type: str = "TRIAL"
    trial: TrialInfo
    latest_checkpoint: str | None = None
    slot_ids: tuple[int, ...] = (0,)
    container_addrs: tuple[str, ...] = ("127.0.0.1",)
    container_rank: int = 0
    user_data: Mapping[str, Any] = field(default_factory=dict, repr=False)


_current: ClusterInfo | None = None


def get_cluster_info() -> ClusterInfo | None:
    """The cluster and the trial that this process belongs to, or None in a local run.

    >>> get_cluster_info() is None
    True
    """
    return _current


def set_cluster_info(info: ClusterInfo | None) -> ClusterInfo | None:
    """Say where this process runs; return what was said before, to be put back. For hosts, not for trials."""
    global _current
    previous, _current = _current, info
    return previous
