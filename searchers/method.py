"""What a search method is: a pure state machine. No clock, threads, I/O or global random numbers."""

from __future__ import annotations

import math
from typing import Protocol, runtime_checkable

from searchers.errors import MethodError
from searchers.events import Action, Event


@runtime_checkable
class Method(Protocol):
    """Events in, actions out. Bring your own: `searchers.testing.check_method` says whether it is one.

    The rules, all of them tested there:

    * Trials are numbered 0, 1, 2, ... in the order of their `Create`s.
    * Equal events give equal actions and equal states; `load(dump())` goes on as if nothing had happened.
    * An event told twice, or late (of a trial that has ended), returns [] and changes nothing; one of a trial never
      created raises `IllegalEvent` and changes nothing.
    * `Stop` names only live trials. `Done` comes exactly once, last, when every created trial has ended.
    * `Reported.value` arrives normalised: smaller is better, and what was not finite is +inf.
    """

    @property
    def rungs(self) -> tuple[float, ...]:
        """Lengths at which the method wants a validation, ascending, in the unit of `max_length`; () if none.

        Absolute, counted from the trial's beginning. The last one is `max_length`, where that is set. Small lengths can
        occur twice: the trial is then decided on twice, by one report.
        """

    def start(self) -> list[Action]:
        """The first actions. Called once."""

    def on(self, event: Event) -> list[Action]:
        """What follows from this event."""

    def dump(self) -> dict[str, object]:
        """The whole state as strict JSON, the configuration apart."""

    def load(self, state: dict[str, object]) -> None:
        """Continue from a `dump()` of an equally configured method."""


class Fields:
    """Checks a method's fields and raises one `MethodError` for all that are invalid.

    >>> check = Fields()
    >>> check.whole("max_trials", 0, at_least=1)
    >>> check.done()
    Traceback (most recent call last):
        ...
    searchers.errors.MethodError: searcher.max_trials: must be an integer >= 1, got 0
    """

    def __init__(self) -> None:
        self._faults: list[tuple[str, str]] = []

    def whole(self, name: str, value: object, *, at_least: int) -> None:
        """`value` must be an integer of `at_least` so much."""
        if not isinstance(value, int) or isinstance(value, bool) or value < at_least:
            self._faults.append((f"searcher.{name}", f"must be an integer >= {at_least}, got {value!r}"))

    def above(self, name: str, value: object, *, limit: float) -> None:
        """`value` must be a finite number greater than `limit`."""
        number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not number or not (isinstance(value, int | float) and value > limit):
            self._faults.append((f"searcher.{name}", f"must be > {limit:g}, got {value!r}"))

    def done(self) -> None:
        """Raise if anything was invalid."""
        if self._faults:
            raise MethodError(self._faults)


def check_state(method: str, state: dict[str, object]) -> None:
    """Refuse a dump of another method, before any of it is taken over."""
    if state.get("method") != method:
        raise ValueError(f"the state to load is of the method {state.get('method')!r}, this is {method!r}")
