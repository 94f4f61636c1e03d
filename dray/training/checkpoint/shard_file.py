"""One rank's file in a sharded checkpoint: pieces of tensors, as safetensors that `HuggingFaceStorageReader` of
torch.distributed.checkpoint (DCP) reads.

The file is a JSON header (name, type, shape and position of each piece) and the pieces' bytes. The header's metadata
has each piece's offsets in its tensor, under torch's key. DCP's default format keeps all that in a pickle, which could
run code when loaded. The safetensors library would serialise the whole file in memory.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch

from dray.training.checkpoint.plain_state import UnsavableState

ALIGNMENT = 64  # the first piece begins at a multiple of this many bytes
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
_WHERE, _OFFSETS = "DCP_SHARDING_INFO", "saved_offsets"


@dataclass(frozen=True, slots=True)
class TensorPiece:
    """A rank's piece of a tensor, and its offset in each dimension of the whole."""

    tensor: torch.Tensor
    offsets: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StoredPiece:
    file: Path
    begin: int
    nbytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    offsets: tuple[int, ...]

    def load(self) -> torch.Tensor:
        """Map the piece from the file, which is read as the piece is used."""
        if self.nbytes == 0:
            return torch.empty(self.shape, dtype=self.dtype)
        # Copy-on-write, because torch warns about read-only memory.
        mapped = np.memmap(self.file, np.uint8, "c", self.begin, (self.nbytes,))
        return torch.from_numpy(mapped).view(self.dtype).reshape(self.shape)


def header(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> tuple[bytes, dict[str, int]]:
    """The header of a file with these tensors, and each tensor's position in the file, in that order."""
    begin = 0
    entries: dict[str, Any] = {"__metadata__": {"format": "pt", **metadata}}
    # The largest elements first, so that each tensor is aligned.
    for name in sorted(tensors, key=lambda name: -tensors[name].itemsize):
        tensor = tensors[name]
        if tensor.dtype not in NAMES:
            raise UnsavableState(
                f"{name} is of {tensor.dtype}, which safetensors can't hold; use one of {', '.join(map(str, NAMES))}"
            )
        end = begin + tensor.nbytes
        entries[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(entries).encode()
    text = text.ljust(-(-(8 + len(text)) // ALIGNMENT) * ALIGNMENT - 8)
    first = 8 + len(text)
    places = {name: first + entry["data_offsets"][0] for name, entry in entries.items() if name != "__metadata__"}
    return len(text).to_bytes(8, "little") + text, places


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """A tensor's bytes, copied if it is on a GPU or not contiguous."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def write(output: IO[bytes], shards: Mapping[str, TensorPiece]) -> None:
    where = json.dumps({name: {_OFFSETS: list(shard.offsets)} for name, shard in shards.items()})
    beginning, places = header({name: shard.tensor for name, shard in shards.items()}, {_WHERE: where})
    output.write(beginning)
    for name in places:
        output.write(bytes_of(shards[name].tensor))


def read(file: Path) -> dict[str, StoredPiece]:
    """Read the positions of the pieces in a file, by name.

    Raises:
        ValueError: the file is damaged.
    """
    size = file.stat().st_size
    try:
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            if length > size - 8:
                raise ValueError(f"its header has {length} bytes, but the file {size}")
            entries = json.loads(opened.read(length))
        where = json.loads(entries.pop("__metadata__")[_WHERE])
        pieces = {}
        for name, entry in entries.items():
            begin, end = entry["data_offsets"]
            dtype, shape, offsets = DTYPES[entry["dtype"]], tuple(entry["shape"]), tuple(where[name][_OFFSETS])
            numbers = (begin, end, *shape, *offsets)
            is_place = all(type(number) is int and number >= 0 for number in numbers) and len(shape) == len(offsets)
            if not is_place or end - begin != math.prod(shape) * dtype.itemsize or 8 + length + end > size:
                raise ValueError(f"{name} is not as large as its shape {shape} says")
            pieces[name] = StoredPiece(file, 8 + length + begin, end - begin, dtype, shape, offsets)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{file} is damaged: {error!r}; use an earlier checkpoint") from error
    return pieces
