"""Dotted names of hyperparameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested hyperparameters to dotted names.

    >>> flatten({"optimizer": {"name": "sgd", "lr": 0.1}, "hidden": 64})
    {'optimizer.name': 'sgd', 'optimizer.lr': 0.1, 'hidden': 64}
    """
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= flatten(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return flat


def in_order(names: Iterable[str], written: Iterable[str]) -> list[str]:
    """Sort dotted names by the order of their first parts in a config; names that it does not have come last.

    >>> in_order(["hidden", "lr", "optimizer.name"], ["lr", "optimizer", "hidden"])
    ['lr', 'optimizer.name', 'hidden']
    """
    places = {name: place for place, name in enumerate(written)}
    return sorted(names, key=lambda name: places.get(name.partition(".")[0], len(places)))
