"""The simulator's clock in closed form, and its agreement with a real driver."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from statistics import fmean, stdev
from typing import Any

import pytest

from searchers import (
    ASHA,
    Action,
    AdaptiveASHA,
    Done,
    Event,
    Exited,
    Grid,
    Method,
    Pause,
    PromotionASHA,
    RandomSearch,
    Reported,
    Resume,
    Single,
    Started,
    Stop,
)
from searchers.simulate import Curve, Simulation, simulate
from tests.searchers.helpers import Scripted, new_search

Watched = list[tuple[float, Event, list[Action]]]


def constant(hparams: Mapping[str, object]) -> Curve:
    return Curve(lambda step: 0.5)


def ever_worse(hparams: Mapping[str, Any]) -> Curve:
    return Curve(lambda step: float(hparams["trial"]))


def by_x(hparams: Mapping[str, Any]) -> Curve:
    return Curve(lambda step: hparams["x"] / step, cost=1 + hparams["x"])


def asha(max_trials: int = 10, workers: int = 1, max_length: int = 16, num_rungs: int = 3) -> ASHA:
    return ASHA(max_trials=max_trials, max_length=max_length, num_rungs=num_rungs, max_concurrent_trials=workers)


def watched(*args: Any, **options: Any) -> tuple[Simulation, Watched]:
    seen: Watched = []
    simulation = simulate(*args, watch=lambda time, event, actions: seen.append((time, event, actions)), **options)
    return simulation, seen


# ------------------------------------------------------------------------------------------------------------ the clock


def test_single_takes_its_start_and_its_length() -> None:
    simulation = simulate(Single(max_length=12), 1, constant, start_cost=5)
    assert simulation == Simulation(
        time=17, done="completed", trials=1, ended={"completed": 1}, trained=12, busy=17, events=3
    )


def test_one_worker_takes_the_sum_of_all_trials() -> None:
    def costly(hparams: Mapping[str, Any]) -> Curve:
        return Curve(lambda step: 0.5, cost=float(hparams["trial"] + 1))

    simulation = simulate(RandomSearch(max_trials=4, max_length=3), 1, costly, start_cost=2)
    assert simulation.time == 4 * 2 + 3 * (1 + 2 + 3 + 4)


@pytest.mark.parametrize(("trials", "workers", "rounds"), [(12, 4, 3), (13, 4, 4), (3, 8, 1)])
def test_equal_trials_go_in_rounds(trials: int, workers: int, rounds: int) -> None:
    method = RandomSearch(max_trials=trials, max_length=7, max_concurrent_trials=0)
    simulation = simulate(method, workers, constant, start_cost=1)
    assert (simulation.time, simulation.busy) == (8 * rounds, 8 * trials)


def test_ever_worse_trials_are_stopped_at_the_first_rung() -> None:
    simulation = simulate(asha(), 1, ever_worse, start_cost=10)
    assert simulation.time == 26 + 9 * 11
    assert simulation.trained == 16 + 9
    assert simulation.ended == {"completed": 1, "stopped": 9}


def test_reports_come_at_the_rungs_and_then_the_trial_ends() -> None:
    _, seen = watched(asha(max_trials=1), 1, constant)
    assert [(time, event) for time, event, _ in seen] == [
        (0, Started(trial=0)),
        (1, Reported(trial=0, step=1, value=0.5)),
        (4, Reported(trial=0, step=4, value=0.5)),
        (16, Reported(trial=0, step=16, value=0.5)),
        (16, Exited(trial=0, reason="completed")),
    ]


def test_reports_can_differ_from_the_rungs() -> None:
    _, seen = watched(RandomSearch(max_trials=1), 1, constant, reports=[0.5, 3])
    assert [(time, event.step) for time, event, _ in seen if isinstance(event, Reported)] == [(0.5, 0.5), (3, 3)]


def test_nothing_happens_after_until() -> None:
    simulation = simulate(RandomSearch(max_trials=9, max_length=10, max_concurrent_trials=0), 2, constant, until=25)
    assert simulation == Simulation(
        time=25, done=None, trials=9, ended={"completed": 4}, trained=50, busy=50, events=6 + 4 + 4
    )


# ----------------------------------------------------------------------------------------------------- pause and resume


def paused_and_resumed() -> Scripted:
    """With one worker, trial 0 is paused at its first rung, trial 1 runs to its end, and trial 0 continues."""
    return Scripted(
        2,
        {
            Reported(trial=0, step=1, value=0.5): [Pause(trial=0)],
            Exited(trial=1, reason="completed"): [Resume(trial=0)],
            Exited(trial=0, reason="completed"): [Done(reason="completed")],
        },
    )


def test_pause_frees_the_worker_and_nothing_is_trained_twice() -> None:
    simulation, seen = watched(paused_and_resumed(), 1, constant, start_cost=10, resume_cost=5)
    assert [(time, event) for time, event, _ in seen] == [
        (0, Started(trial=0)),
        (11, Reported(trial=0, step=1, value=0.5)),
        (11, Started(trial=1)),
        (22, Reported(trial=1, step=1, value=0.5)),
        (25, Reported(trial=1, step=4, value=0.5)),
        (25, Exited(trial=1, reason="completed")),
        (25, Started(trial=0)),
        (33, Reported(trial=0, step=4, value=0.5)),
        (33, Exited(trial=0, reason="completed")),
    ]
    assert (simulation.trained, simulation.busy) == (8, 33)


def test_a_trial_paused_between_reports_keeps_its_training() -> None:
    """With two workers, trial 1's report at time 2 pauses trial 0 at 2 of its 4; resumed at 8, it needs 2 more."""
    method = Scripted(
        2,
        {
            Reported(trial=1, step=1, value=0.5): [Pause(trial=0)],
            Exited(trial=1, reason="completed"): [Resume(trial=0)],
            Exited(trial=0, reason="completed"): [Done(reason="completed")],
        },
    )
    slower = {0: 1.0, 1: 2.0}
    simulation, _ = watched(method, 2, lambda hparams: Curve(lambda step: 0.5, cost=slower[hparams["trial"]]))
    assert (simulation.time, simulation.trained, simulation.busy) == (10, 8, 2 + 8 + 2)


