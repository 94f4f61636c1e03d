"""The protocol of search methods: pure state machines, without clock, threads, I/O or global random numbers."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Protocol, runtime_checkable

from searchers.errors import MethodError
from searchers.events import Action, Event


@runtime_checkable
class Method(Protocol):
    """A search method, from events to actions. Test your own with `searchers.testing.check_method`.

    `check_method` checks all of these rules:

    * Trials are numbered 0, 1, 2, ... in the order of their `Create` actions.
    * Equal events give equal actions, so that a replay of the events restores the state.
    * A repeated event, or a late one (for a trial that has ended), returns [] and does not affect later decisions. An
      event for a trial that was never created raises `IllegalEvent` and changes nothing.
    * `Stop` names only live trials, `Pause` only running ones, `Resume` only paused ones or, after an extension, ended
      ones. `Done` comes exactly once, as the last action, when every created trial has ended.
    * `Reported.value` arrives normalised: smaller is better, and non-finite values are +inf.

    A method may also have `requested(request: Requested) -> list[Action]`, which creates the trial that a person
    requests, with its source and hyperparameters, beyond the budget, and even after `Done`; the progress may then
    decrease. Without it, requests of new trials are rejected.

    If a method has `limit_points(points: int) -> None`, this is called before `start` if the space has only so many
    points. The method then creates at most this many trials besides requested ones, since each gets another point.
    """

    @property
    def rungs(self) -> tuple[float, ...]:
        """Lengths at which the method needs a validation, ascending, in the unit of `max_length`; () if none.

        They count from the trial's beginning. The last one is `max_length`, if that is set. Small lengths can occur
        twice; one report then counts for both.
        """

    def start(self) -> list[Action]:
        """Return the first actions. Called once."""

    def on(self, event: Event) -> list[Action]:
        """Return the actions that follow from this event.

        Raises:
            IllegalEvent: The trial was never created. The state is unchanged.
        """

    def progress(self, trained: Mapping[int, float]) -> float:
        """Return the share of the search that is done, from 0 to 1. It decreases only when the search is extended.

        The progress is 1.0 if and only if the search is done.

        Args:
            trained: Each trial's last step / max_length, from 0 to 1. A missing trial counts as 0.
        """

    def extend(self, *, max_trials: int | None = None, max_length: int | None = None) -> list[Action]:
        """Continue with a larger budget, even if the search is done; `Done` then comes again.

        Args:
            max_trials: New total number of trials, including those created so far. None: unchanged.
            max_length: New length of a trial that is never stopped. None: unchanged.

        Returns:
            `Create` actions, and `Resume` actions for trials that were paused or have ended.

        Raises:
            MethodError: The budget does not grow, or the method does not support this extension. The state is
                unchanged.
        """


def limit_points(method: Method, points: int | None) -> None:
    """Tell a new method how many points its space has, if these are few; see `Space.every_point`."""
    limit = getattr(method, "limit_points", None)
    if limit is not None and points is not None:
        limit(points)


MAX_TRIALS = 100_000_000  # also stands for a search without an end
MAX_RUNGS = 1_000
_MAX = {"max_trials": MAX_TRIALS, "max_concurrent_trials": MAX_TRIALS, "num_rungs": MAX_RUNGS, "max_rungs": MAX_RUNGS}


class Fields:
    """Checks of a method's fields that raise one `MethodError` for all invalid ones.

    >>> check = Fields()
    >>> check.integers(1, max_trials=0)
    >>> check.raise_faults()
    Traceback (most recent call last):
        ...
    searchers.errors.MethodError: searcher.max_trials: must be an integer >= 1, got 0
    """

    def __init__(self) -> None:
        self._faults: list[tuple[str, str]] = []

    def fault(self, name: str, message: str) -> None:
        self._faults.append((f"searcher.{name}", message))

    def integers(self, minimum: int, /, **fields: object) -> None:
        for name, value in fields.items():
            maximum = _MAX.get(name, 2**63 - 1)
            if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
                self.fault(name, f"must be an integer >= {minimum}, got {value!r:.80}")
            elif value > maximum:
                self.fault(name, f"must be at most {maximum}, got a larger integer")

    def above(self, name: str, value: object, *, limit: float) -> None:
        if isinstance(value, bool) or not isinstance(value, int | float) or not limit < value < math.inf:
            self.fault(name, f"must be > {limit:g}, got {value!r}")

    def one_of(self, name: str, value: object, known: Collection[str]) -> None:
        if value not in tuple(known):  # a tuple: `value` may not be hashable
            self.fault(name, f"must be one of {', '.join(known)}, got {value!r}")

    def raise_faults(self) -> None:
        """Raise a `MethodError` if any field was invalid."""
        if self._faults:
            raise MethodError(self._faults)


def check_extension(**fields: tuple[int | None, int | str]) -> None:
    """Check that an extension increases at least one field and decreases none; else raise a `MethodError`.

    Each field has its new value (None: unchanged), and its present value or the reason why it can't grow.

    >>> check_extension(max_trials=(32, 64), max_length=(None, 16))
    Traceback (most recent call last):
        ...
    searchers.errors.MethodError: searcher.max_trials: must be an integer >= 64, got 32
    """
    check, grows = Fields(), False
    for name, (new, old) in fields.items():
        if new is None:
            continue
        if isinstance(old, str):
            check.fault(name, f"{old}, got {new!r}")
        else:
            check.integers(old, **{name: new})
            grows |= new != old
    check.raise_faults()
    if not grows:
        choices = [f"{name} > {old}" for name, (_, old) in fields.items() if not isinstance(old, str)]
        message = f"an extension needs {' or '.join(choices)}" if choices else "this search can't be extended"
        raise MethodError([("searcher", message)])
