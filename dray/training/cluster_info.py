"""`get_cluster_info()`: the trial that this process runs, and its place in the cluster."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from dray.compat import lacks
from dray.imports import note_cluster_info_read


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialInfo:
    """One trial of an experiment.

    Args:
        trial_seed: the seed that `pytorch.init()` uses.
        hparams: the hyperparameters that the search chose.
        config: the experiment's config, with its secrets; left out of the repr.
        steps_completed: batches trained at the latest checkpoint; 0 for a fresh trial.
    """

    trial_id: int
    experiment_id: int
    trial_seed: int
    hparams: dict[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict, repr=False)
    steps_completed: int = 0

    # Programs written for Determined read these two private attributes.
    @property
    def _config(self) -> Mapping[str, Any]:
        return self.config

    @property
    def _steps_completed(self) -> int:
        return self.steps_completed


@lacks("determined.ClusterInfo")
@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterInfo:
    """The trial that this process runs, and its place in the cluster.

    Args:
        trial: the trial.
        latest_checkpoint: the checkpoint to pass to `Trainer.fit(latest_checkpoint=...)`; None for a fresh trial.
        slot_ids: the trial's slots on this node, one per worker.
        container_addrs: the address of each of the trial's nodes.
        container_slot_counts: the number of the trial's slots on each node.
        container_rank: the index of this node among them.
        user_data: the config's `data` section, with its secrets; left out of the repr.
    """

    task_type: str = "TRIAL"
    trial: TrialInfo
    latest_checkpoint: str | None = None
    slot_ids: list[int] = field(default_factory=lambda: [0])
    container_addrs: list[str] = field(default_factory=lambda: ["127.0.0.1"])
    container_slot_counts: list[int] = field(default_factory=lambda: [1])
    container_rank: int = 0
    user_data: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @property
    def gpu_uuids(self) -> list[str]:
        """UUIDs of the GPUs that are visible to this process (the trial's on this node), as in `nvidia-smi -L`."""
        import torch

        return [f"GPU-{torch.cuda.get_device_properties(n).uuid}" for n in range(torch.cuda.device_count())]


_current: ClusterInfo | None = None

#: The hyperparameters that the trial has read, in their order; None: unknown, because its code may have read any.
hparams_read: dict[str, None] | None = None


def note_hparams_read(name: str | None = None) -> None:
    """Note that the trial has read a hyperparameter; without a name, that it may have read all."""
    global hparams_read
    if name is None:
        hparams_read = None
    elif hparams_read is not None:
        hparams_read[name] = None


def get_cluster_info() -> ClusterInfo | None:
    """Return the trial that this process runs and its place in the cluster; None in a local run.

    >>> get_cluster_info() is None
    True
    """
    if _current is not None:
        note_cluster_info_read()
        note_hparams_read()
    return _current


def current_cluster_info() -> ClusterInfo | None:
    """`get_cluster_info()` for dray itself, whose reading says nothing about the trial's code."""
    return _current


@contextlib.contextmanager
def use_cluster_info(info: ClusterInfo | None) -> Iterator[None]:
    """Within the block, `get_cluster_info()` returns `info`."""
    global _current, hparams_read
    previous, _current, hparams_read = _current, info, {}
    try:
        yield
    finally:
        _current, hparams_read = previous, None