def test_waiting_and_paused_trials_are_stopped_without_a_worker() -> None:
    method = Scripted(
        3,
        {
            Reported(trial=0, step=1, value=0.5): [Pause(trial=0), Stop(trial=2)],
            Exited(trial=1, reason="completed"): [Stop(trial=0)],
            Exited(trial=0, reason="stopped"): [Done(reason="completed")],
        },
    )
    simulation, seen = watched(method, 1, constant)
    assert [(time, event.trial) for time, event, _ in seen if isinstance(event, Exited)] == [(1, 2), (5, 1), (5, 0)]
    assert simulation.busy == 1 + 4


# ---------------------------------------------------------------------------------------------- failures, noise, jitter


def test_a_trial_that_always_fails_errors_after_max_restarts() -> None:
    simulation, seen = watched(Single(max_length=1000), 1, constant, failures=1e6, max_restarts=3)
    assert [type(event) for _, event, _ in seen] == [Started] * 4 + [Exited]
    assert (simulation.done, simulation.ended) == ("errored", {"errored": 1})


def test_failures_lose_only_training_since_the_last_report() -> None:
    reports = range(1, 101)
    simulation, seen = watched(
        RandomSearch(max_trials=20, max_concurrent_trials=4),
        4,
        constant,
        reports=reports,
        failures=0.2,
        max_restarts=999,
    )
    by_trial: dict[int, list[float]] = defaultdict(list)
    for _, event, _ in seen:
        if isinstance(event, Reported):
            by_trial[event.trial].append(event.step)
    assert all(steps == list(reports) for steps in by_trial.values())
    failed = sum(isinstance(event, Started) for _, event, _ in seen) - 20
    assert simulation.trained == pytest.approx(
        simulation.busy
    )  # a unit of length takes a unit of time, restarts are free
    assert 20 * 100 < simulation.trained < 20 * 100 + failed  # each loses less than a unit
    assert failed == pytest.approx(0.2 * simulation.busy, abs=5 * math.sqrt(0.2 * simulation.busy))  # Poisson


def test_noise_is_normal_and_depends_only_on_the_trial() -> None:
    def values(method: Method, workers: int) -> dict[tuple[int, float], float]:
        _, seen = watched(method, workers, constant, noise=0.1, seed=3)
        return {(e.trial, e.step): e.value or 0.0 for _, e, _ in seen if isinstance(e, Reported)}

    alone = values(RandomSearch(max_trials=1000, max_length=1), 1)
    assert fmean(alone.values()) == pytest.approx(0.5, abs=5 * 0.1 / math.sqrt(1000))
    assert stdev(alone.values()) == pytest.approx(0.1, rel=0.12)
    together = values(asha(max_trials=1000, workers=16), 16)
    assert {trial: value for (trial, step), value in together.items() if step == 1} == {
        trial: value for (trial, _), value in alone.items()
    }


