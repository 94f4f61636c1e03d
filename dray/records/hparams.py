"""Dotted names of hyperparameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def unread_line(unread: Sequence[str], read: Sequence[str]) -> str:
    """A line about hyperparameters that are searched in vain; "" if there are none.

    >>> unread_line(["dropuot"], ["lr", "hidden"])
    'dropuot is searched, but no trial has read it; read: lr, hidden'
    """
    if not unread:
        return ""
    verb, them = ("is", "it") if len(unread) == 1 else ("are", "them")
    return f"{', '.join(unread)} {verb} searched, but no trial has read {them}; read: {', '.join(read) or 'none'}"


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
