"""What a search will do before it runs: brackets, rungs, trials at each, and the total length trained."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

from searchers.adaptive_asha import AdaptiveASHA
from searchers.asha import ASHA
from searchers.method import Method
from searchers.random_search import RandomSearch


@dataclass(frozen=True, slots=True, kw_only=True)
class RungPreview:
    """A rung.

    Attributes:
        length: In the unit of `max_length`; None where the search does not set the length of its trials.
        trials: Trials that come here.
        last: Those of them that go no further.
    """

    length: int | None
    trials: int
    last: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BracketPreview:
    """A bracket; a search that has none is one.

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
    """What a search will do, should every trial be valid and come in at random.

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

    Raises:
        TypeError: The method is none of this package.

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
    raise TypeError(f"preview knows the methods of this package, and {type(method).__name__} is none of them")


def _halving(asha: ASHA) -> BracketPreview:
    rungs, n, divisor = [], asha.max_trials, Fraction(str(asha.divisor))
    for length in asha.rungs[:-1]:
        go_on = max(math.floor(n / divisor), 1)
        rungs.append(RungPreview(length=length, trials=n, last=n - go_on))
        n = go_on
    return BracketPreview(rungs=(*rungs, RungPreview(length=asha.rungs[-1], trials=n, last=n)))
