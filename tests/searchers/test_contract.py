"""Every method obeys the contract in `searchers.testing`, and its checks catch methods that don't."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, cast

import pytest

from searchers import (
    ASHA,
    AdaptiveASHA,
    Auto,
    Create,
    Done,
    Exited,
    Grid,
    Method,
    MethodError,
    PromotionASHA,
    RandomSearch,
    Reported,
    Resume,
    Single,
    Started,
    Stop,
)
from searchers.events import REPLACED, Action, DoneReason, Event, Reason
from searchers.search import Record
from searchers.testing import OBJECTIVES, Make, check_method, play, send
from tests.searchers.helpers import leave, new_search, report, state, to_run


def methods(kind: Callable[..., Method], **cases: tuple[Any, ...]) -> dict[str, tuple[Make, int]]:
    """Return methods by name, each with its maximum number of creations: 4 replacements per trial, and at least 16."""
    found: dict[str, tuple[Make, int]] = {}
    for name, (trials, fields) in cases.items():
        budget = {} if kind is Single else {"points": trials} if kind is Grid else {"max_trials": trials}
        most = trials if kind is Grid else trials + max(16, 4 * trials)
        found[f"{kind.__name__} {name}"] = (lambda given=fields | budget: kind(**given)), most
    return found


def halving(length: int, rungs: int, concurrent: int = 16, divisor: float = 4, **fields: Any) -> dict[str, Any]:
    return {"max_length": length, "num_rungs": rungs, "max_concurrent_trials": concurrent, "divisor": divisor, **fields}


BOTH = {
    "plain": (16, halving(16, 3, 4)),
    "one_rung": (6, halving(9, 1)),
    "equal_rungs": (12, halving(10, 5)),
    "fractional": (6, halving(30, 4, 0, 1.5)),
    "skipping_rungs": (24, halving(16, 3, divisor=2, skip_uninformative_rungs=True)),
    "several_objectives": (16, halving(16, 3, 4, 2, pareto=True)),
}
PROMOTION = {"divisor_2": (18, halving(8, 4, divisor=2)), "one_at_a_time": (9, halving(8, 3, 1, 2))}
PROMOTES: dict[str, Any] = {"variant": "promotion"}
ADAPTIVE: dict[str, tuple[int, dict[str, Any]]] = {
    "plain": (20, {"max_length": 16, "max_concurrent_trials": 6}),
    "conservative": (20, {"max_length": 27, "divisor": 3, "mode": "conservative"}),
    "brackets_without_trials": (2, {"max_length": 9, "bracket_rungs": [3, 2, 1]}),
    "promotion": (20, {"max_length": 64, "divisor": 2.5, "max_concurrent_trials": 5, **PROMOTES}),
    "promotion_no_limit": (
        12,
        {"max_length": 8, "divisor": 2, "mode": "aggressive", "max_concurrent_trials": 0, **PROMOTES},
    ),
    "skipping_rungs": (30, {"max_length": 27, "divisor": 3, "skip_uninformative_rungs": True, **PROMOTES}),
    "several_objectives": (20, {"max_length": 16, "max_concurrent_trials": 6, "pareto": True, **PROMOTES}),
}
METHODS = {
    **methods(Single, plain=(1, {}), with_a_length=(1, {"max_length": 5})),
    **methods(
        RandomSearch,
        plain=(12, {"max_concurrent_trials": 3}),
        without_a_limit=(9, {"max_concurrent_trials": 0, "max_length": 4}),
    ),
    **methods(
        Grid, plain=(10, {"max_concurrent_trials": 3}), with_a_length=(5, {"max_concurrent_trials": 0, "max_length": 6})
    ),
    **methods(ASHA, **BOTH),
    **methods(PromotionASHA, **BOTH, **PROMOTION),
    **methods(AdaptiveASHA, **ADAPTIVE),
    **methods(
        Auto,
        plain=(20, {"max_length": 9, "max_concurrent_trials": 4}),
        several_objectives=(20, {"max_length": 9, "pareto": True}),
    ),
}
HALVING = [name for name in METHODS if "ASHA" in name or name.startswith("Auto")]


QUICK = [name for name in METHODS if name not in HALVING or re.search("one_|plain|of_several|conservative", name)]


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in METHODS]
)
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
    """The contract compares actions; the states of these two methods are also equal."""
    make, _ = METHODS[name]
    log: list[Record] = []
    objectives = OBJECTIVES if "several_objectives" in name else None
    search = new_search(make(), log=log, objectives=objectives)
    play(search, 0)
    again = new_search(make(), objectives=objectives).replay(json.loads(json.dumps(log)))
    assert state(again.method) == state(search.method) != state(make())


def ranked(method: Method) -> list[dict[int, float]]:
    """Return the values of every rung of every bracket, by trial."""
    brackets = method.brackets if isinstance(method, AdaptiveASHA) else (method,)
    return [dict(values) for bracket in brackets for values in cast("ASHA", bracket).ranked]


@pytest.mark.parametrize("name", HALVING)
def test_no_trial_is_ranked_twice_in_a_rung(name: str) -> None:
    """A value stays at its rung until its trial is replaced; no second value replaces it."""
    make, _ = METHODS[name]
    for seed in range(3):
        history, method, count = play(make(), seed), make(), 0
        method.start()
        before = ranked(method)
        for event, _ in history.steps:
            send(method, event)
            now = ranked(method)
            replaced = isinstance(event, Exited) and event.reason in REPLACED
            for old, new in zip(before, now, strict=True):
                assert len(old.keys() - new.keys()) <= replaced, "only a replaced trial leaves a rung"
                assert all(new[trial] == value for trial, value in old.items() if trial in new), "ranked anew"
                count += len(new.keys() - old.keys())
            before = now
        assert count > 0


@pytest.mark.parametrize("name", [name for name in HALVING if "without" not in name])
def test_no_trial_passes_a_rung_with_a_value_that_is_not_finite(name: str) -> None:
    """All values are infinite, so a trial reports once, at its first rung, and is stopped."""
    make, _ = METHODS[name]
    method = make()
    shortest = method.rungs[0]
    pending = to_run(method.start())
    while pending:
        trial = pending.pop()
        reported = report(method, trial, method.rungs[-1] - 1, math.inf)
        if shortest < method.rungs[-1] and Stop(trial=trial) not in reported:
            # In a bracket with only the top rung, a trial reaches it at its end.
            assert isinstance(method, AdaptiveASHA)
            assert reported == []
        answer = method.on(Exited(trial=trial, reason="stopped" if reported else "completed"))
        assert not any(isinstance(action, Resume) for action in [*reported, *answer])
        pending += [action.trial for action in [*reported, *answer] if isinstance(action, Create)]
    assert method.progress({}) == 1


class Shared(ASHA):
    """A method with state in the class, which a replay does not restore."""

    events = 0

    def on(self, event: Event) -> list[Action]:
        Shared.events += 1
        actions = super().on(event)
        return actions[::-1] if Shared.events > 40 else actions


class Counting(ASHA):
    """A method that ignores every seventh event if it is a report, and counts late ones."""

    events = 0

    def on(self, event: Event) -> list[Action]:
        self.events += 1
        return super().on(event) if self.events % 7 or not isinstance(event, Reported) else []


class Eager(ASHA):
    """A method that stops a trial twice, creating a successor each time."""

    def on(self, event: Event) -> list[Action]:
        actions = super().on(event)
        if actions or not isinstance(event, Reported):
            return actions
        return [Stop(trial=event.trial)]


class Shrinking(ASHA):
    """A method whose progress decreases when a trial ends."""

    ended = 0

    def on(self, event: Event) -> list[Action]:
        self.ended += isinstance(event, Exited)
        return super().on(event)

    def progress(self, trained: Mapping[int, float]) -> float:
        done = super().progress(trained)
        return done if done == 1 else done / (1 + self.ended)


class Impatient(PromotionASHA):
    """A method that resumes a trial that was not paused."""

    def on(self, event: Event) -> list[Action]:
        actions = super().on(event)
        return [*actions, Resume(trial=event.trial)] if isinstance(event, Started) else actions


class Deaf(ASHA):
    """A method that accepts an extension and ignores it."""

    def extend(self, *, max_trials: int | None = None, max_length: int | None = None) -> list[Action]:
        super().extend(max_trials=max_trials, max_length=max_length)
        return []


@pytest.mark.parametrize(
    ("broken", "most", "message"),
    [
        (Shared, 60, "seed 0: .* led to other actions the second time"),
        (Counting, 60, "is late or repeated, but|led to other actions after late, repeated or illegal events"),
        (Eager, 60, "names a trial that has ended or was stopped"),
        (Shrinking, 60, "progress fell, or left 0..1: from "),
        (Impatient, 60, "names a trial that is not paused"),
        (Deaf, 60, "no trial is pending or running"),
        (ASHA, 11, "51 trials were created, but at most 11 are allowed"),
    ],
)
def test_contract_catches_a_broken_method(broken: type[ASHA], most: int, message: str) -> None:
    def make() -> ASHA:
        return broken(max_trials=12, max_length=16, num_rungs=3, max_concurrent_trials=3)

    with pytest.raises(AssertionError, match=message):
        check_method(make, max_creations=most, seeds=[0])


def halved(kind: type[ASHA] | type[AdaptiveASHA], trials: int, **fields: Any) -> Method:
    return kind(max_trials=trials, max_length=16, max_concurrent_trials=4, **fields)


@pytest.mark.parametrize(
    ("method", "reasons", "outcome"),
    [
        (halved(ASHA, 4, num_rungs=3), ["errored"] * 4, "errored"),
        (halved(ASHA, 4, num_rungs=3), ["canceled"] * 4, "canceled"),
        (halved(ASHA, 4, num_rungs=3), ["errored", "canceled", "canceled", "errored"], "errored"),
        (halved(ASHA, 4, num_rungs=3), ["errored", "errored", "completed", "errored"], "completed"),
        (halved(ASHA, 4, num_rungs=3), ["stopped", "canceled", "errored", "canceled"], "completed"),
        (halved(ASHA, 4, num_rungs=3), ["diverged", "canceled", "errored", "canceled"], "completed"),
        (halved(AdaptiveASHA, 3, bracket_rungs=[2, 1]), ["errored", "canceled", "completed"], "completed"),
        (halved(AdaptiveASHA, 3, bracket_rungs=[2, 1]), ["canceled", "canceled", "errored"], "errored"),
        (halved(AdaptiveASHA, 3, bracket_rungs=[2, 1]), ["canceled", "canceled", "canceled"], "canceled"),
        (Grid(points=2), ["invalid_hp", "invalid_hp"], "invalid_hp"),
        (Grid(points=2), ["invalid_hp", "canceled"], "canceled"),
        (Grid(points=2), ["invalid_hp", "errored"], "errored"),
        (Grid(points=2), ["canceled", "out_of_memory"], "errored"),
        (Grid(points=2), ["invalid_hp", "stopped"], "completed"),
        (Single(), ["errored"], "errored"),
        (Single(), ["out_of_memory"], "errored"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Method) else None,
)
def test_reason_of_done(method: Method, reasons: list[Reason], outcome: DoneReason) -> None:
    assert len(method.start()) == len(reasons)
    *before, last = [leave(method, trial, reason) for trial, reason in enumerate(reasons)]
    assert before == [[]] * len(before)
    assert last == [Done(reason=outcome)]


ZERO: dict[str, Any] = {"max_trials": 0, "max_length": 0, "max_concurrent_trials": -1}
LEAST = {name: f"searcher.{name}: must be an integer >= {given + 1}, got {given}" for name, given in ZERO.items()}


@pytest.mark.parametrize(
    ("kind", "given", "says"),
    [
        (RandomSearch, ZERO, [LEAST["max_trials"], LEAST["max_concurrent_trials"], LEAST["max_length"]]),
        (
            Grid,
            {"points": -1, "max_concurrent_trials": -1, "max_length": 0},
            [
                "searcher.points: must be an integer >= 0, got -1",
                LEAST["max_concurrent_trials"],
                LEAST["max_length"],
            ],
        ),
        (
            ASHA,
            {**ZERO, "max_length": 1.5, "num_rungs": True, "divisor": 1},
            [
                LEAST["max_trials"],
                "searcher.max_length: must be an integer >= 1, got 1.5",
                "searcher.num_rungs: must be an integer >= 1, got True",
                "searcher.divisor: must be > 1, got 1",
                LEAST["max_concurrent_trials"],
            ],
        ),
        (
            AdaptiveASHA,
            {**ZERO, "max_rungs": 0, "divisor": 1, "mode": "bold", "bracket_rungs": [2, 0], "variant": "stop"},
            [
                LEAST["max_trials"],
                LEAST["max_length"],
                "searcher.max_rungs: must be an integer >= 1, got 0",
                "searcher.divisor: must be > 1, got 1",
                "searcher.mode: must be one of aggressive, standard, conservative, got 'bold'",
                "searcher.bracket_rungs[1]: must be an integer >= 1, got 0",
                LEAST["max_concurrent_trials"],
                "searcher.variant: must be one of stopping, promotion, got 'stop'",
            ],
        ),
    ],
)
def test_all_invalid_fields_are_named_at_once(kind: Callable[..., Method], given: Any, says: list[str]) -> None:
    with pytest.raises(MethodError) as caught:
        kind(**given)
    assert str(caught.value).splitlines() == says
