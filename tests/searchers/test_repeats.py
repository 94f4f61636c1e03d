"""The best trials of a search are run again with other seeds; the search itself decides as it does without repeats."""

from __future__ import annotations

from typing import Any

import pytest

from searchers import (
    ASHA,
    AdaptiveASHA,
    Auto,
    Create,
    Done,
    Grid,
    Method,
    MethodError,
    PromotionASHA,
    RandomSearch,
    Repeat,
    Repeats,
    Requested,
    Single,
    Source,
    Started,
    Stop,
)
from searchers.answers import carry_out
from searchers.events import Action, Reason
from searchers.previews import expected, preview
from searchers.records import action_to_json
from searchers.simulate import Curve, simulate
from searchers.testing import check_method
from tests.searchers.helpers import creates, leave, new_search, report

METHODS: dict[str, tuple[Any, int]] = {
    "single": (lambda: Single(max_length=4), 1),
    "random": (lambda: RandomSearch(max_trials=6, max_length=4, max_concurrent_trials=3), 6),
    "grid": (lambda: Grid(points=5), 5),
    "asha": (lambda: ASHA(max_trials=8, max_length=16, num_rungs=3, skip_uninformative_rungs=True), 8),
    "promotion": (lambda: PromotionASHA(max_trials=8, max_length=16, num_rungs=3, divisor=2), 8),
    "adaptive": (lambda: AdaptiveASHA(max_trials=10, max_length=16, max_concurrent_trials=4), 10),
    "auto": (lambda: Auto(max_trials=8, max_length=9), 8),
}


@pytest.mark.parametrize(("name", "concurrent"), [*zip(METHODS, (1, 3, 0, 1, 3, 0, 1), strict=True)])
def test_method_with_repeats_keeps_the_contract(name: str, concurrent: int) -> None:
    make, trials = METHODS[name]
    most = trials + max(16, 4 * trials) + 3 * 2
    check_method(
        lambda: Repeats(make(), seeds=2, top=3, max_concurrent_trials=concurrent),
        max_creations=most,
        seeds=[concurrent],
    )


@pytest.mark.parametrize("name", METHODS)
def test_search_decides_the_same_up_to_its_end(name: str) -> None:
    make, _ = METHODS[name]
    plain, repeated = [list[list[Action]]() for _ in range(2)]
    for method, seen in ((make(), plain), (Repeats(make(), seeds=2, top=3), repeated)):
        seen.append(method.start())

        def watch(time: float, event: Any, actions: list[Action], seen: list[list[Action]] = seen) -> None:
            seen.append(actions)

        search = new_search(make() if seen is plain else Repeats(make(), seeds=2, top=3))
        simulate(search, 4, lambda point: Curve(lambda step: point["x"] / step), reports=range(1, 17), watch=watch)
    assert plain == [*repeated[: len(plain) - 1], plain[-1]]
    assert isinstance(plain[-1][-1], Done)
    assert all(isinstance(action, Create) and action.repeat is not None for action in repeated[len(plain) - 1])


def of(actions: list[Action]) -> list[tuple[int, int]]:
    """The trials that are repeated, and their seeds."""
    return [(each.repeat.trial, each.repeat.seed) for each in actions if isinstance(each, Create) and each.repeat]


def ended(search: Any, trials: int, values: dict[int, float], reasons: dict[int, Reason] | None = None) -> list[Action]:
    """What follows when these trials have reported at step 4, and all have ended."""
    actions: list[Action] = search.start()
    for trial, value in values.items():
        actions += report(search, trial, 4, value)
    for trial in range(trials):
        actions += leave(search, trial, (reasons or {}).get(trial, "completed"))
    return actions[trials:]


def test_repeats_are_created_seed_by_seed_and_then_the_search_is_done() -> None:
    search = Repeats(RandomSearch(max_trials=3), seeds=2, top=2)
    assert of(ended(search, 3, {0: 0.3, 1: 0.1, 2: 0.2})) == [(1, 1), (2, 1), (1, 2), (2, 2)]
    assert search.progress({}) < 1
    assert [leave(search, trial) for trial in (3, 4, 5)] == [[], [], []]
    assert leave(search, 6) == [Done(reason="completed")]
    assert search.progress({}) == 1


