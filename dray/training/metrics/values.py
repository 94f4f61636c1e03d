"""Values of metrics as numbers, NumPy arrays and JSON."""

from __future__ import annotations

import json
import numbers
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_map_only

from dray.training.parallel.sharding import is_dtensor


def as_number(value: Any) -> float | None:
    """Convert a number, or an array with one, to a float; None if it is neither or is too large."""
    if isinstance(value, (int, float, numbers.Real, np.number, np.bool_)):
        try:
            return float(value)
        except OverflowError:
            return None
    if isinstance(value, np.ndarray) and value.size == 1 and value.dtype.kind in "fiub":
        return float(value.reshape(()))
    return None


def to_numpy(value: Any) -> Any:
    """Convert tensors to NumPy arrays, also inside dicts, lists and tuples; leave the rest unchanged."""
    if isinstance(value, torch.Tensor):
        value = value.detach()
        if value.dtype is torch.bfloat16:
            value = value.float()
        return value.cpu().numpy()
    if isinstance(value, dict):
        return {key: to_numpy(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(to_numpy(item) for item in value) if not hasattr(value, "_fields") else value
    return value


def whole(tensor: torch.Tensor) -> Any:
    """Gather a tensor that is divided among the ranks, such as a norm of sharded gradients. All ranks call this."""
    return tensor if type(tensor) is torch.Tensor or not is_dtensor(tensor) else tensor.full_tensor()


def detached(value: Any) -> Any:
    """Copy tensors without their gradients, also inside containers that torch knows (dicts, tuples).

    The user may change a tensor in place, and a CUDA graph overwrites its outputs at its next replay.
    """
    if isinstance(value, torch.Tensor):
        return whole(value).detach().clone()
    return value if isinstance(value, (float, int)) else tree_map_only(torch.Tensor, detached, value)


def jsonable(metrics: Mapping[str, Any], *, source: str) -> dict[str, Any]:
    """Convert metrics to plain numbers, strings, lists and dicts.

    Raises:
        TypeError: a metric is not JSON-serialisable; the error names it and its `source`.
    """
    plain = {}
    for key, value in metrics.items():
        name = str(key).encode(errors="backslashreplace").decode()  # a file's name may not be valid UTF-8
        plain[name] = _plain(value, name=name, source=source)
    return plain


def _plain(value: Any, *, name: str, source: str) -> Any:
    if value is None or isinstance(value, (bool, float, str)):
        return value
    value = to_numpy(value)
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in "fiubU":
        return value.item() if value.size == 1 else value.tolist()
    number = as_number(value)
    if number is not None:
        return int(value) if isinstance(value, numbers.Integral) else number
    if isinstance(value, numbers.Real):
        raise TypeError(f"{source} returned the metric {name!r} with a number that is larger than any float")
    if isinstance(value, (list, tuple)):
        return [_plain(item, name=name, source=source) for item in value]
    if isinstance(value, dict):
        return {str(key): _plain(item, name=f"{name}.{key}", source=source) for key, item in value.items()}
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        raise TypeError(
            f"{source} returned the metric {name!r} of type {type(value).__name__}, which is not JSON-serialisable; "
            "return numbers, strings, or lists and dicts of them"
        ) from None
    return value
