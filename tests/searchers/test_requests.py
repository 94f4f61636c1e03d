"""Trials that a person requests, stops, or forks from another trial, while a search runs."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from searchers import (
    ASHA,
    AdaptiveASHA,
    Create,
    Done,
    Exited,
    Grid,
    GridSampler,
    IllegalEvent,
    PromotionASHA,
    RandomSearch,
    Reported,
    Requested,
    Sampler,
    Search,
    Source,
    SpaceError,
    Started,
    Stop,
    parse_space,
)
from searchers.answers import carry_out
from searchers.method import Method
from searchers.named_sampler import named_sampler

SPACE = parse_space(
    {
        "lr": {"type": "log", "base": 10, "minval": -4, "maxval": -1, "count": 3},
        "width": {"type": "int", "minval": 1, "maxval": 4, "count": 2},
        "seed": 5,
    }
)


def searched(method: Method, sampler: Sampler | None = None) -> Search:
    search = Search(method, SPACE, seed=7, smaller_is_better=True, log=lambda record: None, sampler=sampler)
    search.start()
    return search


def train(search: Search, trial: int, steps: dict[int, float]) -> list[Any]:
    """What follows from a trial's start and its reports."""
    actions = list(search.on(Started(trial=trial)))
    for step, value in steps.items():
        actions += search.on(Reported(trial=trial, step=step, value=value))
    return actions


def asha(**given: Any) -> ASHA:
    return ASHA(max_trials=4, max_length=16, num_rungs=3, divisor=4, max_concurrent_trials=4, **given)


def test_a_fork_begins_where_its_source_was_with_its_hyperparameters_but_those_given() -> None:
    search = searched(asha())
    train(search, 2, {1: 0.5, 4: 0.4})
    source = Source(trial=2, step=4)
    assert search.request(Requested(source=source, hparams={"lr": 0.5})) == [
        Create(trial=4, source=source, hparams={"lr": 0.5})
    ]
    assert search.params(4) == search.params(2) | {"lr": 0.5}
    assert (search.source(4), search.seed_of(4)) == (source, search.seed_of(2))
    search.on(Started(trial=4))
    search.request(Requested(source=Source(trial=4, step=8)))
    assert (search.params(5), search.seed_of(5)) == (search.params(4), search.seed_of(2))


@pytest.mark.parametrize("kind", [ASHA, PromotionASHA])
def test_a_fork_is_ranked_at_the_rungs_above_its_source_only(kind: type[ASHA]) -> None:
    method = kind(max_trials=4, max_length=16, num_rungs=3, divisor=4, max_concurrent_trials=4)
    search = searched(method)
    train(search, 0, {1: 0.5})
    search.request(Requested(source=Source(trial=0, step=1)))
    train(search, 4, {4: 0.1})
    first, second, _ = method.ranked
    assert (set(first), dict(second)) == ({0}, {4: 0.1})


@pytest.mark.parametrize("step", [16, 17, -1])
def test_a_fork_needs_something_left_to_train(step: int) -> None:
    search = searched(asha())
    train(search, 0, {1: 0.5})
    with pytest.raises(IllegalEvent, match=rf"can't begin from step {step} of trial 0: .* max_length is 16; extend"):
        search.request(Requested(source=Source(trial=0, step=step)))


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Requested(hparams={"lx": 1, "width": 2}), "hyperparameters.lx: is not .*; there are: lr, seed, width"),
        (Requested(source=Source(trial=1, step=1)), "trial 1 has not started, so it has no checkpoint"),
        (Requested(source=Source(trial=9, step=1)), "trial 9"),
        (Requested(trial=9), "trial 9"),
        (Requested(trial=0), "trial 0 can't be stopped: it is COMPLETED"),
        (Requested(hparams={"lr": object()}), "hyperparameter"),
    ],
)
def test_an_impossible_request_is_an_error_and_changes_nothing(request_: Requested, message: str) -> None:
    log: list[Any] = []
    search = searched(asha())
    search.log = log.append
    train(search, 0, {1: 0.5})
    search.on(Exited(trial=0, reason="completed"))
    before = len(log), dict(search.trials)
    with pytest.raises(IllegalEvent, match=message):
        search.request(request_)
    assert (len(log), dict(search.trials)) == before


