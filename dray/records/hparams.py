"""Hyperparameters by dotted names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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


def in_order(names: Iterable[str], written: Iterable[str]) -> list[str]:
    """Dotted names in the order in which a config has their first parts; those that it does not have come last.

    >>> in_order(["hidden", "lr", "optimizer.name"], ["lr", "optimizer", "hidden"])
    ['lr', 'optimizer.name', 'hidden']
    """
    places = {name: place for place, name in enumerate(written)}
    return sorted(names, key=lambda name: places.get(name.partition(".")[0], len(places)))