def test_no_more_repeats_run_than_trials_of_the_search() -> None:
    search = Repeats(RandomSearch(max_trials=2, max_concurrent_trials=1), seeds=2, top=2, max_concurrent_trials=1)
    assert search.start() == creates(0)
    report(search, 0, 4, 0.2)
    assert leave(search, 0) == creates(1)
    report(search, 1, 4, 0.1)
    order = [of(leave(search, trial)) for trial in range(1, 5)]
    assert order == [[(1, 1)], [(0, 1)], [(1, 2)], [(0, 2)]]
    assert leave(search, 5) == [Done(reason="completed")]


def test_trials_that_failed_diverged_were_canceled_or_never_reported_are_no_finalists() -> None:
    values = {trial: trial / 10 for trial in range(6)}
    reasons: dict[int, Reason] = {0: "errored", 1: "diverged", 2: "canceled", 3: "stopped"}
    search = Repeats(RandomSearch(max_trials=7), seeds=1, top=9)
    assert of(ended(search, 7, values, reasons)) == [(4, 1), (5, 1), (3, 1)]  # 3 did not get to the end


def test_search_without_a_finalist_is_done_at_once() -> None:
    assert ended(Repeats(RandomSearch(max_trials=1), seeds=3, top=1), 1, {}) == [Done(reason="completed")]


def test_longest_trained_trials_come_first() -> None:
    search = Repeats(ASHA(max_trials=3, max_length=4, num_rungs=2, max_concurrent_trials=3), seeds=1, top=2)
    search.start()
    report(search, 0, 1, 0.5)
    assert report(search, 1, 1, 0.7) == [Stop(trial=1)]
    report(search, 1, 2, 0.01)  # the best value of all, after its stop
    leave(search, 1, "stopped")
    report(search, 2, 1, 0.4)
    for trial, value in ((0, 0.3), (2, 0.2)):
        report(search, trial, 4, value)
    leave(search, 0)
    assert of(leave(search, 2)) == [(2, 1), (0, 1)]


def test_fork_is_no_finalist() -> None:
    """Its training can't be repeated from the beginning."""
    search = Repeats(RandomSearch(max_trials=1), seeds=1, top=3)
    search.start()
    report(search, 0, 4, 0.2)
    search.requested(Requested(source=Source(trial=0, step=4)))
    report(search, 1, 8, 0.1)
    leave(search, 1)
    assert of(leave(search, 0)) == [(0, 1)]


def test_failed_repeat_is_not_run_again_and_fails_no_search() -> None:
    search = Repeats(RandomSearch(max_trials=1), seeds=1, top=1)
    ended(search, 1, {0: 0.1})
    assert leave(search, 1, "invalid_hp") == [Done(reason="completed")]


def test_extension_repeats_only_new_finalists() -> None:
    search = Repeats(RandomSearch(max_trials=2), seeds=1, top=2)
    ended(search, 2, {0: 0.2, 1: 0.3})
    assert [leave(search, trial) for trial in (2, 3)] == [[], [Done(reason="completed")]]
    assert search.extend(max_trials=3) == creates(4)
    report(search, 4, 4, 0.1)
    assert of(leave(search, 4)) == [(4, 1)]
    assert leave(search, 5) == [Done(reason="completed")]


def test_extension_while_repeats_run_waits_for_both() -> None:
    search = Repeats(RandomSearch(max_trials=1), seeds=2, top=1, max_concurrent_trials=1)
    ended(search, 1, {0: 0.2})
    assert search.extend(max_trials=2) == creates(2)
    report(search, 2, 4, 0.1)
    assert leave(search, 1) == []  # the other finalist is not known yet
    assert of(leave(search, 2)) == [(2, 1)]


def test_longer_trials_continue_with_their_repeats_or_are_repeated_again() -> None:
    search = Repeats(RandomSearch(max_trials=1, max_length=4), seeds=1, top=1)
    ended(search, 1, {0: 0.2})
    leave(search, 1)
    resumed = search.extend(max_length=8)
    assert sorted(action.trial for action in resumed if not isinstance(action, Done)) == [0, 1]
    assert [leave(search, trial) for trial in (0, 1)] == [[], [Done(reason="completed")]]
    halving = Repeats(ASHA(max_trials=1, max_length=4, num_rungs=1), seeds=1, top=1)
    ended(halving, 1, {0: 0.2})
    leave(halving, 1)
    assert [action.trial for action in halving.extend(max_length=16) if not isinstance(action, Done)] == [0]
    assert of(leave(halving, 0)) == [(0, 1)]


