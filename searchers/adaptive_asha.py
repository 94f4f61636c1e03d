"""Adaptive ASHA: several ASHAs side by side (brackets) that differ in how early they stop trials.

Brackets are from Li et al., "Hyperband: A Novel Bandit-Based Approach to Hyperparameter Optimization" (arXiv
1603.06560); their number, sizes and modes are those of Determined's `adaptive_asha`. There are two deliberate
differences: the brackets have exactly `max_trials` trials in total, and the number of rungs is computed exactly.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Literal

from searchers.asha import ASHA, SuccessiveHalving
from searchers.asha_promotion import PromotionASHA
from searchers.events import Action, Create, Done, DoneReason, Event, Requested
from searchers.method import MAX_TRIALS, Fields, check_extension
from searchers.rung import rungs_that_fit
from searchers.slots import MAX_CONCURRENT, NEARLY_DONE, TrialCounts, num_slots

Mode = Literal["aggressive", "standard", "conservative"]
Variant = Literal["stopping", "promotion"]


class AdaptiveASHA:
    """ASHA in several brackets.

    Args:
        max_trials: Number of trials in all brackets together, >= 1. Trials with invalid hyperparameters are replaced
            and don't count.
        max_length: Length of a trial that is never stopped, >= 1.
        divisor: Ratio of the lengths of neighbouring rungs; one in `divisor` trials continues. > 1, may be fractional.
        max_rungs: Maximum number of rungs of a bracket, >= 1. Short lengths or few trials allow fewer.
        mode: "aggressive": one bracket with as many rungs as possible. "standard": brackets from that number of rungs
            down to half of it. "conservative": down to one.
        bracket_rungs: Number of rungs of each bracket, >= 1, in any order; replaces `max_rungs` and `mode`.
        max_concurrent_trials: Maximum number of concurrent trials in all brackets together, as in `ASHA`; at least one
            per bracket. 0 = in each bracket as many as the last bracket has trials, and at least `divisor`.
        variant: "stopping" (`ASHA`) or "promotion" (`PromotionASHA`).
        skip_uninformative_rungs: As in `ASHA`; each bracket estimates the correlations of its own rungs.
        pareto: As in `ASHA`.

    Attributes:
        brackets: One ASHA per bracket, those with the most rungs first; brackets without trials are left out.

    Raises:
        MethodError: At least one argument is invalid; the message names each.

    >>> adaptive = AdaptiveASHA(max_trials=64, max_length=64)
    >>> [(bracket.rungs, bracket.max_trials) for bracket in adaptive.brackets]
    [((1, 4, 16, 64), 45), ((4, 16, 64), 14), ((16, 64), 5)]
    """

    def __init__(
        self,
        *,
        max_trials: int,
        max_length: int,
        divisor: float = 4,
        max_rungs: int = 5,
        mode: Mode = "standard",
        bracket_rungs: Sequence[int] = (),
        max_concurrent_trials: int = 16,
        variant: Variant = "stopping",
        skip_uninformative_rungs: bool = False,
        pareto: bool = False,
    ) -> None:
        check = Fields()
        check.integers(1, max_trials=max_trials, max_length=max_length, max_rungs=max_rungs)
        check.above("divisor", divisor, limit=1)
        check.one_of("mode", mode, _MODES)
        unchecked: object = bracket_rungs
        if isinstance(unchecked, list | tuple):
            for place, rungs in enumerate(unchecked):
                check.integers(1, **{f"bracket_rungs[{place}]": rungs})
        else:
            check.fault("bracket_rungs", f"must be a list of integers >= 1, got {unchecked!r}")
        check.integers(0, max_concurrent_trials=max_concurrent_trials)
        check.one_of("variant", variant, _VARIANTS)
        check.raise_faults()
        fitting = rungs_that_fit(length=min(max_length, max_trials), divisor=divisor, at_most=max_rungs)
        num_rungs = sorted(bracket_rungs, reverse=True) or bracket_rungs_of(mode, fitting)
        trials = bracket_trials(max_trials, bracket_weights(num_rungs, divisor=divisor))
        slots = bracket_slots(max_concurrent_trials, trials, divisor=divisor)
        self._weights = bracket_weights([b for b, n in zip(num_rungs, trials, strict=True) if n], divisor=divisor)
        kind = _VARIANTS[variant]
        self.brackets = tuple(
            kind(
                max_trials=n,
                max_length=max_length,
                num_rungs=rungs,
                divisor=divisor,
                max_concurrent_trials=concurrent,
                skip_uninformative_rungs=skip_uninformative_rungs,
                pareto=pareto,
            )
            for rungs, n, concurrent in zip(num_rungs, trials, slots, strict=True)
            if n
        )
        self.pareto = pareto
        self._counts = TrialCounts(max_trials)
        for bracket in self.brackets:
            bracket.share(self._counts)
        self._bracket_of: list[int] = []  # by trial number
        self._outcomes: list[DoneReason | None] = [None for _ in self.brackets]

    @property
    def rungs(self) -> tuple[int, ...]:
        """Rung lengths of the bracket with the most rungs, ascending; the other brackets lack the lowest ones."""
        return max((bracket.rungs for bracket in self.brackets), key=len)

    @property
    def max_trials(self) -> int:
        """Number of trials in all brackets together."""
        return sum(bracket.max_trials for bracket in self.brackets)

    @property
    def created(self) -> int:
        """Number of trials created so far."""
        return self._counts.created

    def bracket_of(self, trial: int) -> int:
        """Index in `brackets` of the trial's bracket."""
        return self._bracket_of[trial]

    def limit_points(self, points: int) -> None:
        """Limit the search to this many trials, as its space has no more points."""
        if points < self.max_trials:
            for bracket, trials in zip(self.brackets, bracket_trials(points, self._weights), strict=True):
                bracket.limit_points(trials)
        self._counts.num_points = points  # of all brackets together

    def start(self) -> list[Action]:
        """Create the first trials, bracket by bracket; in turn if the search has no end, and may end at any time."""
        brackets = list(enumerate(self.brackets))
        if self.max_trials < MAX_TRIALS:
            return [action for number, bracket in brackets for action in self._joined(number, bracket.start())]
        actions: list[Action] = []
        while turn := [action for number, each in brackets for action in self._joined(number, each.create_one())]:
            actions += turn
        return actions

    def on(self, event: Event) -> list[Action]:
        """Return the actions of the event's bracket."""
        self._counts.check(event.trial)
        number = self._bracket_of[event.trial]
        return self._joined(number, self.brackets[number].on(event))

    def requested(self, request: Requested) -> list[Action]:
        """Create the trial in its source's bracket, or in the first one."""
        number = 0 if request.source is None else self._bracket_of[request.source.trial]
        self._outcomes[number] = None
        return self._joined(number, self.brackets[number].requested(request))

    def progress(self, trained: Mapping[int, float]) -> float:
        """Return the share of the search that is done, from 0 to 1."""
        # ASHA's progress does not depend on its trials' lengths.
        share = sum(bracket.progress({}) for bracket in self.brackets) / len(self.brackets)
        return min(share, NEARLY_DONE) if None in self._outcomes else 1.0

    def extend(self, *, max_trials: int | None = None, max_length: int | None = None) -> list[Action]:
        """Add trials, shared among the brackets by their weights, or increase the length in every bracket.

        Raises:
            MethodError: The budget does not grow. The search is unchanged.
        """
        check_extension(max_trials=(max_trials, self.max_trials), max_length=(max_length, self.rungs[-1]))
        trials, length = max_trials or self.max_trials, max_length or self.rungs[-1]
        more = extra_trials(trials - self.max_trials, self._weights)
        self._counts.extend(trials)
        self._outcomes = [None for _ in self.brackets]
        actions: list[Action] = []
        for number, bracket in enumerate(self.brackets):
            actions += self._joined(number, bracket.extend_to(bracket.max_trials + more[number], length))
        return actions

    def _joined(self, number: int, actions: list[Action]) -> list[Action]:
        """Turn a bracket's actions into those of the search, which is done when all brackets are."""
        self._bracket_of += [number for action in actions if isinstance(action, Create)]
        if actions and isinstance(done := actions[-1], Done):
            self._outcomes[number] = done.reason
            actions.pop()
            if None not in self._outcomes:
                actions.append(Done(reason=next(known for known in _OUTCOMES if known in self._outcomes)))
        return actions


