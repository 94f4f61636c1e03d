"""Saving and loading state as plain data by `torch.load(weights_only=True)`, which can't run code.

NumPy arrays and scalars are allowed by name. State that would not load this way is rejected when it is saved.
"""

from __future__ import annotations

import io
import json
import pickle
import re
import zipfile
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from dray.text import one_line
from dray.training.parallel.sharding import is_dtensor

T = TypeVar("T")


class UnsavableState(TypeError):
    """A checkpoint can't hold this state, because it could not be loaded as data."""


def check_savable(state: Mapping[str, Any]) -> int:
    """Check that a state could be loaded as data, and return the size of its tensors in bytes.

    Raises:
        UnsavableState: it could be saved, but not loaded.
    """
    nbytes = 0
    for part, value in state.items():
        if part == "callbacks" and isinstance(value, dict):
            nbytes += sum(_check(own, f"the state of callback {name!r}", ()) for name, own in value.items())
        else:
            nbytes += _check(value, f"{part!r}", ())
    return nbytes


_PLAIN = (type(None), bool, int, float, str, bytes, complex, torch.dtype, torch.device, torch.Size)
_TENSORS = (torch.Tensor, torch.nn.Parameter)


def _check(value: Any, label: str, keys: tuple[Any, ...]) -> int:
    kind = type(value)
    if kind in _TENSORS:
        return int(value.nbytes) if value.layout is torch.strided else 0
    if kind in _PLAIN:
        return 0
    if kind is dict or kind is OrderedDict:
        for key in value:
            if type(key) not in _PLAIN:
                _check(key, label, (*keys, key))
        return sum(_check(item, label, (*keys, key)) for key, item in value.items())
    if kind in (list, tuple, set):
        return sum(_check(item, label, (*keys, index)) for index, item in enumerate(value))
    if (kind is np.ndarray or isinstance(value, np.generic)) and value.dtype.kind in "fiubcUSmM":
        return int(value.nbytes)
    _check_by_trying(value, label, keys)
    return 0


def _check_by_trying(value: Any, label: str, keys: tuple[Any, ...]) -> None:
    if keys:
        label += f" at {''.join(f'[{key!r}]' for key in keys)}"
    if is_dtensor(value):
        raise UnsavableState(
            f"{label} is a DTensor, and the chief has only its shard: a checkpoint can hold DTensors only of wrapped "
            "models and optimizers. Make it a buffer of a wrapped model"
        )
    # For tensor subclasses, and types that the user has allowed with torch.serialization.add_safe_globals.
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        buffer.seek(0)
        _load(buffer)
    except Exception as error:
        raise UnsavableState(
            f"{label} is of type {type(value).__module__}.{type(value).__qualname__}, which a checkpoint can't hold: "
            "loading it would run code. Return tensors, numpy arrays, numbers, strings, and dicts, lists, "
            "tuples and sets of them (a deque as a list, an Enum as its value, an object as its attributes), and turn "
            "them back in load_state_dict()"
        ) from error


_NUMPY_GLOBALS: list[Any] = [
    np.ndarray,
    np.dtype,
    *{type(np.dtype(code)) for code in "?bBhHiIlLqQefdgFDGUSmM"},
    # By their names of numpy 1 and of numpy 2: a checkpoint may have either.
    *(
        (value.__reduce__()[0], f"numpy.{core}.multiarray.{name}")
        for value, name in ((np.ones(1), "_reconstruct"), (np.float64(1), "scalar"))
        for core in ("core", "_core")
    ),
]


def _load(file: Path | io.BytesIO, **kwargs: Any) -> Any:
    with torch.serialization.safe_globals(_NUMPY_GLOBALS):
        return torch.load(file, **{"map_location": "cpu", "weights_only": True, **kwargs})


def load_as(kind: type[T], path: Path, **kwargs: Any) -> T:
    """Load a file of a checkpoint without running code.

    Raises:
        ValueError: the file can't be loaded as data, or holds another type.
    """
    if kwargs.get("mmap") and not zipfile.is_zipfile(path):
        kwargs["mmap"] = False  # torch maps only the format that it writes since 1.6
    try:
        content: Any = _load(path, **kwargs)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{path} can't be loaded as data: {_reason(str(error))}; nothing in it was run. If you trust the file, "
            "allow the type with torch.serialization.add_safe_globals([...]) first; or load it with torch.load("
            "weights_only=False), convert its contents to plain values, and save it in its place"
        ) from error
    if not isinstance(content, kind):
        raise ValueError(
            f"{path} must hold a {kind.__name__}, got {type(content).__name__}; use a checkpoint that a Trainer wrote"
        )
    return content


def _reason(message: str) -> str:
    """The cause in `torch.load`'s long message."""
    if named := re.search(r"GLOBAL (\S+) was not", message):
        return f"it names {named.group(1)}"
    return one_line(message.partition("WeightsUnpickler error:")[2].partition("Check the documentation")[0])


def read_json(path: Path) -> Any:
    return json.loads(path.read_text()) if path.exists() else None