def test_repeat_has_its_trials_hyperparameters_and_a_seed_that_all_repeats_share() -> None:
    search = new_search(Repeats(RandomSearch(max_trials=2), seeds=2, top=2))
    search.start()
    for trial in (0, 1):
        search.on(Started(trial=trial))
        report(search, trial, 4, 0.1)
    actions = [*leave(search, 0), *leave(search, 1)]
    repeats = {of([action])[0]: action.trial for action in actions if isinstance(action, Create)}
    for (trial, seed), number in repeats.items():
        search.on(Started(trial=number))
        assert search.params(number) == search.params(trial)
        assert search.seed_of(number) == search.seed_of(repeats[0, seed])
    assert len({search.seed_of(trial) for trial in search.trials}) == 4  # two of the search, two of the repeats
    assert search.params(0) != search.params(1)


def test_repeat_of_a_trial_with_other_code_has_that_code() -> None:
    search = new_search(Repeats(RandomSearch(max_trials=1), seeds=1, top=2))
    search.start()
    search.request(Requested(code="3f9c"))
    for trial in (0, 1):
        search.on(Started(trial=trial))
        report(search, trial, 4, 0.1 * trial)
    actions = [*leave(search, 0), *leave(search, 1)]
    assert of(actions) == [(0, 1), (1, 1)]
    assert [search.code_of(trial) for trial in search.trials] == [None, "3f9c", None, "3f9c"]
    search.on(Started(trial=3))
    assert search.params(3) == search.params(1)


def test_trials_are_drawn_as_without_repeats_after_an_extension() -> None:
    def points(method: Method, extended: bool) -> list[Any]:
        search = new_search(method)
        simulate(search, 2, lambda point: Curve(lambda step: point["x"]), reports=[4])
        if extended:
            search.extend(max_trials=6)
            simulate(search, 2, lambda point: Curve(lambda step: point["x"]), reports=[4])
        return [view.hparams for trial, view in search.trials.items() if search.repeat(trial) is None]

    plain = points(RandomSearch(max_trials=6), extended=False)
    assert points(Repeats(RandomSearch(max_trials=4), seeds=2, top=2), extended=True) == plain


def test_stopped_repeat_ends_and_the_others_go_on() -> None:
    search = new_search(Repeats(RandomSearch(max_trials=1), seeds=2, top=1))
    search.start()
    search.on(Started(trial=0))
    report(search, 0, 4, 0.1)
    leave(search, 0)
    assert not carry_out(search, Requested(trial=1)).done
    assert search.trials[1].state == "CANCELED"
    assert leave(search, 2) == [Done(reason="completed")]


def test_create_of_a_repeat_is_recorded() -> None:
    record = {"action": "create", "trial": 7, "repeat": {"trial": 2, "seed": 3}}
    assert action_to_json(Create(trial=7, repeat=Repeat(trial=2, seed=3))) == record


def test_method_that_creates_no_trials_on_request_is_an_error() -> None:
    class Own:
        rungs = ()

    with pytest.raises(MethodError, match=r"repeat: needs a method .*; Own has no requested"):
        Repeats(Own(), seeds=3, top=1)  # type: ignore[arg-type]
    with pytest.raises(MethodError, match=r"searcher.seeds: must be an integer >= 1, got 0"):
        Repeats(Single(), seeds=0, top=1)


@pytest.mark.usefixtures("few_simulations")
def test_preview_counts_repeats() -> None:
    def make() -> Method:
        return Repeats(RandomSearch(max_trials=8, max_length=4, max_concurrent_trials=8), seeds=3, top=2)

    found = preview(make())
    assert (found.trials, found.total) == (8 + 6, (8 + 6) * 4)
    halving = expected(lambda: Repeats(ASHA(max_trials=16, max_length=16, num_rungs=3), seeds=3, top=4))
    [(of_all, last)] = [(rung.trials, rung.length) for rung in halving.brackets[-1].rungs]
    assert (of_all, last) == (12, 16)
    alone = expected(lambda: ASHA(max_trials=16, max_length=16, num_rungs=3))
    assert halving.total is not None
    assert alone.total is not None
    assert halving.total == pytest.approx(alone.total + 12 * 16)