_OUTCOMES: tuple[DoneReason, ...] = ("invalid_hp", "out_of_memory", "completed", "errored", "canceled")
_MODES = ("aggressive", "standard", "conservative")
_VARIANTS: dict[str, type[SuccessiveHalving]] = {"stopping": ASHA, "promotion": PromotionASHA}


def bracket_rungs_of(mode: Mode, max_rungs: int) -> list[int]:
    """Return each bracket's number of rungs, descending.

    >>> [bracket_rungs_of(mode, 5) for mode in ("aggressive", "standard", "conservative")]
    [[5], [5, 4, 3], [5, 4, 3, 2, 1]]
    """
    min_rungs = {"aggressive": max_rungs, "standard": (max_rungs - 1) // 2 + 1, "conservative": 1}[mode]
    return list(range(max_rungs, min_rungs - 1, -1))


def bracket_weights(rungs: Sequence[int], *, divisor: float) -> list[Fraction]:
    """Return shares proportional to divisor ** (rungs - 1) / rungs, so that all brackets train about equally long."""
    weights = [Fraction(str(divisor)) ** (b - 1) / b for b in rungs]
    return [weight / sum(weights) for weight in weights]


def bracket_trials(max_trials: int, weights: Sequence[Fraction]) -> list[int]:
    """Return max(floor(weight * max_trials), 1) per bracket; the first bracket also gets the remainder.

    While the sum is too large, the largest bracket (the last one, if several are equal) loses a trial.

    >>> bracket_trials(2, [Fraction(1, 3)] * 3)
    [1, 1, 0]
    """
    trials = [max(math.floor(weight * max_trials), 1) for weight in weights]
    trials[0] += max(max_trials - sum(trials), 0)
    for _ in range(sum(trials) - max_trials):
        largest = max(range(len(trials)), key=lambda bracket: (trials[bracket], bracket))
        trials[largest] -= 1
    return trials


def extra_trials(more: int, weights: Sequence[Fraction]) -> list[int]:
    """Return floor(weight * more) per bracket, with the remainder in the first: an extension shrinks no bracket."""
    trials = [math.floor(weight * more) for weight in weights]
    trials[0] += more - sum(trials)
    return trials


def bracket_slots(max_concurrent_trials: int, trials: Sequence[int], *, divisor: float) -> list[int]:
    """Return each bracket's number of slots: an equal share, at least one; the first brackets get the remainder.

    >>> bracket_slots(16, [45, 14, 5], divisor=4), bracket_slots(0, [45, 14, 5], divisor=4)
    ([6, 5, 5], [5, 5, 5])
    """
    n = len(trials)
    if max_concurrent_trials == 0:
        return [min(max(trials[-1], math.floor(divisor)), MAX_CONCURRENT // n)] * n
    each, rest = divmod(max(num_slots(max_concurrent_trials), n), n)
    return [each + (bracket < rest) for bracket in range(n)]
