"""What can be sent, and what is refused."""

from __future__ import annotations

import math
import pickle
from dataclasses import dataclass
from typing import Any

import msgpack
import pytest

from dray.experiment import driver
from dray.groups.lender import Lender
from dray.leases.desk import CALLS, CLIENT_CALLS, Desk
from dray.leases.messages import Departure, DeskReport
from dray.rpc import wire as wire_module
from dray.rpc.wire import Malformed, checked, pack, unpack, wire


@wire
@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    x: float
    labels: tuple[str, ...] = ()
    inner: Any = None

    def __post_init__(self) -> None:
        if self.x == 13:
            raise KeyError("13")


@dataclass(frozen=True)
class Unmarked:
    x: int


VALUES = [
    *[None, True, 0, -(2**63), 2**64 - 1, 0.1, math.inf, -math.inf, "", "ü\udcff", b"\x00", (), {}],
    {"a": (1, {"b": (None, False)}), 7: "number", None: 1.5},
    Point(x=1.5, labels=("one", "two"), inner={"points": (Point(x=-0.0), Point(x=math.inf))}),
]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_values_arrive_as_they_were(value: Any) -> None:
    arrived = unpack(pack(value))
    assert arrived == value
    assert type(arrived) is type(value)


def test_nan_arrives_large_integers_are_floats_and_lists_are_tuples() -> None:
    assert unpack(pack({"tokens": 2**70, "bytes": 2**64 - 1})) == {"tokens": 2.0**70, "bytes": 2**64 - 1}
    assert math.isnan(unpack(pack(math.nan)))
    assert unpack(pack([1, [2, (3,)]])) == (1, (2, (3,)))


@pytest.mark.parametrize(
    "value", [Unmarked(x=1), {1, 2}, object(), KeyError("x"), Point, 10**400], ids=lambda value: type(value).__name__
)
def test_what_can_not_be_sent_is_an_error_of_the_sender(value: Any) -> None:
    with pytest.raises((TypeError, OverflowError), match=r"can't send a|too large"):
        pack([value])


def foreign(name: str, *values: Any) -> bytes:
    """A dataclass, as `pack` encodes it."""
    packed: bytes = msgpack.packb([msgpack.ExtType(1, name.encode()), *values])
    return packed


class Trap:
    """Notes that it was unpickled."""

    sprung = False

    def __reduce__(self) -> Any:
        return setattr, (Trap, "sprung", True)


@pytest.mark.parametrize(
    "data",
    [
        pickle.dumps(Trap()),
        b"",
        pack([1, 2])[:-1],
        pack(1) + pack(2),
        foreign("Unmarked", 1),
        foreign("system", "touch /tmp/x"),
        foreign("Point"),
        foreign("Point", 1.0, (), None, "more"),
        foreign("Point", 13, (), None),
        foreign("Point", "1", (), None),
        foreign("Point", 1.0, ("one", 2), None),
        foreign("ü"),
        msgpack.packb(msgpack.ExtType(2, b"")),
        b"\x91\xc7\x00\xff",  # a time
        b"\x81\x80\xc0",  # a dict as a key
        b"\x91" * 100_000,
        b"\xdd\xff\xff\xff\xff",
    ],
    ids=range(17),
)
def test_what_is_no_message_of_ours_is_refused(data: bytes) -> None:
    with pytest.raises(Malformed):
        unpack(data)
    assert not Trap.sprung


def test_endless_nesting_is_refused() -> None:
    nested = foreign("Point", 1.0, [], None)[:-1] * 100_000 + b"\xc0"
    with pytest.raises(Malformed):
        unpack(nested)
    inner: Any = None
    for _ in range(2000):
        inner = Point(x=1, inner=inner)
    with pytest.raises(ValueError, match="recursion limit"):
        pack(inner)


class Clerk:
    """Takes calls."""

    def note(
        self, call: Any, trial: int, share: float | None, report: DeskReport, where: tuple[str, int] = ("", 0)
    ) -> Any:
        return trial, where


@pytest.mark.parametrize(
    "args",
    [
        (1, 0.5),
        (1, 0.5, DeskReport(), ("a", 1), 2),
        ("1", 0.5, DeskReport()),
        (True, 0.5, DeskReport()),
        (1, "0.5", DeskReport()),
        (1, 0.5, Departure(outcome="completed")),
        (1, 0.5, DeskReport(), ("a",)),
        (1, 0.5, DeskReport(), (1, "a")),
        (1, 0.5, DeskReport(), 1),
    ],
)
def test_a_method_is_not_called_with_what_it_does_not_take(args: tuple[Any, ...]) -> None:
    clerk = Clerk()
    assert checked(clerk.note, None, 1, None, DeskReport()) == (1, ("", 0))
    assert checked(clerk.note, None, 1, 2, DeskReport(), ("a", 1)) == (1, ("a", 1))
    with pytest.raises(Malformed, match=r"^note with"):
        checked(clerk.note, None, *args)


def test_the_types_of_all_that_is_called_and_sent_are_known() -> None:
    for method in (*CALLS, *CLIENT_CALLS):
        assert wire_module._tests_of_call(getattr(Desk, method))  # noqa: SLF001
    for method in driver.CALLS:
        assert wire_module._tests_of_call(getattr(driver.ExperimentDriver, method))  # noqa: SLF001
    assert wire_module._tests_of_call(Lender.add)  # noqa: SLF001
    assert all(wire_module._tests(each) for each in wire_module._classes.values())  # noqa: SLF001
