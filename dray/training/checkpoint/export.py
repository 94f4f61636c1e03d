"""Writes a model of a checkpoint to one file, without ever having it in memory: it may be larger than that.

First comes a file of the right size without the tensors' data, then each piece of each tensor is copied to its place,
some megabytes at a time, from `state-dict.pth` and the ranks' files, which are mapped into memory.
"""

from __future__ import annotations

import math
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dray.training.checkpoint import files, shard_file, sharded
from dray.training.checkpoint.plain_state import is_plain
from dray.training.checkpoint.shard_file import StoredShard

BLOCK_BYTES = 16 << 20
"""How much of a tensor is copied at once; a row of its first dimension, if that is more."""
MAPPED_BYTES = 64 << 20
"""How much is read of `state-dict.pth` before it is mapped anew: what was read of a mapped file counts as memory in
use until then."""

Array = np.ndarray[Any, Any]


class Source:
    """The models of a checkpoint, whose tensors are read from its files as they are used.

    Attributes:
        models: their states; sharded tensors have no data there.

    Args:
        directory: of the checkpoint.

    Raises:
        ValueError: it can't be loaded as data, or a rank's file is damaged.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._stored = sharded.Stored(directory)
        self._map()

    def _map(self) -> None:
        self.models: list[Mapping[str, Any]] = []  # the last tensor of a mapped file unmaps it
        self.models = files.read_state(self._directory, [], mmap=True)["models_state_dict"]
        self._read = 0

    def copy(self, index: int, keys: sharded.Keys, target: Path, begin: int) -> None:
        """Copy a tensor's data into a file, to where it begins there.

        Args:
            index: the number of its model; `keys`: where it is in the model's state.

        Raises:
            CheckpointError: its shards are damaged, or some are missing.
        """
        tensor: Any = self.models[index]
        for key in keys:
            tensor = tensor[key]
        if tensor.numel() == 0:
            return
        shape = (*tensor.shape, tensor.itemsize)  # as bytes: NumPy does not know all types
        if tensor.device.type == "meta":
            for piece in self._stored.pieces(sharded.name_of(("models_state_dict", index, *keys)), tensor):
                _copy(_blocks_of_piece(piece, shape), piece.offsets, target, begin, shape)
            return
        _copy(_blocks_of_tensor(tensor, shape), (0,) * tensor.ndim, target, begin, shape)
        self._read += tensor.nbytes
        if self._read > MAPPED_BYTES:
            del tensor
            self._map()


def write_state_dict(source: Source, index: int, target: Path) -> None:
    """Write the state of a model, by its number, to a file for `torch.load`.

    Raises:
        CheckpointError: shards are damaged or missing.
    """
    model = source.models[index]
    if not all(is_plain(value) for _, value in sharded.leaves(model)) and not sharded.lacks_data(model):
        torch.save(model, target)
        return
    made: dict[Any, tuple[sharded.Keys, torch.Tensor]] = {}

    def without_data(keys: sharded.Keys, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        # Tied weights are one tensor there too.
        key = keys if value.device.type == "meta" else (value.data_ptr(), value.shape, value.stride(), value.dtype)
        return made.setdefault(key, (keys, torch.empty(value.shape, dtype=value.dtype)))[1]

    with torch.serialization.skip_data():
        # Memory that is never written to is none.
        torch.save(sharded.mapped(model, without_data), target)
    with zipfile.ZipFile(target) as archive:
        records = archive.infolist()
        directory = archive.start_dir
    with target.open("rb") as file:
        # torch numbers storages as it meets them: these tensors share none.
        places = {int(Path(each.filename).name): _data_of(file, each) for each in records if _is_tensor(each)}
    del model
    for number, (keys, _) in enumerate(made.values()):
        source.copy(index, keys, target, places[number])
    _write_checksums(target, records, directory)


def write_safetensors(source: Source, index: int, target: Path) -> None:
    """Write the state of a model to a file for `safetensors`. Arguments and errors as `write_state_dict`.

    Raises:
        ValueError: the state has more than tensors.
    """
    model = source.models[index]
    for name, value in model.items():
        if not isinstance(value, torch.Tensor):
            raise ValueError(
                f"{name} of the model's state is no tensor but a {type(value).__name__}, and safetensors holds only "
                "tensors; export it with --format state-dict"
            )
    beginning, places = shard_file.header(model, {})
    size = len(beginning) + sum(tensor.nbytes for tensor in model.values())
    with target.open("wb") as file:
        file.write(beginning)
        file.truncate(size)
    del model, value
    for name, begin in places.items():
        source.copy(index, (name,), target, begin)


def _is_tensor(record: zipfile.ZipInfo) -> bool:
    return Path(record.filename).parent.name == "data"


def _write_checksums(target: Path, records: Sequence[zipfile.ZipInfo], directory: int) -> None:
    """Put the CRC-32 of tensors where `skip_data` left 0: behind each tensor, and into the archive's directory, which
    begins there. (Zip's own specification, APPNOTE 4.3.9 and 4.3.12; torch writes both for each file.)"""
    with target.open("r+b") as file:
        for record in records:  # in the order of the directory
            if _is_tensor(record):
                file.seek(_data_of(file, record))
                checksum, left = 0, record.file_size
                while left:
                    block = file.read(min(left, BLOCK_BYTES))
                    checksum, left = zlib.crc32(block, checksum), left - len(block)
                for place in (file.tell() + 4, directory + 16):
                    file.seek(place)
                    file.write(checksum.to_bytes(4, "little"))
            file.seek(directory + 28)
            directory += 46 + sum(int.from_bytes(file.read(2), "little") for _ in range(3))


def _data_of(file: Any, record: zipfile.ZipInfo) -> int:
    """Where a file in an archive begins: after its header, its name and what torch puts there to align it."""
    file.seek(record.header_offset + 26)
    name, extra = (int.from_bytes(file.read(2), "little") for _ in range(2))
    return record.header_offset + 30 + int(name) + int(extra)


def _rows_of_block(shape: Sequence[int]) -> int:
    return max(1, BLOCK_BYTES // math.prod(shape[1:]))


def _blocks_of_tensor(tensor: torch.Tensor, shape: Sequence[int]) -> Iterator[tuple[int, Array]]:
    """The rows of a tensor of this shape in bytes, some at a time, each with the number of its first one."""
    if tensor.ndim == 0:
        yield 0, np.frombuffer(shard_file.bytes_of(tensor), np.uint8)
        return
    count = _rows_of_block(shape)
    for first in range(0, shape[0], count):
        rows = tensor[first : first + count]
        yield first, np.frombuffer(shard_file.bytes_of(rows), np.uint8).reshape(*rows.shape, rows.itemsize)


def _blocks_of_piece(piece: StoredShard, whole: Sequence[int]) -> Iterator[tuple[int, Array]]:
    """The same of a piece of a tensor."""
    shape = (*piece.shape, piece.dtype.itemsize)
    row, count = math.prod(shape[1:]), _rows_of_block(whole)
    for first in range(0, shape[0], count):
        rows = min(count, shape[0] - first)
        yield first, np.memmap(piece.file, np.uint8, "r", piece.begin + first * row, (rows, *shape[1:]))


def _copy(
    blocks: Iterable[tuple[int, Array]], offsets: Sequence[int], target: Path, begin: int, shape: Sequence[int]
) -> None:
    """Copy blocks of rows of a piece to their place in a tensor of this shape in bytes."""
    row = math.prod(shape[1:])
    first_row, *columns = (*offsets, 0)
    for first, block in blocks:
        # Mapped for each block, and so unmapped after it: what is mapped counts as memory in use.
        place = np.memmap(target, np.uint8, "r+", begin + (first_row + first) * row, (len(block), *shape[1:]))
        within = [slice(at, at + size) for at, size in zip(columns, block.shape[1:], strict=True)]
        place[(slice(None), *within)] = block
