"""What a search will do before it runs: brackets, rungs, trials at each, and the total length trained."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from random import Random

from searchers.adaptive_asha import AdaptiveASHA
from searchers.asha import ASHA
from searchers.events import Action, Event, Reported, Started
from searchers.method import Method
from searchers.random_search import RandomSearch
from searchers.simulate import Curve, simulate

WORKERS = 16
"""Of a simulation: methods have so many trials at a time by default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RungPreview:
    """A rung.

    Attributes:
        length: In the unit of `max_length`; None where the search does not set the length of its trials.
        trials: Trials that reach it.
        last: Those of them that go no further.
    """

    length: int | None
    trials: int
    last: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BracketPreview:
    """A bracket; a search without brackets is one.

    Attributes:
        rungs: Ascending.
    """

    rungs: tuple[RungPreview, ...]

    @property
    def trials(self) -> int:
        """Trials of the bracket."""
        return self.rungs[0].trials

    @property
    def total(self) -> int | None:
        """Length trained by all of its trials together; None where the search does not set lengths."""
        lengths = [(rung.length, rung.last) for rung in self.rungs]
        return (
            sum(length * last for length, last in lengths if length is not None) if lengths[0][0] is not None else None
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Preview:
    """What a search will do if every trial is valid and values come in random order.

    Attributes:
        brackets: In the order in which their first trials are created.
    """

    brackets: tuple[BracketPreview, ...]

    @property
    def trials(self) -> int:
        """Trials of all brackets."""
        return sum(bracket.trials for bracket in self.brackets)

    @property
    def total(self) -> int | None:
        """Length trained by all trials together; None where the search does not set lengths."""
        known = [bracket.total for bracket in self.brackets if bracket.total is not None]
        return sum(known) if len(known) == len(self.brackets) else None


def preview(method: Method) -> Preview:
    """What this new method will do, by Determined's rule: of n trials at a rung max(floor(n / divisor), 1) go on.

    A method from elsewhere is simulated once, with random values at each rung: the number of trials at a rung is then
    one draw of what may happen. This starts the method; make another one to run.

    Raises:
        TypeError: It is no method.
        RuntimeError: It broke the rules in the simulation; see `searchers.testing.check_method`.

    >>> found = preview(ASHA(max_trials=64, max_length=16, num_rungs=3))
    >>> [(rung.length, rung.trials, rung.last) for rung in found.brackets[0].rungs], found.total
    ([(1, 64, 48), (4, 16, 12), (16, 4, 4)], 160)
    """
    match method:
        case AdaptiveASHA(brackets=brackets):
            return Preview(brackets=tuple(_halving(bracket) for bracket in brackets))
        case ASHA():
            return Preview(brackets=(_halving(method),))
        case RandomSearch(max_trials=n, rungs=rungs):
            rung = RungPreview(length=rungs[-1] if rungs else None, trials=n, last=n)
            return Preview(brackets=(BracketPreview(rungs=(rung,)),))
        case Method():
            return Preview(brackets=(_simulated(method),))
    raise TypeError(f"preview() needs a searchers.Method, got {method!r} of type {type(method).__name__}")


def is_simulated(method: Method) -> bool:
    """Whether `preview` simulates this method."""
    return not isinstance(method, AdaptiveASHA | ASHA | RandomSearch)


def _halving(asha: ASHA) -> BracketPreview:
    rungs, n, divisor = [], asha.max_trials, Fraction(str(asha.divisor))
    for length in asha.rungs[:-1]:
        go_on = max(math.floor(n / divisor), 1)
        rungs.append(RungPreview(length=length, trials=n, last=n - go_on))
        n = go_on
    return BracketPreview(rungs=(*rungs, RungPreview(length=asha.rungs[-1], trials=n, last=n)))


def _simulated(method: Method) -> BracketPreview:
    reached: dict[int, float] = {}

    def trial(hparams: Mapping[str, object]) -> Curve:
        return Curve(lambda step: Random(f"{hparams['trial']}:{step}").random())

    def watch(time: float, event: Event, actions: list[Action]) -> None:
        match event:
            case Started(trial=number):
                reached.setdefault(number, 0)
            case Reported(trial=number, step=step):
                reached[number] = step

    lengths = tuple(dict.fromkeys(method.rungs))
    simulate(method, WORKERS, trial, reports=lengths or (1,), watch=watch)
    if not lengths:
        return BracketPreview(rungs=(RungPreview(length=None, trials=len(reached), last=len(reached)),))
    last = Counter(max(step, lengths[0]) for step in reached.values())
    rungs, n = [], len(reached)
    for length in lengths:
        rungs.append(RungPreview(length=int(length), trials=n, last=last[length]))
        n -= last[length]
    return BracketPreview(rungs=tuple(rungs))
