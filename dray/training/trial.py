"""One rank's part of a trial, and protocols of what is called; `dray.pytorch` has the classes that users extend."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch

from dray.training.callback import PyTorchCallback
from dray.training.metrics.reducers import ReducerRegistry
from dray.training.optimisation import Optimisation
from dray.training.parallel.distributed import DistributedContext
from dray.training.progress import Position

log = logging.getLogger(__name__)

T = TypeVar("T")


class Trial(Protocol):
    """See `dray.pytorch.PyTorchTrial`."""

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> torch.Tensor | dict[str, Any]: ...
    def evaluate_batch(self, batch: Any, batch_idx: int) -> dict[str, Any]: ...
    def evaluate_full_dataset(self, data_loader: Any) -> dict[str, Any]: ...
    def evaluation_reducer(self) -> Any: ...


def by_name(method: Callable[..., Any], *names: str, required: int | None = None) -> Callable[..., Any]:
    """A trial's method, to be called with these keyword arguments; a method with other names gets them by position. It
    must take the first `required` of them, by default all."""
    try:
        signature = inspect.signature(method)
    except (TypeError, ValueError):
        return method
    own = list(signature.parameters)
    counts = range(len(names), (len(names) if required is None else required) - 1, -1)
    if _binds(signature, **dict.fromkeys(names)):
        return method
    for count in counts[1:]:
        if _binds(signature, **dict.fromkeys(names[:count])):
            return lambda **given: method(**{name: given[name] for name in names[:count]})
    # Not if it has the names in another order.
    if all(own.index(name) == place for place, name in enumerate(names) if name in own):
        for count in counts:
            if _binds(signature, *names[:count]):
                return lambda **given: method(*(given[name] for name in names[:count]))
    name = getattr(method, "__qualname__", repr(method))
    raise TypeError(f"{name}{signature} must take the arguments ({', '.join(names)}), in this order")


def _binds(signature: inspect.Signature, *args: Any, **kwargs: Any) -> bool:
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        return False
    return True


def epoch_start_of(callback: PyTorchCallback) -> Callable[[int], None]:
    """A callback's `on_training_epoch_start`, which may lack its argument, as in old versions of Determined."""
    hook: Any = callback.on_training_epoch_start
    if inspect.signature(hook).parameters:
        return hook  # type: ignore[no-any-return]
    kind = type(callback).__name__
    log.warning("%s.on_training_epoch_start() without epoch_idx is deprecated; add the parameter", kind)
    return lambda epoch_idx: hook()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rank:
    """The user's code on one rank, what it trains, and the other ranks.

    Args:
        to_device: moves a batch to the device; None leaves batches where they are.
        peers: the ranks of the trial.
        batch_length, batch_tokens: the trial's `get_batch_length`, and its `get_batch_tokens` if it has one.
        sharing: how many neighbouring ranks get the same data, by tensor parallelism.
    """

    trial: Trial
    callbacks: Mapping[str, PyTorchCallback]
    optimisation: Optimisation
    reducers: ReducerRegistry
    device: torch.device
    to_device: Callable[[Any], Any] | None
    peers: DistributedContext
    batch_length: Callable[[Any], int]
    batch_tokens: Callable[[Any], int] | None = None
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