MIXED = parse_space(
    {
        "lr": {"type": "log", "base": 10, "minval": -4, "maxval": -1},
        "global_batch_size": 64,
        "act": {"type": "categorical", "vals": ["relu", None]},
        "opt": {
            "momentum": {"type": "double", "minval": 0, "maxval": 0.9},
            "steps": {"type": "int", "minval": 1, "maxval": 9},
        },
        "net": {
            "type": "categorical",
            "vals": [{"name": "a", "n": {"type": "int", "minval": 1, "maxval": 2}}, {"name": "b"}],
        },
    }
)


@pytest.mark.parametrize(
    ("given", "has"),
    [
        ({"opt.momentum": 2, "opt.steps": 99.0}, {"opt": {"momentum": 2.0, "steps": 99}}),
        ({"opt": {"momentum": 0.5}}, {"opt": {"momentum": 0.5}}),
        (
            {"act": "gelu", "lr": np.float32(0.5), "global_batch_size": 128},
            {"act": "gelu", "lr": 0.5, "global_batch_size": 128},
        ),
        ({"act": None, "lr": math.inf, "net": {"name": "b"}}, {"act": None, "lr": math.inf, "net": {"name": "b"}}),
    ],
)
def test_given_hyperparameters_may_be_nested_and_outside_of_their_ranges(
    given: dict[str, Any], has: dict[str, Any]
) -> None:
    search = Search(RandomSearch(max_trials=1), MIXED, seed=7, smaller_is_better=True, log=lambda record: None)
    search.start()
    [created] = search.request(Requested(hparams=given))
    assert isinstance(created, Create)
    assert created.hparams == has
    params = search.params(created.trial)
    assert params == params | has | {"opt": params["opt"] | has.get("opt", {})}
    assert set(params["opt"]) == {"momentum", "steps"}  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("lr", "abc", "lr: must be a number, got 'abc'"),
        ("lr", [0.1], "lr: must be a number, got"),
        ("lr", True, "lr: must be a number, got True"),
        ("lr", math.nan, "lr: must be a number, got nan"),
        ("lr", object(), "lr: a hyperparameter is"),
        ("global_batch_size", "abc", "global_batch_size: must be a number, as 64 is, got 'abc'"),
        ("global_batch_size", 2**70, "global_batch_size: must be an integer of at most 64 bits, got one of 71"),
        ("opt.steps", 1.5, "opt.steps: must be an integer, got 1.5"),
        ("opt.steps", 2**70, "opt.steps: must be an integer of at most 64 bits"),
        ("opt.lr", 1, "opt.lr: is not a hyperparameter of the space; there are: momentum, steps"),
        ("opt", 1, "opt: must be a mapping"),
        ("act", 3, "act: must be one of 'relu', None, got 3"),
        ("net.n", 1, "net.n: can't be set by itself; set all of net"),
        ("net", {"name": "a"}, "net.n: is missing"),
        ("net", {"name": "c"}, "net"),
    ],
)
def test_a_given_hyperparameter_of_another_type_is_an_error(name: str, value: object, says: str) -> None:
    with pytest.raises(SpaceError) as raised:
        MIXED.given({name: value})
    [(path, message)] = raised.value.faults
    assert f"{path}: {message}".startswith(f"hyperparameters.{says}")


class _Own:
    """A method that knows no requests."""

    rungs = ()

    def start(self) -> list[Any]:
        return [Create(trial=0)]


def test_a_method_that_creates_no_trials_on_request_says_so() -> None:
    with pytest.raises(IllegalEvent, match="_Own creates no trials on request"):
        searched(_Own()).request(Requested())  # type: ignore[arg-type]


