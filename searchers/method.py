"""What a search method is: a pure state machine. No clock, threads, I/O or global random numbers."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Protocol, runtime_checkable

from searchers.errors import MethodError
from searchers.events import Action, Event


@runtime_checkable
class Method(Protocol):
    """Events in, actions out. Bring your own: `searchers.testing.check_method` says whether it is one.

    The rules, all of them tested there:

    * Trials are numbered 0, 1, 2, ... in the order of their `Create`s.
    * Equal events give equal actions, so that a replay of the events restores the state.
    * An event told twice, or late (of a trial that has ended), returns [] and changes nothing that follows; one of a
      trial never created raises `IllegalEvent` and changes nothing.
    * `Stop` names only live trials, `Pause` those that run, `Resume` those that are paused, or that ended and are taken
      up again by an extension. `Done` comes exactly once, last, when every created trial has ended.
    * `Reported.value` arrives normalised: smaller is better, and what was not finite is +inf.
    """

    @property
    def rungs(self) -> tuple[float, ...]:
        """Lengths at which the method wants a validation, ascending, in the unit of `max_length`; () if none.

        They count from the trial's beginning. The last one is `max_length`, if that is set. Small lengths can occur
        twice: one report then decides twice.
        """

    def start(self) -> list[Action]:
        """The first actions. Called once."""

    def on(self, event: Event) -> list[Action]:
        """What follows from this event."""

    def progress(self, trained: Mapping[int, float]) -> float:
        """Share of the search that is done: from 0 to 1, never falling (but by `extend`), 1.0 exactly when it is done.

        Args:
            trained: Each trial's last step / max_length, from 0 to 1. A trial that is not in it counts as 0.
        """

    def extend(self, *, max_trials: int | None = None, max_length: int | None = None) -> list[Action]:
        """Go on with a larger budget, also if the search is done: it is live again then, and `Done` comes anew.

        Args:
            max_trials: Trials in all, those so far counted. None: as many as before.
            max_length: Length of a trial that goes all the way. None: as before.

        Returns:
            What follows: `Create`s, and `Resume`s of trials that are paused or ended before and are to go on.

        Raises:
            MethodError: The budget does not grow, or this method cannot do it. Nothing has changed.
        """


MAX_TRIALS = 100_000_000
"""Most trials of a search; so many stand for a search without an end."""
MAX_RUNGS = 1_000
_MOST = {"max_trials": MAX_TRIALS, "max_concurrent_trials": MAX_TRIALS, "num_rungs": MAX_RUNGS, "max_rungs": MAX_RUNGS}


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

    def fault(self, name: str, message: str) -> None:
        """The field is invalid."""
        self._faults.append((f"searcher.{name}", message))

    def whole(self, name: str, value: object, *, at_least: int) -> None:
        """`value` must be an integer >= `at_least`, and not larger than anything in a search can be."""
        most = _MOST.get(name, 2**63 - 1)
        if not isinstance(value, int) or isinstance(value, bool) or value < at_least:
            self.fault(name, f"must be an integer >= {at_least}, got {value!r:.80}")
        elif value > most:
            self.fault(name, f"must be at most {most}, got a larger integer")

    def above(self, name: str, value: object, *, limit: float) -> None:
        """`value` must be a finite number greater than `limit`."""
        if isinstance(value, bool) or not isinstance(value, int | float) or not limit < value < math.inf:
            self.fault(name, f"must be > {limit:g}, got {value!r}")

    def one_of(self, name: str, value: object, known: Collection[str]) -> None:
        """`value` must be one of the `known`."""
        if value not in tuple(known):  # a tuple: `value` may not be hashable
            self.fault(name, f"must be one of {', '.join(known)}, got {value!r}")

    def done(self) -> None:
        """Raise if anything was invalid."""
        if self._faults:
            raise MethodError(self._faults)


def check_extension(**asked: tuple[int | None, int | str]) -> None:
    """Check what an extension asks for, before anything changes.

    Args:
        asked: For each field the new value (None: not asked for), and the present one, or the reason it can't grow.

    Raises:
        MethodError: A value is too small or can't grow, or nothing grows.

    >>> check_extension(max_trials=(32, 64), max_length=(None, 16))
    Traceback (most recent call last):
        ...
    searchers.errors.MethodError: searcher.max_trials: must be an integer >= 64, got 32
    """
    check, grows = Fields(), False
    for name, (new, old) in asked.items():
        if new is None:
            continue
        if isinstance(old, str):
            check.fault(name, f"{old}, got {new!r}")
        else:
            check.whole(name, new, at_least=old)
            grows |= new != old
    check.done()
    if not grows:
        has = [f"{name} > {old}" for name, (_, old) in asked.items() if not isinstance(old, str)]
        told = f"an extension needs {' or '.join(has)}" if has else "this search can't be extended"
        raise MethodError([("searcher", told)])
