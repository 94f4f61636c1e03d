"""The values that processes of a run send each other, as msgpack: nothing in it can name code to run.

None, bool, int (64 bits), float, str, bytes, list, tuple, dict, and the frozen dataclasses marked by `wire`. Lists and
tuples both arrive as tuples.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any, TypeVar

import msgpack

_EXT = 1
"""msgpack's type code of a dataclass: its name, then the values of its fields in their order."""
_classes: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {}

_T = TypeVar("_T")


class Malformed(ValueError):
    """A message that no process of ours sends."""


def wire(cls: type[_T]) -> type[_T]:
    """Let instances of a frozen dataclass be sent; the receiver must have imported its module too."""
    assert cls.__dataclass_params__.frozen, cls  # type: ignore[attr-defined]
    assert cls.__name__ not in _classes, cls
    _classes[cls.__name__] = cls, tuple(field.name for field in fields(cls))  # type: ignore[arg-type]
    return cls


def pack(value: Any) -> bytes:
    """Encode a value.

    Raises:
        TypeError, ValueError, OverflowError: it can't be sent.
    """
    packed: bytes = msgpack.packb(value, default=_dataclass_packed, unicode_errors="surrogatepass")
    return packed


def unpack(data: bytes | bytearray | memoryview) -> Any:
    """Decode a value.

    Raises:
        Malformed: `pack` has not made this, or with dataclasses that are unknown here.
    """
    try:
        return _unpacked(data)
    except Exception as error:  # of msgpack, of a dataclass, or RecursionError
        raise Malformed(f"{type(error).__name__}: {error}") from None


def _dataclass_packed(value: object) -> msgpack.ExtType:
    name = type(value).__name__
    cls, names = _classes.get(name, (object, ()))
    if cls is not type(value):
        raise TypeError(f"can't send a {name}: only plain values and dataclasses marked with @wire")
    return msgpack.ExtType(_EXT, pack([name, *[getattr(value, each) for each in names]]))


def _dataclass_unpacked(code: int, data: bytes) -> Any:
    if code != _EXT:
        raise ValueError(f"unknown type code {code}")
    name, *values = _unpacked(data)
    if name not in _classes:
        raise ValueError(f"unknown dataclass {name!r}")
    cls, names = _classes[name]
    return cls(**dict(zip(names, values, strict=True)))


def _unpacked(data: bytes | bytearray | memoryview) -> Any:
    return msgpack.unpackb(
        data, ext_hook=_dataclass_unpacked, use_list=False, strict_map_key=False, unicode_errors="surrogatepass"
    )
