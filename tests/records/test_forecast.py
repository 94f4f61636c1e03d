"""What a search still takes is told in time, and comes true in simulated searches."""

from __future__ import annotations

import random
from collections.abc import Mapping

import pytest

from dray.records.forecast import FIRST_S, Forecast
from searchers.adaptive_asha import AdaptiveASHA
from searchers.asha import ASHA
from searchers.asha_promotion import PromotionASHA
from searchers.events import REPLACED, Action, Event, Exited, Reason, Reported, Requested, Started
from searchers.method import Method
from searchers.pbt import PBT
from searchers.previews import preview
from searchers.random_search import RandomSearch
from searchers.search import Search
from searchers.simulate import Curve, simulate
from searchers.space import parse

WORKERS = 4
EPOCH_S = 10.0


def told(method: Method, seed: int) -> list[tuple[float, float, float | None]]:
    """The forecasts of a whole search, one per event: the time, the share that is done, the seconds left."""
    forecast, seen, drawn = Forecast(preview(method)), [], random.Random(seed)
    counted: set[int] = set()
    search = Search(method, parse({}), seed=seed, smaller_is_better=True, log=lambda record: None)

    def watch(time: float, event: Event, actions: list[Action]) -> None:
        ended = search.trials.keys() - search.live.keys() - counted
        counted.update(ended)
        forecast.update(search.live.values(), {}, WORKERS, time, ended=[search.trials[trial] for trial in ended])
        seen.append((time, forecast.share, forecast.left_s))

    def trial(hparams: Mapping[str, object]) -> Curve:
        good = drawn.random()
        return Curve(lambda step: good + 1 / step, cost=EPOCH_S)

    simulate(search, WORKERS, trial, reports=tuple(range(1, 17)), watch=watch, jitter=0.2, seed=seed)
    return seen


METHODS = {
    "random": lambda: RandomSearch(max_trials=20, max_concurrent_trials=4, max_length=16),
    "asha": lambda: ASHA(max_trials=64, max_length=16, num_rungs=3, divisor=4),
    "promotion": lambda: PromotionASHA(max_trials=64, max_length=16, num_rungs=3, divisor=4),
    "adaptive": lambda: AdaptiveASHA(max_trials=64, max_length=16, max_concurrent_trials=4),
}


@pytest.mark.parametrize("name", METHODS)
def test_time_left_is_accurate_and_the_share_never_decreases(name: str) -> None:
    off = []
    for seed in range(2):
        seen = told(METHODS[name](), seed)
        shares = [share for _, share, _ in seen]
        assert (shares[0], shares[-1], shares) == (0, 1, sorted(shares))
        end = seen[-1][0]
        for time, _, left in seen:
            if time > 0.25 * end:
                assert left is not None
                off.append(abs(left - (end - time)) / end)
    # How many trials go beyond a rung is chance, in a small search.
    assert sum(off) / len(off) < (0.06 if name == "random" else 0.2)


def search(method: Method, *events: Event) -> Search:
    made = Search(method, parse({}), seed=0, smaller_is_better=True, log=lambda record: None)
    made.start()
    for event in events:
        made.on(event)
    return made


def test_no_time_left_until_trials_have_trained_for_a_while() -> None:
    method = RandomSearch(max_trials=8, max_concurrent_trials=2, max_length=10)
    made = search(method, Started(trial=0), Started(trial=1))
    forecast, first = Forecast(preview(method)), None
    for second in range(200):
        # A hundred seconds of starting up, and then a tenth of an epoch a second.
        steps = {0: max(second - 100, 0) / 10, 1: 0.0}
        forecast.update(made.live.values(), steps, 2, float(second))
        if forecast.left_s is not None and first is None:
            first = second
            # 80 epochs in all, by two trials of which one trains; and an idle place for half a trial in the end.
            assert forecast.left_s == pytest.approx((80 - (second - 100) / 10 + 5) / 0.05 / 2, rel=0.2)
    assert first is not None
    assert 100 + FIRST_S <= first <= 100 + FIRST_S + 1


def test_trials_are_counted_if_the_search_sets_no_lengths() -> None:
    method = RandomSearch(max_trials=4, max_concurrent_trials=2)
    forecast = Forecast(preview(method))
    made = search(method, Started(trial=0), Reported(trial=0, step=7, value=0.5), Exited(trial=0, reason="completed"))
    forecast.update(made.live.values(), {1: 1000.0}, 2, 0.0, ended=[made.trials[0]])
    assert forecast.share == 0.25


@pytest.mark.parametrize(("reason", "share"), [*((reason, 0.25) for reason in REPLACED), ("errored", 0.5)])
def test_failed_trials_are_no_work_left_replaced_ones_none_done(reason: Reason, share: float) -> None:
    method = RandomSearch(max_trials=2, max_concurrent_trials=2, max_length=10)
    forecast = Forecast(preview(method))
    made = search(method, Started(trial=0), Exited(trial=0, reason=reason), Started(trial=1))
    forecast.update(made.live.values(), {1: 5.0}, 1, 0.0, ended=[made.trials[0]])
    assert forecast.share == share


def test_an_extended_search_has_more_to_do() -> None:
    method = RandomSearch(max_trials=1, max_concurrent_trials=2, max_length=10)
    made = search(method, Started(trial=0), Reported(trial=0, step=10, value=1), Exited(trial=0, reason="completed"))
    made.extend(max_trials=4)
    forecast = Forecast(preview(method))
    forecast.update(made.live.values(), {}, 1, 0.0, ended=[made.trials[0]])
    assert forecast.share == 0.25


def test_length_of_a_forks_source_is_not_its_own_training() -> None:
    method = PBT(max_length=8, population=2, interval=2, quantile=0.5)
    made = search(method, Started(trial=0), Started(trial=1))
    for trial in (0, 1):
        made.on(Reported(trial=trial, step=2, value=trial))
    made.on(Exited(trial=1, reason="stopped"))
    made.on(Started(trial=2))
    made.on(Reported(trial=2, step=4, value=-1))
    forecast = Forecast(preview(method))
    forecast.update(made.live.values(), {}, 2, 0.0, ended=[made.trials[1]])
    assert forecast.share == (2 + 2 + 2) / (2 + 2 + 2 + 6 + 4)


def test_requested_trials_add_to_those_of_the_search() -> None:
    method = RandomSearch(max_trials=4, max_concurrent_trials=1, max_length=10)
    forecast = Forecast(preview(method))
    search = Search(method, parse({}), seed=0, smaller_is_better=True, log=lambda record: None)
    search.start()
    for event in (Started(trial=0), Reported(trial=0, step=10, value=0.5), Exited(trial=0, reason="completed")):
        search.on(event)
    search.request(Requested())
    forecast.update(search.live.values(), {}, 1, 0.0, ended=[search.trials[0]], requested=search.requested)
    assert forecast.share == 1 / 5
