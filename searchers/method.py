"""What a search method is: a pure state machine. No clock, threads, I/O or global random numbers."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Protocol, runtime_checkable

from searchers.errors import MethodError
from searchers.events import Action, Event


@runtime_checkable
class Method(Protocol):
    """Events in, actions out. To write your own, test it with `searchers.testing.check_method`.

    The rules, all of them tested there:

    * Trials are numbered 0, 1, 2, ... in the order of their `Create`s.
    * Equal events give equal actions, so that a replay of the events restores the state.
    * A repeated event, or a late one (of a trial that has ended), returns [] and changes nothing that follows. An event
      of a trial that was never created raises `IllegalEvent` and changes nothing.
    * `Stop` names live trials only, `Pause` running ones, `Resume` paused ones or, after an extension, ended ones.
      `Done` comes exactly once, last, when every created trial has ended.
    * `Reported.value` arrives normalised: smaller is better, and values that were not finite are +inf.
    """

    @property
    def rungs(self) -> tuple[float, ...]:
        """Lengths at which the method wants a validation, ascending, in the unit of `max_length`; () if none.

        They count from the trial's beginning. The last one is `max_length`, if that is set. Small lengths can occur
        twice; one report then counts at both.
        """

    def start(self) -> list[Action]:
        """The first actions. Called once."""

    def on(self, event: Event) -> list[Action]:
        """The actions that follow from this event."""

    def progress(self, trained: Mapping[int, float]) -> float:
        """Share of the search that is done, from 0 to 1; exactly 1.0 when it is done. It falls only at an extension.

        Args:
            trained: Each trial's last step / max_length, from 0 to 1. A missing trial counts as 0.
        """

    def extend(self, *, max_trials: int | None = None, max_length: int | None = None) -> list[Action]:
        """Continue with a larger budget, even if the search is done; `Done` then comes again.

        Args:
            max_trials: Trials in all, including those so far. None: unchanged.
            max_length: Length of a trial that is never stopped. None: unchanged.

        Returns:
            `Create`s, and `Resume`s of trials that were paused or have ended.

        Raises:
            MethodError: The budget does not grow, or this method can't be extended so. Nothing has changed.
        """


MAX_TRIALS = 100_000_000  # most trials of a search; also used for a search without an end
MAX_RUNGS = 1_000
_MOST = {"max_trials": MAX_TRIALS, "max_concurrent_trials": MAX_TRIALS, "num_rungs": MAX_RUNGS, "max_rungs": MAX_RUNGS}


class Fields:
    """Checks a method's fields, and raises one `MethodError` for all invalid ones.

    >>> check = Fields()
    >>> check.whole(1, max_trials=0)
    >>> check.done()
    Traceback (most recent call last):
        ...
    searchers.errors.MethodError: searcher.max_trials: must be an integer >= 1, got 0
    """

    def __init__(self) -> None:
        self._faults: list[tuple[str, str]] = []

    def fault(self, name: str, message: str) -> None:
        self._faults.append((f"searcher.{name}", message))

    def whole(self, at_least: int, /, **fields: object) -> None:
        """Each must be an integer >= `at_least`, within the limits of a search."""
        for name, value in fields.items():
            most = _MOST.get(name, 2**63 - 1)
            if not isinstance(value, int) or isinstance(value, bool) or value < at_least:
                self.fault(name, f"must be an integer >= {at_least}, got {value!r:.80}")
            elif value > most:
                self.fault(name, f"must be at most {most}, got a larger integer")

    def above(self, name: str, value: object, *, limit: float) -> None:
        if isinstance(value, bool) or not isinstance(value, int | float) or not limit < value < math.inf:
            self.fault(name, f"must be > {limit:g}, got {value!r}")

    def one_of(self, name: str, value: object, known: Collection[str]) -> None:
        if value not in tuple(known):  # a tuple: `value` may not be hashable
            self.fault(name, f"must be one of {', '.join(known)}, got {value!r}")

    def done(self) -> None:
        """Raise a `MethodError` if any field was invalid."""
        if self._faults:
            raise MethodError(self._faults)


def check_extension(**asked: tuple[int | None, int | str]) -> None:
    """Check the fields of an extension: the new value (None: unchanged), and the present one or why it can't grow.

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
            check.whole(old, **{name: new})
            grows |= new != old
    check.done()
    if not grows:
        has = [f"{name} > {old}" for name, (_, old) in asked.items() if not isinstance(old, str)]
        message = f"an extension needs {' or '.join(has)}" if has else "this search can't be extended"
        raise MethodError([("searcher", message)])
