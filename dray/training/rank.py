"""One rank's part of a trial."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from dray.training.metrics.reducers import ReducerRegistry
from dray.training.optimisation import Optimisation
from dray.training.parallel.distributed import DistributedContext
from dray.training.position import Position
from dray.training.trial import Callback, Trial


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rank:
    """The user's code on one rank, what it trains, and the other ranks.

    Args:
        trial, callbacks: the user's.
        optimisation: the models, optimizers and LR schedulers.
        reducers: the user's metric reducers.
        device: the device of the batches.
        to_device: moves a batch to the device; None leaves batches where they are.
        peers: the ranks of the trial.
    """

    trial: Trial
    callbacks: Mapping[str, Callback]
    optimisation: Optimisation
    reducers: ReducerRegistry
    device: torch.device
    to_device: Callable[[Any], Any] | None
    peers: DistributedContext

    @property
    def is_chief(self) -> bool:
        return self.peers.rank == 0

    @property
    def position(self) -> Position:
        return self.optimisation.position
