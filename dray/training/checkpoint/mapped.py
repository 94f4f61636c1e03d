"""State that is mapped into memory from a checkpoint's file, and what of it a trial must copy.

Loading copies most tensors into those of the models and optimizers. Some are kept as they are: an optimizer's on the
CPU, a model's that loads with `assign=True`, a callback's. Those would keep the file open for the whole training, and
on a network file system be lost with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dray.training.checkpoint import sharded
from dray.training.checkpoint.sharded import Keys
from dray.training.parallel.sharding import is_dtensor

_LARGE = ("models_state_dict", "optimizers_state_dict")


class MappedTensors:
    """The tensors of a state, loaded by `torch.load(mmap=True)`."""

    def __init__(self, state: Any) -> None:
        self._storages = {_storage_of(value) for _, value in sharded.leaves(state)} - {0}

    def copied(self, state: dict[str, Any]) -> dict[str, Any]:
        """The state with copies of its tensors, except those of optimizers, and of models outside their extra state:
        see `release`."""

        def leaf(keys: Keys, value: Any) -> Any:
            is_extra = any(str(key).endswith("_extra_state") for key in keys)
            return self._own(value) if is_extra or keys[0] not in _LARGE else value

        return {part: sharded.mapped(value, leaf, (part,)) for part, value in state.items()}

    def release(self, models: Sequence[torch.nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Copy the tensors that models and optimizers have kept."""
        for model in models:
            for tensor in (*model.parameters(), *model.buffers()):
                if _storage_of(tensor) in self._storages:
                    tensor.data = tensor.data.clone()
        for optimizer in optimizers:
            for parameter, kept in list(optimizer.state.items()):
                optimizer.state[parameter] = sharded.mapped(kept, lambda _, value: self._own(value))

    def _own(self, value: Any) -> Any:
        return value.clone() if _storage_of(value) in self._storages else value


def _storage_of(value: Any) -> int:
    """The address of a tensor's memory on the CPU; 0 if it has none."""
    if not isinstance(value, torch.Tensor) or is_dtensor(value) or value.device.type != "cpu":
        return 0
    return value.untyped_storage().data_ptr() if value.layout is torch.strided else 0
