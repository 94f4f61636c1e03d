"""The sharded tensors (DTensors) in a checkpoint: each rank writes its own shards, and reads those that it needs.

In `state-dict.pth` such a tensor has no data (device meta). Its pieces are in `sharded/rank_<n>.safetensors`, named by
its path in the state, with dots: `models_state_dict.0.weight`. So the state has the same layout whether it is sharded
or not, and does not depend on the number of ranks: an optimizer's state refers to parameters by number, as always.

The planners of torch.distributed.checkpoint work out the pieces that a rank has or needs. `dcp.save` itself won't do:
every rank would wait for the others three times, in collectives that hang when a rank has failed, and its
`get_optimizer_state_dict` steps an optimizer that has no state yet.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from dray.storage.errors import CheckpointError
from dray.training.checkpoint import shard_file
from dray.training.checkpoint.plain_state import UnsavableState
from dray.training.checkpoint.shard_file import StoredPiece, TensorPiece
from dray.training.parallel.sharding import is_dtensor

T = TypeVar("T")
Keys = tuple[Any, ...]

DIRECTORY = "sharded"


def file_of(rank: int) -> str:
    return f"{DIRECTORY}/rank_{rank}.safetensors"


def split(state: T, *keys: Any) -> tuple[T, dict[str, torch.Tensor]]:
    """A state with meta tensors in place of its DTensors, and the DTensors by name. `keys`: the path to the state."""
    dtensors: dict[str, torch.Tensor] = {}

    def take(at: Keys, value: Any) -> Any:
        if not is_dtensor(value):
            return value
        dtensors[name_of(at)] = value.detach()
        return torch.empty(value.shape, dtype=value.dtype, device="meta")

    return mapped(state, take, keys), dtensors


def gathered(state: T, keep: bool) -> T:
    """A state with whole CPU tensors in place of its DTensors, or meta tensors unless `keep`. All ranks call this
    together."""

    def whole(_: Keys, value: Any) -> Any:
        if not is_dtensor(value):
            return value
        full = value.full_tensor().detach()
        return full.cpu() if keep else torch.empty_like(full, device="meta")

    result: T = mapped(state, whole)
    return result


def shards_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, TensorPiece]:
    """This rank's shards of DTensors. If several ranks hold the same shard, only the first returns it."""
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

    saved: dict[str, Any] = {}
    for name, tensor in tensors.items():
        assert is_dtensor(tensor)
        if any(placement.is_partial() for placement in tensor.placements):
            raise UnsavableState(
                f"{name} is a DTensor with placements {tensor.placements}, whose ranks hold parts of a sum; a "
                "checkpoint needs the sum: call redistribute() on it"
            )
        coordinate: Sequence[int] = tensor.device_mesh.get_coordinate() or ()
        # A tensor that is only on `dp_shard` exists once on each of the `tp` ranks' meshes.
        if 0 in tensor.device_mesh.mesh and all(
            at == 0 for at, each in zip(coordinate, tensor.placements, strict=False) if each.is_replicate()
        ):
            saved[name] = tensor
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(saved, is_coordinator=False)
    shards = {}
    for item in planner.create_local_plan().items:
        assert item.tensor_data is not None
        local = planner.resolve_data(item)
        assert isinstance(local, torch.Tensor)
        if local.numel() > 0:
            shards[item.index.fqn] = TensorPiece(local, tuple(item.tensor_data.chunk.offsets))
    return shards


class StoredTensors:
    """The sharded tensors in a checkpoint's directory.

    Raises:
        ValueError: a file is damaged.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._pieces: dict[str, list[StoredPiece]] = {}
        for file in sorted((directory / DIRECTORY).glob("*.safetensors")):
            for name, piece in shard_file.read(file).items():
                self._pieces.setdefault(name, []).append(piece)

    def pieces(self, name: str, like: torch.Tensor) -> list[StoredPiece]:
        """The pieces of a tensor with the type and shape of `like`.

        Raises:
            CheckpointError: they do not make up exactly such a tensor.
        """
        pieces = self._pieces.get(name, [])
        fit = all(piece.dtype == like.dtype and len(piece.shape) == like.ndim for piece in pieces)
        inside = all(
            at + length <= size
            for piece in pieces
            for at, length, size in zip(piece.offsets, piece.shape, like.shape, strict=False)
        )
        known = sum(math.prod(piece.shape) for piece in pieces)
        if not fit or not inside or known != like.numel():
            raise CheckpointError(
                f"{self._directory} is damaged: of the {like.numel()} elements of {name}, {DIRECTORY}/ has {known}"
                f"{'' if fit else ' of another type or shape'}; a rank's file is missing or another checkpoint's: copy "
                "the checkpoint again, or use an earlier one"
            )
        return pieces

    def load(self, name: str, like: torch.Tensor, target: torch.Tensor) -> None:
        """Load a tensor into `target`; if that is a DTensor, only this rank's part of it. Raises as `pieces` does."""
        pieces = self.pieces(name, like)
        copy_pieces([(piece.offsets, piece.shape, piece.load) for piece in pieces], target)