def run(search: Search, requests: int = 0) -> dict[int, dict[str, object]]:
    """Run one trial after another, with requests before and after the search is done, and return the hyperparameters of
    those that the method created, in order."""
    queue, requested = list(search.live), set()
    while queue or requests:
        if requests and (not queue or len(search.trials) % 2):
            requests -= 1
            actions = search.request(Requested(hparams={"lr": 1e-3 if requests % 2 else 5.0}))
            requested |= {action.trial for action in actions if isinstance(action, Create)}
        else:
            trial = queue.pop(0)
            actions = train(search, trial, {1: float(str(search.params(trial)["lr"]))})
            actions += search.on(Exited(trial=trial, reason="completed"))
        queue += [action.trial for action in actions if isinstance(action, Create)]
        queue = [trial for trial in queue if not search.trials[trial].ended]
    assert search.done == Done(reason="completed")
    return {
        number: dict(search.trials[trial].hparams or {})
        for number, trial in enumerate(trial for trial in search.trials if trial not in requested)
    }


@pytest.mark.parametrize("kind", ["random", "grid", "tpe", "multi_fidelity"])
def test_requested_trials_count_for_no_budget_and_change_no_draw_of_others(kind: str) -> None:
    def made() -> Search:
        if kind == "grid":
            return searched(Grid(points=6, max_concurrent_trials=1), GridSampler(SPACE))
        method = RandomSearch(max_trials=16, max_concurrent_trials=1, max_length=1)
        return searched(method, named_sampler(kind, SPACE, seed=7, rungs=method.rungs))

    alone, beside = run(made()), run(made(), requests=5)
    assert list(beside) == list(alone)
    if kind in ("random", "grid"):  # others learn from requested trials
        assert beside == alone


def test_what_an_added_trial_draws_is_drawn_by_no_other() -> None:
    search = searched(RandomSearch(max_trials=2, max_concurrent_trials=1, max_length=1))
    [added] = search.request(Requested())
    train(search, 0, {1: 0.5})
    [later] = search.on(Exited(trial=0, reason="completed"))
    assert isinstance(added, Create)
    assert isinstance(later, Create)
    assert search.params(added.trial)["lr"] != search.params(later.trial)["lr"]


def test_a_stopped_trial_is_canceled_and_another_takes_its_place() -> None:
    method = ASHA(max_trials=3, max_length=16, num_rungs=2, divisor=4, max_concurrent_trials=2)
    search = searched(method)
    search.on(Started(trial=0))
    assert search.request(Requested(trial=0)) == [Stop(trial=0)]
    with pytest.raises(IllegalEvent, match="trial 0 can't be stopped"):
        search.request(Requested(trial=0))
    assert search.on(Exited(trial=0, reason="canceled")) == [Create(trial=2)]
    answer = carry_out(search, Requested(trial=2))
    assert (answer.decision, answer.creates, answer.done) == ("stop", (), False)
    assert {trial: view.state for trial, view in search.trials.items()} == {0: "CANCELED", 1: "PENDING", 2: "CANCELED"}


def test_a_search_that_is_done_goes_on_with_a_requested_trial_until_its_end() -> None:
    search = searched(AdaptiveASHA(max_trials=2, max_length=4, max_rungs=2))
    for trial in (0, 1):
        train(search, trial, {4: 0.5 + trial})
        if not search.trials[trial].ended:
            search.on(Exited(trial=trial, reason="completed"))
    assert search.done
    [created] = search.request(Requested(source=Source(trial=0, step=1), hparams={"width": 3}))
    assert (search.done, created) == (None, Create(trial=2, source=Source(trial=0, step=1), hparams={"width": 3}))
    train(search, 2, {4: 0.1})
    assert search.on(Exited(trial=2, reason="completed")) == [Done(reason="completed")]
