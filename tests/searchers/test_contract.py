"""Every method keeps the contract that `searchers.testing` checks, and the checks catch methods that don't."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any, cast

import pytest

from searchers import (
    ASHA,
    AdaptiveASHA,
    Create,
    Exited,
    Grid,
    Method,
    PromotionASHA,
    RandomSearch,
    Reported,
    Resume,
    Single,
    Started,
    Stop,
)
from searchers.events import Action, Event
from searchers.histories import OBJECTIVES, play, send
from searchers.search import Record, Search
from searchers.space import parse
from searchers.testing import (
    Make,
    check_actions_name_trials_that_can_obey,
    check_creations_are_bounded,
    check_equal_events_give_equal_actions,
    check_extensions,
    check_method,
    check_progress_never_falls,
    check_repeated_and_late_events_change_nothing,
)
from tests.searchers.states import state

SPACE = parse({"x": {"type": "double", "minval": 0, "maxval": 1}})


def case(kind: Callable[..., Method], most: int, **fields: Any) -> tuple[Make, int]:
    """A method, and the most trials that it may create."""
    return lambda: kind(**fields), most


METHODS: dict[str, tuple[Make, int]] = {
    "single": case(Single, 1 + 16),
    "single with a length": case(Single, 1 + 2, max_length=5, max_invalid=2),
    "random": case(RandomSearch, 12 + 6, max_trials=12, max_concurrent_trials=3, max_invalid=6),
    "random without a limit": case(RandomSearch, 9 + 36, max_trials=9, max_concurrent_trials=0, max_length=4),
    "grid": case(Grid, 10, points=10, max_concurrent_trials=3),
    "grid with a length": case(Grid, 5, points=5, max_concurrent_trials=0, max_length=6),
    "asha": case(ASHA, 16 + 6, max_trials=16, max_length=16, num_rungs=3, max_concurrent_trials=4, max_invalid=6),
    "asha, one rung": case(ASHA, 6, max_trials=6, max_length=9, num_rungs=1, max_invalid=0),
    "asha, equal rungs": case(ASHA, 12 + 3, max_trials=12, max_length=10, num_rungs=5, max_invalid=3),
    "asha, fractional": case(
        ASHA, 6 + 24, max_trials=6, max_length=30, num_rungs=4, divisor=1.5, max_concurrent_trials=0
    ),
    "promotion": case(
        PromotionASHA, 16 + 6, max_trials=16, max_length=16, num_rungs=3, max_concurrent_trials=4, max_invalid=6
    ),
    "promotion, divisor 2": case(
        PromotionASHA, 18 + 4, max_trials=18, max_length=8, num_rungs=4, divisor=2, max_invalid=4
    ),
    "promotion, one rung": case(PromotionASHA, 6, max_trials=6, max_length=9, num_rungs=1, max_invalid=0),
    "promotion, equal rungs": case(PromotionASHA, 12 + 3, max_trials=12, max_length=10, num_rungs=5, max_invalid=3),
    "promotion, fractional": case(
        PromotionASHA, 6 + 24, max_trials=6, max_length=30, num_rungs=4, divisor=1.5, max_concurrent_trials=0
    ),
    "promotion, one at a time": case(
        PromotionASHA, 9 + 3, max_trials=9, max_length=8, num_rungs=3, divisor=2, max_concurrent_trials=1, max_invalid=3
    ),
    "asha, skipping rungs": case(
        ASHA, 24 + 6, max_trials=24, max_length=16, num_rungs=3, divisor=2, max_invalid=6, skip_uninformative_rungs=True
    ),
    "promotion, skipping rungs": case(
        PromotionASHA,
        24 + 6,
        max_trials=24,
        max_length=16,
        num_rungs=3,
        divisor=2,
        max_invalid=6,
        skip_uninformative_rungs=True,
    ),
    "adaptive, skipping rungs": case(
        AdaptiveASHA,
        30 + 4,
        max_trials=30,
        max_length=27,
        divisor=3,
        variant="promotion",
        max_invalid=4,
        skip_uninformative_rungs=True,
    ),
    "asha, several objectives": case(
        ASHA,
        16 + 6,
        max_trials=16,
        max_length=16,
        num_rungs=3,
        divisor=2,
        max_concurrent_trials=4,
        max_invalid=6,
        pareto=True,
    ),
    "promotion, several objectives": case(
        PromotionASHA,
        16 + 6,
        max_trials=16,
        max_length=16,
        num_rungs=3,
        divisor=2,
        max_concurrent_trials=4,
        max_invalid=6,
        pareto=True,
    ),
    "adaptive, several objectives": case(
        AdaptiveASHA,
        20 + 4,
        max_trials=20,
        max_length=16,
        max_concurrent_trials=6,
        max_invalid=4,
        variant="promotion",
        pareto=True,
    ),
    "adaptive": case(AdaptiveASHA, 20 + 4, max_trials=20, max_length=16, max_concurrent_trials=6, max_invalid=4),
    "adaptive, conservative": case(
        AdaptiveASHA, 20 + 2, max_trials=20, max_length=27, divisor=3, mode="conservative", max_invalid=2
    ),
    "adaptive, brackets without trials": case(
        AdaptiveASHA, 2 + 2, max_trials=2, max_length=9, bracket_rungs=[3, 2, 1], max_invalid=2
    ),
    "adaptive, promotion": case(
        AdaptiveASHA,
        20 + 4,
        max_trials=20,
        max_length=64,
        divisor=2.5,
        variant="promotion",
        max_concurrent_trials=5,
        max_invalid=4,
    ),
    "adaptive, promotion, no limit": case(
        AdaptiveASHA,
        12 + 3,
        max_trials=12,
        max_length=8,
        divisor=2,
        mode="aggressive",
        variant="promotion",
        max_concurrent_trials=0,
        max_invalid=3,
    ),
}


@pytest.mark.parametrize("name", METHODS)
def test_method_keeps_the_contract(name: str) -> None:
    make, max_creations = METHODS[name]
    check_method(make, max_creations=max_creations, seeds=[0])


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(2, 11))])
@pytest.mark.parametrize("name", METHODS)
def test_method_keeps_the_contract_on_many_histories(name: str, seed: int) -> None:
    make, max_creations = METHODS[name]
    check_method(make, max_creations=max_creations, seeds=[seed])


@pytest.mark.parametrize("name", METHODS)
def test_a_replayed_method_holds_the_same_state(name: str) -> None:
    """The contract compares what methods do; these two are also the same inside."""
    make, _ = METHODS[name]
    log: list[Record] = []
    objectives = OBJECTIVES if "several objectives" in name else None
    search = Search(make(), SPACE, seed=0, smaller_is_better=True, log=log.append, objectives=objectives)
    play(search, 0, length=search.method.rungs[-1] if search.method.rungs else 16, normalised=False)
    records = json.loads(json.dumps(log))
    again = Search.replay(
        records, make(), SPACE, seed=0, smaller_is_better=True, log=lambda record: None, objectives=objectives
    )
    assert state(again.method) == state(search.method) != state(make())


HALVING = [name for name in METHODS if name.startswith(("asha", "promotion", "adaptive"))]


def ranked(method: Method) -> list[dict[int, float]]:
    """The values of every rung of every bracket, by trial."""
    brackets = method.brackets if isinstance(method, AdaptiveASHA) else (method,)
    return [dict(values) for bracket in brackets for values in cast("ASHA", bracket).ranked]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", HALVING)
def test_no_trial_is_ranked_twice_in_a_rung(name: str, seed: int) -> None:
    """A value that was filed stays, until its trial turns out to be invalid; so no second one takes its place."""
    make, _ = METHODS[name]
    history = play(method := make(), seed, length=method.rungs[-1])
    method = make()
    method.start()
    before = ranked(method)
    count = 0
    for event, _ in history.steps:
        send(method, event)
        now = ranked(method)
        invalid = isinstance(event, Exited) and event.reason == "invalid_hp"
        for old, new in zip(before, now, strict=True):
            assert len(old.keys() - new.keys()) <= invalid, "only an invalid trial leaves a rung"
            assert all(new[trial] == value for trial, value in old.items() if trial in new), "ranked anew"
            count += len(new.keys() - old.keys())
        before = now
    assert count > 0


@pytest.mark.parametrize("name", [name for name in HALVING if "without" not in name])
def test_no_trial_passes_a_rung_with_a_value_that_is_not_finite(name: str) -> None:
    """All values are infinite: a trial reports once, at the rung it came to, and is stopped."""
    make, _ = METHODS[name]
    method = make()
    shortest = method.rungs[0]
    pending = [action.trial for action in method.start() if isinstance(action, Create)]
    while pending:
        trial = pending.pop()
        reported = method.on(Reported(trial=trial, step=method.rungs[-1] - 1, value=math.inf))
        if shortest < method.rungs[-1] and Stop(trial=trial) not in reported:
            # A bracket whose only rung is the top one, which a trial reaches at its end.
            assert isinstance(method, AdaptiveASHA)
            assert reported == []
        answer = method.on(Exited(trial=trial, reason="stopped" if reported else "completed"))
        assert not any(isinstance(action, Resume) for action in [*reported, *answer])
        pending += [action.trial for action in [*reported, *answer] if isinstance(action, Create)]
    assert method.progress({}) == 1


class Shared(ASHA):
    """Keeps a part of its state in the class, where a replay does not restore it."""

    events = 0

    def on(self, event: Event) -> list[Action]:
        Shared.events += 1
        actions = super().on(event)
        return actions[::-1] if Shared.events > 40 else actions


class Counting(ASHA):
    """Ignores every fifth event, and late ones count."""

    events = 0

    def on(self, event: Event) -> list[Action]:
        self.events += 1
        return super().on(event) if self.events % 5 or isinstance(event, Exited) else []


class Eager(ASHA):
    """Stops a trial twice, and a successor comes each time."""

    def on(self, event: Event) -> list[Action]:
        actions = super().on(event)
        if actions or not isinstance(event, Reported):
            return actions
        return [Stop(trial=event.trial)]


class Shrinking(ASHA):
    """Says that less is done when a trial ends."""

    ended = 0

    def on(self, event: Event) -> list[Action]:
        self.ended += isinstance(event, Exited)
        return super().on(event)

    def progress(self, trained: Mapping[int, float]) -> float:
        done = super().progress(trained)
        return done if done == 1 else done / (1 + self.ended)


class Impatient(PromotionASHA):
    """Resumes a trial that was not paused."""

    def on(self, event: Event) -> list[Action]:
        actions = super().on(event)
        return [*actions, Resume(trial=event.trial)] if isinstance(event, Started) else actions


class Deaf(ASHA):
    """Takes an extension and goes on as before."""

    def extend(self, *, max_trials: int | None = None, max_length: int | None = None) -> list[Action]:
        super().extend(max_trials=max_trials, max_length=max_length)
        return []


@pytest.mark.parametrize(
    ("broken", "check", "message"),
    [
        (Shared, check_equal_events_give_equal_actions, "seed 0: .* led to other actions the second time"),
        (Counting, check_repeated_and_late_events_change_nothing, "led to other actions after late or repeated events"),
        (Eager, check_actions_name_trials_that_can_obey, "names a trial that has ended or was stopped"),
        (Shrinking, check_progress_never_falls, "progress fell, or left 0..1: from "),
        (Impatient, check_actions_name_trials_that_can_obey, "names a trial that is not paused"),
    ],
)
def test_contract_catches_a_broken_method(broken: type[ASHA], check: Callable[[Make, int], None], message: str) -> None:
    def make() -> ASHA:
        return broken(max_trials=12, max_length=16, num_rungs=3, max_concurrent_trials=3)

    with pytest.raises(AssertionError, match=message):
        check(make, 0)


def test_contract_catches_an_extension_that_does_nothing() -> None:
    with pytest.raises(AssertionError, match="no trial is pending or running"):
        check_extensions(lambda: Deaf(max_trials=4, max_length=16, num_rungs=3), 0, max_creations=20)


def test_contract_catches_more_creations_than_allowed() -> None:
    with pytest.raises(AssertionError, match="at most 7 may be"):
        check_creations_are_bounded(lambda: RandomSearch(max_trials=3, max_invalid=40), 0, max_creations=7)
