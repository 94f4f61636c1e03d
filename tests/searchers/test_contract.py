"""Every method keeps the contract that `searchers.testing` checks, and the checks catch methods that don't."""

from __future__ import annotations

import pytest

from searchers import ASHA, RandomSearch, Reported, Single, Stop
from searchers.events import Action, Event
from searchers.testing import CHECKS, Make, check_creations_are_bounded, check_method

METHODS: dict[str, tuple[Make, int]] = {
    "single": (lambda: Single(), 1 + 16),
    "single with a length": (lambda: Single(max_length=5, max_invalid=2), 1 + 2),
    "random": (lambda: RandomSearch(max_trials=12, max_concurrent_trials=3, max_invalid=6), 12 + 6),
    "random without a limit": (lambda: RandomSearch(max_trials=9, max_concurrent_trials=0, max_length=4), 9 + 36),
    "asha": (lambda: ASHA(max_trials=16, max_length=16, num_rungs=3, max_concurrent_trials=4), 16 + 64),
    "asha, one rung": (lambda: ASHA(max_trials=6, max_length=9, num_rungs=1, max_invalid=0), 6),
    "asha, equal rungs": (lambda: ASHA(max_trials=12, max_length=10, num_rungs=5, max_invalid=3), 12 + 3),
    "asha, fractional": (
        lambda: ASHA(max_trials=20, max_length=30, num_rungs=4, divisor=1.5, max_concurrent_trials=0),
        20 + 80,
    ),
}


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("name", METHODS)
def test_method_keeps_the_contract(name: str, seed: int) -> None:
    make, max_creations = METHODS[name]
    check_method(make, max_creations=max_creations, seeds=[seed])


class Forgetful(ASHA):
    """Leaves its rungs out of its state."""

    def dump(self) -> dict[str, object]:
        return super().dump() | {"rungs": [[] for _ in self.rungs]}


class Eager(ASHA):
    """Stops a trial twice, and a successor comes each time."""

    def on(self, event: Event) -> list[Action]:
        actions = super().on(event)
        if actions or not isinstance(event, Reported):
            return actions
        return [Stop(trial=event.trial)]


@pytest.mark.parametrize("broken", [Forgetful, Eager])
def test_contract_catches_a_broken_method(broken: type[ASHA]) -> None:
    def make() -> ASHA:
        return broken(max_trials=12, max_length=16, num_rungs=3, max_concurrent_trials=3)

    caught = 0
    for check in CHECKS:
        try:
            check(make, 0)
        except (AssertionError, KeyError):
            caught += 1
    assert caught


def test_contract_catches_more_creations_than_allowed() -> None:
    with pytest.raises(AssertionError, match="at most 7 may be"):
        check_creations_are_bounded(lambda: RandomSearch(max_trials=3, max_invalid=40), 0, max_creations=7)
