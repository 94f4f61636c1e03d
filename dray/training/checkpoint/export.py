"""Writes a model of a checkpoint to one file. One of its tensors is in memory at a time: a model may not fit there."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from dray.training.checkpoint import files, shard_file, sharded
from dray.training.checkpoint.plain_state import is_plain

MAPPED_BYTES = 64 << 20
"""How much is read of `state-dict.pth` before it is mapped anew: what was read of a mapped file counts as memory in
use until then."""


class SavedModels:
    """The models of a checkpoint, whose tensors are read from its files as they are used."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._stored = sharded.StoredTensors(directory)
        self._map()

    def _map(self) -> None:
        self.states: list[Mapping[str, Any]] = []  # the last tensor of a mapped file unmaps it
        self.states = files.read_state(self._directory, [], mmap=True)["models_state_dict"]
        self._read = 0

    def tensor(self, index: int, keys: sharded.Keys) -> torch.Tensor:
        """A tensor with its data, by the number of its model and the keys in its state."""
        tensor: Any = self.states[index]
        for key in keys:
            tensor = tensor[key]
        if tensor.device.type == "meta":
            whole = torch.empty(tensor.shape, dtype=tensor.dtype)
            self._stored.load(sharded.name_of(("models_state_dict", index, *keys)), tensor, whole)
            return whole
        self._read += tensor.nbytes
        if self._read > MAPPED_BYTES:
            tensor = tensor.clone()
            self._map()
        return tensor  # type: ignore[no-any-return]


def write_state_dict(saved: SavedModels, index: int, target: Path) -> None:
    """Write the state of a model, by its number, to a file for `torch.load`."""
    model = saved.states[index]
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
    del model
    with zipfile.ZipFile(target) as archive:
        records, directory = archive.infolist(), archive.start_dir
    tensors = [keys for keys, _ in made.values()]  # torch numbers storages as it meets them: these share none
    with target.open("r+b") as file:
        for record in records:  # in the order of the archive's directory
            path = Path(record.filename)
            if path.parent.name == "data":
                data = shard_file.bytes_of(saved.tensor(index, tensors[int(path.name)]))
                file.seek(_data_of(file, record))
                file.write(data)
                # The CRC-32, where `skip_data` left 0: behind each tensor, and in the directory. (Zip's specification,
                # APPNOTE 4.3.9 and 4.3.12; torch writes both for each file.)
                for place in (file.tell() + 4, directory + 16):
                    file.seek(place)
                    file.write(zlib.crc32(data).to_bytes(4, "little"))
            file.seek(directory + 28)
            directory += 46 + sum(int.from_bytes(file.read(2), "little") for _ in range(3))


def write_safetensors(saved: SavedModels, index: int, target: Path) -> None:
    """Write the state of a model to a file for `safetensors`."""
    model = saved.states[index]
    for name, value in model.items():
        if not isinstance(value, torch.Tensor):
            raise ValueError(
                f"{name} of the model's state is no tensor but a {type(value).__name__}, and safetensors holds only "
                "tensors; export it with --format state-dict"
            )
    beginning, places = shard_file.header(model, {})
    del model, value
    with target.open("wb") as file:
        file.write(beginning)
        for name in places:
            file.write(shard_file.bytes_of(saved.tensor(index, (name,))))


def _data_of(file: Any, record: zipfile.ZipInfo) -> int:
    """Where a file in an archive begins: after its header, its name and what torch puts there to align it."""
    file.seek(record.header_offset + 26)
    name, extra = (int.from_bytes(file.read(2), "little") for _ in range(2))
    return record.header_offset + 30 + int(name) + int(extra)
