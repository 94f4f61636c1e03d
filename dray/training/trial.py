"""One rank's part of a trial, and the protocols of the user's code; users extend the classes in `dray.pytorch`."""

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
from dray.training.parallel.mesh_shape import MeshShape
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
    """Adapt a trial's method to calls with these keyword arguments. If its parameters have other names, it gets them by
    position.

    Args:
        required: the number of arguments, from the first, that the method must take. Default: all.

    Raises:
        TypeError: the method takes other arguments.
    """
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
    # Pass by position only if the names that it does have are in this order.
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
    """A callback's `on_training_epoch_start`, which may lack the argument, as in old versions of Determined."""
    hook: Any = callback.on_training_epoch_start
    if inspect.signature(hook).parameters:
        return hook  # type: ignore[no-any-return]
    kind = type(callback).__name__
    log.warning("%s.on_training_epoch_start() without epoch_idx is deprecated; add the parameter", kind)
    return lambda epoch_idx: hook()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rank:
    """One rank's part of a trial: the user's code, the models that it trains, and the other ranks."""

    trial: Trial
    callbacks: Mapping[str, PyTorchCallback]
    optimisation: Optimisation
    reducers: ReducerRegistry
    device: torch.device
    to_device: Callable[[Any], Any] | None  # moves a batch to the device; None leaves batches where they are
    peers: DistributedContext  # the ranks of the trial
    batch_length: Callable[[Any], int]  # the trial's `get_batch_length`
    batch_tokens: Callable[[Any], int] | None = None  # the trial's `get_batch_tokens`, if it has one
    mesh: MeshShape

    def averaged(self, ranks: Sequence[T]) -> Sequence[T]:
        """The values of ranks whose metrics are averaged, as their gradients are, from those of all ranks."""
        return ranks[:: self.mesh.model_parallel]

    @property
    def is_chief(self) -> bool:
        return self.peers.rank == 0

    @property
    def position(self) -> Position:
        return self.optimisation.position


#: Functions to call with the trial's models, in its thread.
before_training: list[Callable[[Sequence[torch.nn.Module]], None]] = []
