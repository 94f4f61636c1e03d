"""Population-based training: its decisions, and the toy problem of the paper, whose optimum is known."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from searchers import (
    Create,
    Done,
    Exited,
    MethodError,
    Pause,
    Reported,
    Requested,
    Resume,
    Search,
    Source,
    Started,
    Stop,
    parse_space,
)
from searchers.events import Action, Reason
from searchers.pbt import PBT, Explorer
from searchers.testing import check_method

TOY = parse_space({name: {"type": "double", "minval": 0, "maxval": 1} for name in ("h0", "h1")})
SPACE = parse_space(
    {
        "lr": {"type": "log", "base": 10, "minval": -4, "maxval": -1},
        "width": {"type": "int", "minval": 8, "maxval": 64},
        "kind": {"type": "categorical", "vals": ["a", "b", "c"]},
        "seed": 5,
    }
)


def test_it_keeps_the_contract() -> None:
    check_method(lambda: PBT(max_length=8, population=4, interval=2), max_creations=200, seeds=range(5))


def started(population: int, **fields: Any) -> PBT:
    pbt = PBT(**{"max_length": 8, "population": population, "interval": 2, **fields})
    assert pbt.start() == [Create(trial=trial) for trial in range(population)]
    for trial in range(population):
        assert pbt.on(Started(trial=trial)) == []
    return pbt


def report(pbt: PBT, trial: int, step: float, value: float) -> list[Action]:
    return pbt.on(Reported(trial=trial, step=step, value=value))


def created(trial: int, source: int, step: float = 2) -> Create:
    return Create(trial=trial, source=Source(trial=source, step=step))


def test_the_worst_quarter_continues_from_the_best_quarter() -> None:
    pbt = started(4)
    assert [report(pbt, trial, 2, value) for trial, value in ((1, 0.1), (0, 0.0), (2, 0.2))] == [[], [], []]
    assert report(pbt, 3, 2, 0.5) == [Stop(trial=3), created(4, 0)]
    assert report(pbt, 2, 4, 0.4) == [], "trial 4 has the place of trial 3 until it reports"
    pbt.on(Started(trial=4))
    assert report(pbt, 4, 4, 0.05) == []
    assert report(pbt, 2, 6, 0.3) == [Stop(trial=2), created(5, 0)], "the latest reports count"


def test_nobody_is_replaced_before_the_reports_of_the_others_could_not_save_it() -> None:
    pbt = started(8)
    assert [report(pbt, trial, 2, trial) for trial in range(6)] == [[]] * 6
    assert report(pbt, 6, 2, 6.0) == [Stop(trial=6), created(8, 1)]


def test_a_failed_trial_is_replaced_from_the_best_if_both_have_reported() -> None:
    pbt = started(2, quantile=0.5)
    assert pbt.on(Exited(trial=0, reason="errored")) == []
    cases: list[tuple[Reason, bool]] = [("diverged", False), ("canceled", False), ("errored", True)]
    for reason, reports in cases:
        pbt = started(2, quantile=0.5)
        report(pbt, 1, 2, 0.5)
        if reports:
            report(pbt, 0, 2, 0.4)
        assert pbt.on(Exited(trial=0, reason=reason)) == [created(2, 1)]
    # The new trial fails before it has trained for an interval: its hyperparameters may not fit the weights.
    assert pbt.on(Exited(trial=2, reason="errored")) == []


def test_an_invalid_trial_is_replaced_from_the_best() -> None:
    pbt = started(2, quantile=0.5)
    report(pbt, 1, 2, 0.5)
    assert pbt.on(Exited(trial=0, reason="invalid_hp")) == [created(2, 1)]


def test_a_requested_trial_is_compared_but_not_replaced() -> None:
    pbt = started(2, quantile=0.5)
    assert pbt.requested(Requested(hparams={"lr": 0.1})) == [Create(trial=2, hparams={"lr": 0.1})]
    pbt.on(Started(trial=2))
    report(pbt, 0, 2, 0.1)
    report(pbt, 1, 2, 0.2)
    assert report(pbt, 2, 2, 0.3) == [Stop(trial=2)]


def test_trials_take_turns_if_fewer_can_run_than_the_population_has() -> None:
    pbt = PBT(max_length=8, population=3, interval=2)
    pbt.start()
    for trial in (0, 1):
        pbt.on(Started(trial=trial))
    assert report(pbt, 0, 2, 0.1) == [Pause(trial=0), Resume(trial=0)]
    assert report(pbt, 1, 2, 0.2) == [Pause(trial=1), Resume(trial=1)], "trial 0 waits for workers too"
    pbt.on(Started(trial=2))
    pbt.on(Started(trial=0))
    assert report(pbt, 0, 4, 0.1) == [Pause(trial=0), Resume(trial=0)]
    pbt.on(Started(trial=1))
    assert report(pbt, 2, 4, 0.5) == [Stop(trial=2), created(3, 0, 4)]
    assert report(pbt, 1, 4, 0.05) == [Pause(trial=1), Resume(trial=1)], "both trial 0 and trial 3 wait"
    pbt.on(Started(trial=0))
    pbt.on(Started(trial=3))
    pbt.on(Exited(trial=0, reason="completed"))
    pbt.on(Started(trial=1))
    assert report(pbt, 1, 6, 0.04) == [], "nobody waits"


def test_an_extended_population_trains_on() -> None:
    pbt = started(2, max_length=3)
    for trial in (0, 1):
        report(pbt, trial, 3, 0.5)
        pbt.on(Exited(trial=trial, reason="completed"))
    assert pbt.progress({}) == 1
    assert pbt.extend(max_length=6) == [Resume(trial=0), Resume(trial=1)]
    assert (pbt.rungs, pbt.progress({0: 0.5, 1: 0.5})) == ((2, 4, 6), 0.5)
    with pytest.raises(MethodError, match="a population keeps its size"):
        pbt.extend(max_trials=4)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"population": 1}, "searcher.population: must be an integer >= 2, got 1"),
        ({"interval": 9}, "searcher.interval: must be at most max_length, which is 8, got 9"),
        ({"quantile": 0.6}, "searcher.quantile: must be > 0 and <= 0.5, got 0.6"),
    ],
)
def test_bad_arguments_are_named(given: dict[str, float], message: str) -> None:
    with pytest.raises(MethodError, match=message):
        PBT(**{"max_length": 8, "population": 4, "interval": 2, **given})  # type: ignore[arg-type]


def toy(method: PBT, *, steps: int, rate: float = 0.02) -> float:
    """The best Q of the paper's figure 2: maximise Q = 1.2 - (x0^2 + x1^2), of which a trial sees only
    1.2 - (h0 x0^2 + h1 x1^2), whose gradient it follows."""
    search = Search(method, TOY, seed=3, smaller_is_better=False, log=lambda record: None, sampler=Explorer(TOY, 3))
    points: dict[tuple[int, float], tuple[float, float]] = {}
    at: dict[int, tuple[float, tuple[float, float]]] = {}
    best = -1.0
    queue = [action.trial for action in search.start() if isinstance(action, Create)]
    while search.done is None:
        trial = queue.pop(0)
        if trial not in at:
            search.on(Started(trial=trial))
            source = search.source(trial)
            at[trial] = (0, (0.9, 0.9)) if source is None else (source.step, points[source.trial, source.step])
        step, (x0, x1) = at[trial]
        h = search.params(trial)
        if trial in (0, 1):  # the paper's two workers: each sees one of the coordinates
            h = {"h0": 1 - trial, "h1": trial}
        for _ in range(method.rungs[0]):
            x0, x1 = x0 - rate * 2 * float(str(h["h0"])) * x0, x1 - rate * 2 * float(str(h["h1"])) * x1
        step += method.rungs[0]
        at[trial] = step, (x0, x1)
        points[trial, step] = x0, x1
        q = 1.2 - x0**2 - x1**2
        best = max(best, q)
        actions = search.on(Reported(trial=trial, step=step, value=q))
        if step >= steps:
            actions += search.on(Exited(trial=trial, reason="completed"))
        stops = [action.trial for action in actions if isinstance(action, Stop)]
        for stopped in stops:
            actions += search.on(Exited(trial=stopped, reason="stopped"))
        queue += [action.trial for action in actions if isinstance(action, Create)]
        if step < steps and trial not in stops:
            queue.append(trial)
    assert search.done == Done(reason="completed")
    return best


def test_the_papers_toy_problem_is_solved_by_exploiting_and_exploring() -> None:
    assert toy(PBT(max_length=200, population=2, interval=4, quantile=0.5), steps=200) > 1.15
    # Alone, each of the two leaves the coordinate that it does not see at 0.9: Q <= 1.2 - 0.81.
    alone = PBT(max_length=200, population=2, interval=200, quantile=0.5)
    assert toy(alone, steps=200) <= 1.2 - 0.81


def test_nested_hyperparameters_are_explored_too() -> None:
    lr = {"type": "double", "minval": 0, "maxval": 1}
    branches = [{"name": "sgd", "lr": lr}, {"name": "adam", "lr": lr, "beta": lr}]
    space = parse_space({"optimizer": {"type": "categorical", "vals": branches}, "size": {"width": 8}})
    explorer, names = Explorer(space, 7, resample_probability=0, factors=[0.5]), set()
    for trial in range(40):
        found: Any = explorer.explore(trial, {"optimizer": {"name": "sgd", "lr": 0.5}, "size": {"width": 8}})
        assert not space.faults(found)
        assert found["size"] == {"width": 8}
        names.add(found["optimizer"]["name"])
        if found["optimizer"]["name"] == "sgd":
            assert found["optimizer"]["lr"] == 0.25
    assert names == {"sgd", "adam"}


def test_explored_hyperparameters_are_near_their_source_and_in_the_space() -> None:
    explorer, resampled = Explorer(SPACE, 7), 0
    for trial in range(400):
        source = SPACE.sample(Random(trial))
        found = explorer.explore(trial, source)
        assert not SPACE.faults(found)
        assert found == explorer.explore(trial, source)
        ratio = float(str(found["lr"])) / float(str(source["lr"]))
        near = any(ratio == pytest.approx(factor) for factor in (0.8, 1.2)) or found["lr"] in (1e-4, 0.1)
        resampled += not near
    assert 60 < resampled < 140, "a quarter of 400"
