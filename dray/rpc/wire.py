"""The encoding of messages between the processes of a run, as msgpack: no message can name code to run.

Values are None, bool, int (beyond 64 bits it becomes a float), float, str, bytes, list, tuple, dict, and the frozen
dataclasses marked by `wire`. Lists and tuples both arrive as tuples.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import fields
from functools import cache
from inspect import Parameter, signature
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import msgpack

_NAME = 1
"""msgpack's type code of a dataclass's name, which begins an array with the values of its fields in order."""
_classes: dict[str, type] = {}
_fields: dict[type, tuple[str, ...]] = {}

_T = TypeVar("_T")


class Malformed(ValueError):
    """A message that dray does not send."""


def wire(cls: type[_T]) -> type[_T]:
    """Let instances of a frozen dataclass be sent; the receiver must have imported its module too."""
    assert cls.__dataclass_params__.frozen and cls.__name__ not in _classes, cls  # type: ignore[attr-defined]  # noqa: PT018
    _classes[cls.__name__] = cls
    _fields[cls] = tuple(field.name for field in fields(cls))  # type: ignore[arg-type]
    return cls


def pack(value: Any) -> bytes:
    """Encode a value. A value that can't be sent is a TypeError, ValueError or OverflowError."""
    packed: bytes = msgpack.packb(value, default=_otherwise_packed, unicode_errors="surrogatepass")
    return packed


def unpack(data: bytes | memoryview) -> Any:
    """Decode a value. It is `Malformed` if it is not from `pack`, or contains a dataclass that is unknown here or has
    fields of the wrong types."""
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
    """A dataclass's name in a message."""


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
    values = dict(zip(_fields[cls], array[1:], strict=True))
    for name, fits in _tests(cls).items():
        if not fits(values[name]):
            raise TypeError(f"the {name} of a {cls.__name__} is {values[name]!r:.80}")
    return cls(**values)


# ------------------------------------------------------------------------------------------------------------- types
def checked(method: Callable[..., _T], *args: Any) -> _T:
    """Call a method with received arguments; `Malformed`, before the call, if it does not accept them."""
    tests, least = _tests_of_call(method.__func__)  # type: ignore[attr-defined]
    if not least <= len(args) <= len(tests):
        raise Malformed(f"{method.__name__} with {len(args)} arguments")
    for (name, fits), arg in zip(tests.items(), args, strict=False):
        if not fits(arg):
            raise Malformed(f"{method.__name__} with the {name} {arg!r:.80}")
    return method(*args)


@cache
def _tests_of_call(function: Callable[..., Any]) -> tuple[dict[str, Callable[[Any], bool]], int]:
    """The test of each argument of a method, and the number of required arguments."""
    parameters = list(signature(function).parameters.values())[1:]
    tests = _tests(function)
    needed = sum(each.default is Parameter.empty for each in parameters)
    return {each.name: tests[each.name] for each in parameters}, needed


@cache
def _tests(annotated: Any) -> dict[str, Callable[[Any], bool]]:
    return {name: _test(hint) for name, hint in get_type_hints(annotated).items()}


_PLAIN = {int, float, bool, str, bytes, type(None)}


def _test(hint: Any) -> Callable[[Any], bool]:
    """A test whether a received value has a type."""
    kind, inner = get_origin(hint) or hint, get_args(hint)
    if hint in (Any, Hashable):
        return lambda value: True
    options = set(inner) if kind in (Union, UnionType) else {hint}
    if options <= _PLAIN:
        options |= {int} if float in options else set()
        return lambda value: type(value) in options
    if kind in (Union, UnionType):
        tests = [_test(each) for each in inner]
        return lambda value: any(fits(value) for fits in tests)
    if kind is Literal:
        return lambda value: type(value) is str and value in inner
    if kind is tuple and inner[-1] is not ...:
        each_fits = [_test(each) for each in inner]
        return lambda value: (
            type(value) is tuple
            and len(value) == len(inner)
            and all(fits(each) for fits, each in zip(each_fits, value, strict=True))
        )
    if issubclass(kind, Mapping):
        return lambda value: type(value) is dict
    if issubclass(kind, Iterable) and kind not in (str, bytes):
        fits = _test(inner[0])
        return lambda value: type(value) in (tuple, list) and all(map(fits, value))
    return lambda value: type(value) is kind