def copy_pieces(
    pieces: Sequence[tuple[Sequence[int], Sequence[int], Callable[[], torch.Tensor]]], target: torch.Tensor
) -> None:
    """Copy a tensor, given as pieces (offsets, shape, a function that loads it), into another of the same shape."""
    if not is_dtensor(target):
        for offsets, shape, load in pieces:
            target[tuple(slice(at, at + size) for at, size in zip(offsets, shape, strict=True))].copy_(load())
        return
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        Metadata,
        TensorProperties,
        TensorStorageMetadata,
    )

    chunks = [ChunkStorageMetadata(torch.Size(offsets), torch.Size(shape)) for offsets, shape, _ in pieces]
    about = TensorStorageMetadata(TensorProperties(dtype=target.dtype), target.shape, chunks)
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner({"": target}, Metadata({"": about}), is_coordinator=True)
    for item in planner.create_local_plan().items:
        assert item.storage_index.index is not None
        *_, load = pieces[item.storage_index.index]
        source = load()
        for dim, (begin, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
            source = source.narrow(dim, begin, length)
        planner.resolve_tensor(item).detach().copy_(source)


def fill(state: T, directory: Path, target_of: Callable[[Keys], torch.Tensor | None], *keys: Any) -> T:
    """Add the data to a loaded state. Each tensor is sharded like the one into which it will be loaded, which
    `target_of` returns for the tensor's path."""
    stored: StoredTensors | None = None

    def filled(at: Keys, value: Any) -> Any:
        nonlocal stored
        if not isinstance(value, torch.Tensor):
            return value
        own = target_of(at)
        if value.device.type == "meta":
            stored = stored or StoredTensors(directory)
            if own is None:  # the trial has no such tensor: load_state_dict() says so, and needs no data for that
                stored.pieces(name_of(at), value)
                return value
            target = _like(own, value)
            stored.load(name_of(at), value, target)
            return target
        if own is None or not is_dtensor(own) or own.shape != value.shape:
            return value
        target = _like(own, value)
        copy_pieces([([0] * value.ndim, value.shape, lambda: value)], target)
        return target

    result: T = mapped(state, filled, keys)
    return result


def load(
    state: dict[str, Any],
    directory: Path,
    models: Sequence[nn.Module],
    optimizers: Sequence[torch.optim.Optimizer] = (),
) -> None:
    """Fill the parts of a trial's state dict for these models (without wrappers) and optimizers; see `fill`."""
    states = [model.state_dict() for model in models]
    parameters = [[each for group in optimizer.param_groups for each in group["params"]] for optimizer in optimizers]

    def target_of(keys: Keys) -> torch.Tensor | None:
        target: Any = None
        match keys:
            case ("models_state_dict", int(index), str(name)) if index < len(states):
                target = states[index].get(name)
            case ("optimizers_state_dict", int(index), "state", int(number), _) if index < len(parameters):
                target = parameters[index][number] if number < len(parameters[index]) else None
        return target if isinstance(target, torch.Tensor) else None

    for part in ("models_state_dict", "optimizers_state_dict")[: 2 if optimizers else 1]:
        if part in state:
            state[part] = fill(state[part], directory, target_of, part)


def _like(own: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """A new tensor with the type and shape of `value`, sharded like `own`."""
    if not is_dtensor(own):
        return torch.empty(value.shape, dtype=value.dtype)
    if own.shape == value.shape:
        return torch.empty_like(own, dtype=value.dtype, requires_grad=False)
    from torch.distributed.tensor import Replicate, empty

    everywhere = [Replicate()] * own.device_mesh.ndim
    return empty(*value.shape, dtype=value.dtype, device_mesh=own.device_mesh, placements=everywhere)


def name_of(keys: Keys) -> str:
    return ".".join(map(str, keys))


def leaves(value: Any, keys: Keys = ()) -> Iterator[tuple[Keys, Any]]:
    """The values in dicts, lists and tuples, each with the path of keys to it."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from leaves(item, (*keys, key))
    elif type(value) in (list, tuple):
        for index, item in enumerate(value):
            yield from leaves(item, (*keys, index))
    else:
        yield keys, value


def mapped(value: Any, leaf: Callable[[Keys, Any], Any], keys: Keys = ()) -> Any:
    """Copy dicts, lists and tuples, replacing each value by `leaf(path, value)`."""
    if isinstance(value, dict):
        # Copied, because a model's state dict has attributes.
        other = copy.copy(value)
        for key, item in value.items():
            other[key] = mapped(item, leaf, (*keys, key))
        return other
    if type(value) in (list, tuple):
        return type(value)(mapped(item, leaf, (*keys, index)) for index, item in enumerate(value))
    return leaf(keys, value)