def test_jitter_spreads_times_around_the_costs() -> None:
    simulation = simulate(RandomSearch(max_trials=2000, max_length=10), 100, constant, jitter=0.1)
    # Both the time between reports and a worker's speed are log-normal, with mean exp(sigma^2 / 2).
    assert simulation.busy / 20_000 == pytest.approx(math.exp(0.01), abs=5 * 0.1 / math.sqrt(100))
    assert simulation.trained == pytest.approx(20_000)


def test_the_seed_determines_the_simulation() -> None:
    def course(seed: int) -> Watched:
        return watched(
            asha(max_trials=50, workers=4), 4, ever_worse, noise=9, jitter=0.3, failures=0.01, resume_cost=1, seed=seed
        )[1]

    assert course(1) == course(1)
    assert course(1) != course(2)


# --------------------------------------------------------------------------------------------------------------- trials


def test_invalid_hyperparameters_end_the_trial_before_it_starts_to_train() -> None:
    def odd_ones(hparams: Mapping[str, Any]) -> Curve | None:
        return Curve(lambda step: 0.5) if hparams["trial"] % 2 else None

    simulation = simulate(RandomSearch(max_trials=3, max_length=4, max_concurrent_trials=1), 1, odd_ones, start_cost=1)
    assert simulation.ended == {"completed": 3, "invalid_hp": 3}
    assert simulation.time == 3 * 5


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, None])
def test_a_bare_method_gets_normalised_values(bad: float | None) -> None:
    _, seen = watched(asha(max_trials=1), 1, lambda hparams: Curve(lambda step: bad), noise=0.1)
    assert {event.value for _, event, _ in seen if isinstance(event, Reported)} == {math.inf}


METHODS: dict[str, Callable[[], Method]] = {
    "single": lambda: Single(max_length=64),
    "random": lambda: RandomSearch(max_trials=60, max_length=64, max_concurrent_trials=8),
    "grid": lambda: Grid(points=60, max_length=64, max_concurrent_trials=8),
    "stopping": lambda: asha(max_trials=60, workers=8, max_length=64, num_rungs=4),
    "promotion": lambda: PromotionASHA(max_trials=60, max_length=64, num_rungs=4, max_concurrent_trials=8),
    "adaptive": lambda: AdaptiveASHA(max_trials=60, max_length=64, max_concurrent_trials=8),
    "adaptive promotion": lambda: AdaptiveASHA(
        max_trials=60, max_length=64, max_concurrent_trials=8, variant="promotion", mode="conservative"
    ),
}


def first_rung(method: Method, trial: int) -> float:
    """Return the trial's first rung; a bracket may lack the lower rungs of the search."""
    if isinstance(method, AdaptiveASHA):
        return method.brackets[method.bracket_of(trial)].rungs[0]
    return method.rungs[0]


@pytest.mark.parametrize("name", [name for name in METHODS if name not in ("single", "random", "grid")])
def test_no_trial_is_trained_past_the_rung_where_it_diverged(name: str) -> None:
    """Half of the configurations diverge, to NaN, an infinity or None, at different lengths."""

    def trial(hparams: Mapping[str, Any]) -> Curve:
        x: float = hparams["x"]
        edge, bad = 1 + x * 80, [math.nan, math.inf, -math.inf, None][int(x * 1e6) % 4]
        return Curve(lambda step: bad if x < 0.5 and step >= edge else x / (1 + step))

    log: list[dict[str, object]] = []
    search = new_search(METHODS[name](), log=log)
    _, seen = watched(search, 8, trial, noise=0.01, jitter=0.2)

    showed: set[int] = set()
    for _, event, _ in seen:
        assert not isinstance(event, Started | Reported) or event.trial not in showed, f"{event}, after it diverged"
        if isinstance(event, Reported) and event.step >= first_rung(search.method, event.trial):
            showed |= set() if event.value is not None and math.isfinite(event.value) else {event.trial}
    assert len(showed) >= 7
    below = {trial for trial in showed if (search.trials[trial].last_step or 0) < search.method.rungs[-1]}
    assert {search.trials[trial].state for trial in below} == {"PRUNED"}


# ------------------------------------------------------------------------------------------------------------- a search


def test_a_search_gets_the_events_of_a_real_driver() -> None:
    log: list[dict[str, object]] = []
    search = new_search(asha(60, workers=4), log=log)
    simulation, seen = watched(search, 4, by_x, start_cost=1, jitter=0.1)
    assert simulation.done == "completed"
    assert [record["event"] for record in log] == ["start"] + [type(event).__name__.lower() for _, event, _ in seen]
    again = new_search(asha(60, 4)).replay(log)
    assert dict(again.trials) == dict(search.trials)
    for view in search.trials.values():
        assert view.hparams is not None
        assert view.last == view.hparams["x"] / view.last_step  # type: ignore[operator]


