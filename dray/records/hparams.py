"""Hyperparameters by dotted names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested hyperparameters by dotted names.

    >>> flatten({"optimizer": {"name": "sgd", "lr": 0.1}, "hidden": 64})
    {'optimizer.name': 'sgd', 'optimizer.lr': 0.1, 'hidden': 64}
    """
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= flatten(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return flat
