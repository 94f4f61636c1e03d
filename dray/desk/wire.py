"""The values that processes of a run send each other, as msgpack: nothing in it can name code to run.

None, bool, int (a float beyond 64 bits), float, str, bytes, list, tuple, dict, and the frozen dataclasses marked by
`wire`. Lists and tuples both arrive as tuples.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any, TypeVar

import msgpack

_NAME = 1
"""msgpack's type code of a dataclass's name: first in an array, before the values of its fields in their order."""
_classes: dict[str, type] = {}
_fields: dict[type, tuple[str, ...]] = {}

_T = TypeVar("_T")


class Malformed(ValueError):
    """A message that no process of ours sends."""


def wire(cls: type[_T]) -> type[_T]:
    """Let instances of a frozen dataclass be sent; the receiver must have imported its module too."""
    assert cls.__dataclass_params__.frozen and cls.__name__ not in _classes, cls  # type: ignore[attr-defined]  # noqa: PT018
    _classes[cls.__name__] = cls
    _fields[cls] = tuple(field.name for field in fields(cls))  # type: ignore[arg-type]
    return cls


def pack(value: Any) -> bytes:
    """Encode a value; a TypeError, ValueError or OverflowError if it can't be sent."""
    packed: bytes = msgpack.packb(value, default=_otherwise_packed, unicode_errors="surrogatepass")
    return packed


def unpack(data: bytes | memoryview) -> Any:
    """Decode a value; Malformed if it is not from `pack`, or of a dataclass that is unknown here."""
    try:
        return msgpack.unpackb(
            data,
            ext_hook=_name_unpacked,
            list_hook=_array_unpacked,
            use_list=False,
            strict_map_key=False,
            unicode_errors="surrogatepass",
        )
    except Exception as error:  # of msgpack, or of a dataclass
        raise Malformed(f"{type(error).__name__}: {error}") from None


class _Name(str):
    """That of a dataclass, on its way."""


def _name_unpacked(code: int, data: bytes) -> _Name:
    if code != _NAME:
        raise ValueError(f"unknown type code {code}")
    return _Name(data, "ascii")


def _otherwise_packed(value: object) -> Any:
    cls = type(value)
    if isinstance(value, int):  # beyond 64 bits
        return float(value)
    if cls not in _fields:
        raise TypeError(f"can't send a {cls.__name__}: only plain values and dataclasses marked with @wire")
    return [msgpack.ExtType(_NAME, cls.__name__.encode()), *[getattr(value, name) for name in _fields[cls]]]


def _array_unpacked(array: tuple[Any, ...]) -> Any:
    if not array or type(array[0]) is not _Name:
        return array
    cls = _classes[array[0]]
    return cls(**dict(zip(_fields[cls], array[1:], strict=True)))