def test_an_extended_search_trains_only_the_extension() -> None:
    search = new_search(RandomSearch(max_trials=4, max_length=10, max_concurrent_trials=2))
    assert simulate(search, 2, constant, start_cost=1).time == 22
    search.extend(max_trials=5, max_length=16)
    simulation, seen = watched(search, 2, constant, start_cost=1, resume_cost=2)
    # Four continue from 10 to 16, in two rounds; the new one trains from the beginning.
    assert (simulation.time, simulation.trained) == (2 * (2 + 6) + (1 + 16), 4 * 6 + 16)
    assert [event.step for _, event, _ in seen if isinstance(event, Reported)] == [16] * 5
    assert simulation.done == "completed"


def test_a_search_that_has_ended_is_not_simulated_on() -> None:
    search = new_search(RandomSearch(max_trials=4, max_length=10, max_concurrent_trials=2))
    simulate(search, 2, constant)
    again = simulate(search, 2, constant)
    assert (again.done, again.trained) == ("completed", 0)


def test_after_a_drivers_death_trials_get_workers_in_the_searchs_order() -> None:
    """Trial 0 gave its worker to those that wait; the next driver does not give it back."""
    answers: dict[Event, list[Action]] = {
        Reported(trial=0, step=1, value=0.5): [Pause(trial=0), Resume(trial=0)],
        Exited(trial=0, reason="completed"): [Done(reason="completed")],
    }
    search = new_search(Scripted(3, answers))
    simulate(search, 1, constant, until=1)
    assert list(search.live) == [1, 2, 0]
    _, seen = watched(search, 1, constant)
    assert [event.trial for _, event, _ in seen if isinstance(event, Started)] == [1, 2, 0]


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("seed", range(2))
def test_every_method_ends_despite_failures_and_driver_deaths(name: str, seed: int) -> None:
    """Simulate failures, invalid points, NaN, few workers, and three deaths of the driver with replays."""

    def trial(hparams: Mapping[str, Any]) -> Curve | None:
        x: float = hparams["x"]
        return None if x < 0.1 else Curve(lambda step: math.nan if 0.1 < x < 0.2 else x / step, cost=0.5 + x)

    log: list[dict[str, object]] = []
    search = new_search(METHODS[name](), log=log, seed=seed)
    reported: list[tuple[int, float]] = []
    ended: list[int] = []

    def watch(time: float, event: Event, actions: list[Action]) -> None:
        if isinstance(event, Reported):
            reported.append((event.trial, event.step))
        elif isinstance(event, Exited):
            ended.append(event.trial)

    def run(until: float) -> Simulation:
        return simulate(
            search,
            5,
            trial,
            start_cost=0.5,
            resume_cost=0.2,
            failures=0.05,
            max_restarts=1,
            noise=0.1,
            jitter=0.3,
            until=until,
            seed=seed,
            watch=watch,
        )

    for _ in range(3):
        if run(until=12).done is not None:
            break
        search = new_search(METHODS[name](), log=log, seed=seed).replay(list(log))
    assert search.done or run(until=math.inf).done
    assert sorted(ended) == list(range(len(search.trials)))
    assert len(reported) == len(set(reported))
    invalid = sum(view.state == "INVALID_HP" for view in search.trials.values())
    assert len(search.trials) - (0 if name == "grid" else invalid) == (1 if name == "single" else 60)
    assert search.progress() == 1.0


# ------------------------------------------------------------------------------------------------------------ observers


def test_all_faults_of_the_arguments_are_named() -> None:
    with pytest.raises(ValueError) as caught:
        simulate(RandomSearch(max_trials=1), 0, constant, failures=-1)
    assert [line.partition(":")[0] for line in str(caught.value).splitlines()] == ["workers", "reports", "failures"]


@pytest.mark.parametrize("cost", [0, -1, math.nan, math.inf])
def test_time_goes_forward(cost: float) -> None:
    with pytest.raises(ValueError, match="cost: must be a finite number > 0"):
        Curve(lambda step: 0.5, cost)


def test_a_method_that_forgets_its_trials_raises() -> None:
    method = Scripted(1, {Reported(trial=0, step=1, value=0.5): [Pause(trial=0)]})
    with pytest.raises(RuntimeError, match="1 of 1 trials are paused"):
        simulate(method, 1, constant)


@pytest.mark.parametrize("action", [Stop(trial=7), Pause(trial=7), Resume(trial=7), Resume(trial=0)])
def test_an_action_on_an_unknown_trial_raises(action: Action) -> None:
    method = Scripted(1, {Reported(trial=0, step=1, value=0.5): [action]})
    with pytest.raises(RuntimeError, match="the method decided"):
        simulate(method, 1, constant)
