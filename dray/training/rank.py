"""One rank's part of a trial."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from dray.training.metrics.reducers import ReducerRegistry
from dray.training.optimisation import Optimisation
from dray.training.parallel.distributed import DistributedContext
from dray.training.progress import Position
from dray.training.trial import Callback, Trial

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rank:
    """The user's code on one rank, what it trains, and the other ranks.

    Args:
        to_device: moves a batch to the device; None leaves batches where they are.
        peers: the ranks of the trial.
        sharing: how many neighbouring ranks get the same data, by tensor parallelism.
    """

    trial: Trial
    callbacks: Mapping[str, Callback]
    optimisation: Optimisation
    reducers: ReducerRegistry
    device: torch.device
    to_device: Callable[[Any], Any] | None
    peers: DistributedContext
    sharing: int = 1

    def distinct(self, ranks: Sequence[T]) -> Sequence[T]:
        """What all ranks have, without that of ranks that had the same data as another."""
        return ranks[:: self.sharing]

    @property
    def is_chief(self) -> bool:
        return self.peers.rank == 0

    @property
    def position(self) -> Position:
        return self.optimisation.position


#: Called with the trial's models, in its thread.
before_training: list[Callable[[Sequence[torch.nn.Module]], None]] = []
