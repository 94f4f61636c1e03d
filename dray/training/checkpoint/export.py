"""Writes a checkpoint's model to one file. Tensors are mapped from files, since a model may not fit in memory."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from dray.training.checkpoint import files, shard_file, sharded


def whole_models(directory: Path, scratch: Path) -> list[Mapping[str, Any]]:
    """The state of each model in a checkpoint; sharded tensors are assembled in files in the directory `scratch`."""
    stored, numbers = sharded.StoredTensors(directory), itertools.count()

    def whole(keys: sharded.Keys, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.device.type != "meta":
            return value
        if value.numel() == 0:  # an empty file can't be mapped
            return torch.empty(value.shape, dtype=value.dtype)
        file = str(scratch / str(next(numbers)))
        tensor = torch.from_file(file, shared=True, size=value.numel(), dtype=value.dtype).view(value.shape)
        stored.load(sharded.name_of(("models_state_dict", *keys)), value, tensor)
        return tensor

    models = files.read_state(directory, [])["models_state_dict"]
    return sharded.mapped(models, whole)  # type: ignore[no-any-return]


def write_safetensors(model: Mapping[str, Any], target: Path) -> None:
    for name, value in model.items():
        if not isinstance(value, torch.Tensor):
            raise ValueError(
                f"{name} in the model's state is a {type(value).__name__}, and safetensors holds only tensors; export "
                "the model with --format state-dict"
            )
    beginning, names = shard_file.header(model, {})
    with target.open("wb") as file:
        file.write(beginning)
        for name in names:
            file.write(shard_file.bytes_of(model[name]))
