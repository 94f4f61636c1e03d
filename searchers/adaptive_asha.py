"""Adaptive ASHA: several ASHAs side by side (brackets) that differ in how early they stop trials.

Source: Li et al., "Hyperband: A Novel Bandit-Based Approach to Hyperparameter Optimization" (arXiv 1603.06560) for the
brackets; their number, sizes and modes are Determined's `adaptive_asha`. Deliberate differences: the brackets have
exactly `max_trials` trials together, and their rungs are counted exactly.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Literal

from searchers.asha import ASHA, SuccessiveHalving
from searchers.events import Action, Create, Done, DoneReason, Event
from searchers.method import Fields, check_extension
from searchers.promotion import PromotionASHA
from searchers.rung import rungs_that_fit
from searchers.slots import NEARLY_DONE, TrialCounts

Mode = Literal["aggressive", "standard", "conservative"]
Variant = Literal["stopping", "promotion"]


class AdaptiveASHA:
    """ASHA in several brackets.

    Args:
        max_trials: Trials to create in all brackets, >= 1. Trials with invalid hyperparameters are replaced and don't
            count.
        max_length: Length of a trial that is never stopped, >= 1.
        divisor: Ratio of lengths between rungs, and of trials to those that continue; > 1, may be fractional.
        max_rungs: Most rungs of a bracket, >= 1. There are fewer if the length or the number of trials allows no more.
        mode: One bracket with as many rungs as possible ("aggressive"), or brackets from that number down to half of it
            ("standard") or to one ("conservative").
        bracket_rungs: The rungs of each bracket, instead of `max_rungs` and `mode`, each >= 1, in any order.
        max_concurrent_trials: Most trials at a time, in all brackets together, as in `ASHA`; at least one per bracket.
            0 = in each bracket as many as the last one has trials, and at least `divisor`.
        variant: What happens at a rung: "stopping" (`ASHA`) or "promotion" (`PromotionASHA`).
        skip_uninformative_rungs: As in `ASHA`; each bracket learns of its own rungs.
        pareto: As in `ASHA`.

    Attributes:
        brackets: The searches side by side, those with the most rungs first, without brackets that have no trial.

    Raises:
        MethodError: A field is invalid; all are named.

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
        check.whole(1, max_trials=max_trials, max_length=max_length, max_rungs=max_rungs)
        check.above("divisor", divisor, limit=1)
        check.one_of("mode", mode, _MODES)
        given: object = bracket_rungs
        if isinstance(given, list | tuple):
            for place, rungs in enumerate(given):
                check.whole(1, **{f"bracket_rungs[{place}]": rungs})
        else:
            check.fault("bracket_rungs", f"must be a list of integers >= 1, got {given!r}")
        check.whole(0, max_concurrent_trials=max_concurrent_trials)
        check.one_of("variant", variant, _VARIANTS)
        check.done()
        most = rungs_that_fit(length=min(max_length, max_trials), divisor=divisor, at_most=max_rungs)
        wanted = sorted(bracket_rungs, reverse=True) or bracket_rungs_of(mode, most)
        trials = bracket_trials(max_trials, bracket_weights(wanted, divisor=divisor))
        slots = bracket_slots(max_concurrent_trials, trials, divisor=divisor)
        self._weights = bracket_weights([b for b, n in zip(wanted, trials, strict=True) if n], divisor=divisor)
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
            for rungs, n, concurrent in zip(wanted, trials, slots, strict=True)
            if n
        )
        self.pareto = pareto
        self._counts = TrialCounts(max_trials)
        for bracket in self.brackets:
            bracket.share(self._counts)
        self._bracket_of: list[int] = []  # of each trial
        self._outcomes: list[DoneReason | None] = [None for _ in self.brackets]

    @property
    def rungs(self) -> tuple[int, ...]:
        """Lengths of the longest bracket's rungs, ascending; every other bracket has the upper ones of them."""
        return max((bracket.rungs for bracket in self.brackets), key=len)

    @property
    def max_trials(self) -> int:
        return sum(bracket.max_trials for bracket in self.brackets)

    @property
    def created(self) -> int:
        return self._counts.created

    def bracket_of(self, trial: int) -> int:
        return self._bracket_of[trial]

    def start(self) -> list[Action]:
        """The first trials of the first bracket, then of the second, and so on."""
        return [
            action for number, bracket in enumerate(self.brackets) for action in self._joined(number, bracket.start())
        ]

    def on(self, event: Event) -> list[Action]:
        self._counts.check(event.trial)
        number = self._bracket_of[event.trial]
        return self._joined(number, self.brackets[number].on(event))

    def progress(self, trained: Mapping[int, float]) -> float:
        # ASHA's progress does not depend on how far its trials are.
        share = sum(bracket.progress({}) for bracket in self.brackets) / len(self.brackets)
        return min(share, NEARLY_DONE) if None in self._outcomes else 1.0

    def extend(self, *, max_trials: int | None = None, max_length: int | None = None) -> list[Action]:
        """Allow more trials, shared among the same brackets by their weights, or longer ones, in every bracket."""
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
        """A bracket's actions as those of the search, which is done when every bracket is."""
        self._bracket_of += [number for action in actions if isinstance(action, Create)]
        if actions and isinstance(done := actions[-1], Done):
            self._outcomes[number] = done.reason
            actions.pop()
            if None not in self._outcomes:
                actions.append(Done(reason=next(known for known in _OUTCOMES if known in self._outcomes)))
        return actions


_OUTCOMES: tuple[DoneReason, ...] = ("invalid_hp", "completed", "errored", "canceled")
_MODES = ("aggressive", "standard", "conservative")
_VARIANTS: dict[str, type[SuccessiveHalving]] = {"stopping": ASHA, "promotion": PromotionASHA}


def bracket_rungs_of(mode: Mode, most: int) -> list[int]:
    """Rungs of each bracket, descending, where a bracket can have `most`.

    >>> [bracket_rungs_of(mode, 5) for mode in ("aggressive", "standard", "conservative")]
    [[5], [5, 4, 3], [5, 4, 3, 2, 1]]
    """
    least = {"aggressive": most, "standard": (most - 1) // 2 + 1, "conservative": 1}[mode]
    return list(range(most, least - 1, -1))


def bracket_weights(rungs: Sequence[int], *, divisor: float) -> list[Fraction]:
    """Shares of the trials, in proportion to divisor ** (rungs - 1) / rungs: each bracket trains about as much."""
    weights = [Fraction(str(divisor)) ** (b - 1) / b for b in rungs]
    return [weight / sum(weights) for weight in weights]


def bracket_trials(max_trials: int, weights: Sequence[Fraction]) -> list[int]:
    """max(floor(weight * max_trials), 1) each, and the remainder to the first.

    If these are too many, the largest bracket (of equals the last) loses a trial, again and again.

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
    """floor(weight * more) each, and the remainder to the first: in an extension no bracket may shrink."""
    trials = [math.floor(weight * more) for weight in weights]
    trials[0] += more - sum(trials)
    return trials


def bracket_slots(max_concurrent_trials: int, trials: Sequence[int], *, divisor: float) -> list[int]:
    """Slots of each bracket: an equal share, at least one; the remainder to the first ones.

    >>> bracket_slots(16, [45, 14, 5], divisor=4), bracket_slots(0, [45, 14, 5], divisor=4)
    ([6, 5, 5], [5, 5, 5])
    """
    n = len(trials)
    if max_concurrent_trials == 0:
        return [max(trials[-1], math.floor(divisor))] * n
    each, rest = divmod(max(max_concurrent_trials, n), n)
    return [each + (bracket < rest) for bracket in range(n)]
