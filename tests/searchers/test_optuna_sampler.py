"""Optuna's samplers: their data, their proposals, replays, and invalid options."""

from __future__ import annotations

import json
import sys
from random import Random

import optuna
import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.samplers import BaseSampler
from optuna.trial import FrozenTrial

from searchers import Exited, FieldError, RandomSampler, Reported, Started, parse_space
from searchers.optuna_sampler import OptunaSampler
from searchers.optuna_space import to_optuna
from tests.searchers.helpers import LINE, tell

SPEC: dict[str, object] = {
    "lr": {"type": "log", "base": 10, "minval": -4, "maxval": -1},
    "n": {"type": "int", "minval": 1, "maxval": 400},
    "act": {"type": "categorical", "vals": ["relu", [1, 2], None]},
    "batch": 64,
}
CONDITIONAL: dict[str, object] = {
    "optimizer": {
        "type": "categorical",
        "vals": [{"name": "sgd", "momentum": {"type": "double", "minval": 0, "maxval": 0.9}}, {"name": "adam"}],
    },
    "model": {"width": {"type": "int", "minval": 8, "maxval": 64, "step": 8}},
}
SPACE = parse_space(SPEC)
RUNGS = (1, 4, 16)


class Listening(BaseSampler):
    """An Optuna sampler that records the trials shown to it, and draws 0.5 or the first choice."""

    shown: list[list[FrozenTrial]]

    def __init__(self, seed: int | None = None) -> None:
        pass

    def infer_relative_search_space(self, study, trial):  # type: ignore[no-untyped-def]
        Listening.shown.append(study.get_trials(deepcopy=False))
        return {}

    def sample_relative(self, study, trial, search_space):  # type: ignore[no-untyped-def]
        return {}

    def sample_independent(self, study, trial, param_name, param_distribution):  # type: ignore[no-untyped-def]
        return 0.5


@pytest.fixture
def listening(monkeypatch: pytest.MonkeyPatch) -> OptunaSampler:
    """A sampler over [0, 1] that exposes Optuna's view of the trials, with TPE's bounds."""
    monkeypatch.setattr(optuna.samplers, "Listening", Listening, raising=False)
    monkeypatch.setattr(optuna.samplers, "__all__", [*optuna.samplers.__all__, "Listening"])
    monkeypatch.setattr("searchers.optuna_sampler._WITHOUT_NOTES", {"Listening"})
    Listening.shown = []
    return OptunaSampler(LINE, seed=7, rungs=RUNGS, name="Listening")


def seen(sampler: OptunaSampler) -> dict[int, tuple[str, float, float | None]]:
    """Return the state, x and value of each trial, as Optuna sees them."""
    sampler.ask(10**6)
    *others, asked = Listening.shown[-1]
    assert asked.number == 10**6
    return {trial.number: (trial.state.name, trial.params["x"], trial.value) for trial in others}


# ------------------------------------------------------------------------------------------------------------- its data


def test_only_trials_above_the_floor_are_compared_by_their_last_value(listening: OptunaSampler) -> None:
    tell(listening, 0, 0.0, (1, 5.0), reason="stopped")
    tell(listening, 1, 0.1, (1, 4.0), (3.9, 3.5), reason="stopped")
    tell(listening, 2, 0.2, (1, 3.0), (4, 2.0), reason="stopped")
    tell(listening, 3, 0.3, (1, 2.0), (4, 1.5), (16, 1.75), reason="completed")
    tell(listening, 4, 0.4, (1, 1.0), (4, 0.5))
    tell(listening, 5, 0.5, (1, 0.5))
    assert seen(listening) == {
        2: ("COMPLETE", 0.2, 2.0),
        3: ("COMPLETE", 0.3, 1.75),
        4: ("COMPLETE", 0.4, 0.5),
        5: ("RUNNING", 0.5, None),
    }


def test_the_floor_is_a_rung_a_fifth_of_the_length_or_above(listening: OptunaSampler) -> None:
    sampler = OptunaSampler(LINE, seed=7, rungs=(1, 3, 9, 27, 81), name="Listening")
    tell(sampler, 0, 0.0, (26, 1.0), reason="stopped")
    tell(sampler, 1, 0.1, (27, 1.0), reason="stopped")
    assert seen(sampler) == {1: ("COMPLETE", 0.1, 1.0)}


def test_the_floor_rises_after_an_extension_once_enough_trials_reached_it(listening: OptunaSampler) -> None:
    """After 16 -> 64, comparisons move from rung 4 to rung 16 with the tenth trial that reaches it."""

    def compared() -> list[int]:
        return [trial for trial, (state, _, _) in sorted(seen(listening).items()) if state == "COMPLETE"]

    for trial in range(12):
        tell(listening, trial, 0.5, (1, 0.9), (4, 0.1 * trial), reason="stopped")
    listening.extended((1, 4, 16, 64))
    for trial in range(12, 21):
        tell(listening, trial, 0.5, (4, 0.6), (16, 0.5), reason="stopped")
        assert compared() == list(range(trial + 1)), "until then what was known before counts"
    tell(listening, 21, 0.5, (4, 0.5), reason="stopped")
    assert compared() == list(range(22))
    tell(listening, 22, 0.5, (16, 0.5), reason="stopped")
    assert compared() == [*range(12, 21), 22]
    tell(listening, 23, 0.5, (4, 0.1), reason="stopped")
    tell(listening, 24, 0.5, (16, 0.9))
    assert compared() == [*range(12, 21), 22, 24]


def test_tpe_sees_the_first_trials_as_its_background() -> None:
    sampler = OptunaSampler(LINE, seed=7, rungs=RUNGS)
    for trial in range(100):
        tell(sampler, trial, 0.5, (1, 0.0), reason="stopped")
    for trial, reason in [(100, "completed"), (101, "errored"), (102, None)]:
        tell(sampler, trial, 0.5, (16, 1.0), reason=reason)
    tell(sampler, 103, 0.5)
    first = dict.fromkeys(range(60), "RUNNING")
    later = {100: "COMPLETE", 101: "COMPLETE", 102: "COMPLETE", 103: "RUNNING"}
    assert {trial.number: trial.state.name for trial in sampler.shown()} == first | later


def test_a_completed_trial_is_compared_at_any_length(listening: OptunaSampler) -> None:
    tell(listening, 0, 0.5, (2, 0.25), reason="completed")
    assert seen(listening) == {0: ("COMPLETE", 0.5, 0.25)}


def test_failed_trials_are_shown_with_the_worst_value(listening: OptunaSampler) -> None:
    tell(listening, 0, 0.0, (16, 1.0), reason="completed")
    tell(listening, 1, 0.1, (16, 3.0), reason="completed")
    tell(listening, 2, 0.2, (4, 0.5), reason="errored")
    tell(listening, 3, 0.3, reason="invalid_hp")
    tell(listening, 4, 0.4, (4, 0.5), reason="canceled")
    assert seen(listening) == {
        0: ("COMPLETE", 0.0, 1.0),
        1: ("COMPLETE", 0.1, 3.0),
        2: ("COMPLETE", 0.2, 3.0),
        3: ("COMPLETE", 0.3, 3.0),
        4: ("COMPLETE", 0.4, 0.5),
    }


def test_no_more_failures_than_compared_trials_are_shown(listening: OptunaSampler) -> None:
    for trial in range(9):
        tell(listening, trial, 0.5, reason="errored")
    assert seen(listening) == {}
    tell(listening, 9, 0.9, (16, 1.0), reason="completed")
    assert seen(listening) == {8: ("COMPLETE", 0.5, 1.0), 9: ("COMPLETE", 0.9, 1.0)}


def test_a_resumed_trial_is_shown_once(listening: OptunaSampler) -> None:
    tell(listening, 0, 0.5, (4, 2.0))
    listening.tell(Started(trial=0), {"x": 0.5})
    tell(listening, 0, 0.5, (16, 1.0), reason="completed")
    assert seen(listening) == {0: ("COMPLETE", 0.5, 1.0)}


def test_the_study_is_bounded_and_holds_the_best_and_the_latest(listening: OptunaSampler) -> None:
    rng = Random(0)
    values = [rng.random() for _ in range(5000)]
    for trial, value in enumerate(values):
        tell(listening, trial, 0.5, (16, value), reason="completed")
    shown = seen(listening)
    best = sorted(range(5000), key=lambda trial: values[trial])[:30]
    assert set(best) | set(range(4950, 5000)) <= shown.keys()
    assert len(shown) <= 250
    assert sum(listening.trials.get(trial) is not None for trial in range(5000)) <= 250


def test_without_rungs_completed_trials_are_compared(monkeypatch: pytest.MonkeyPatch, listening: OptunaSampler) -> None:
    sampler = OptunaSampler(LINE, seed=7, rungs=(), name="Listening")
    tell(sampler, 0, 0.5, (10, 2.0), (20, 1.0), reason="completed")
    tell(sampler, 1, 0.6, (10, 2.0))
    assert seen(sampler) == {0: ("COMPLETE", 0.5, 1.0), 1: ("RUNNING", 0.6, None)}


# -------------------------------------------------------------------------------------------------------- its proposals


def run(sampler: OptunaSampler, trials: int) -> list[float]:
    """Complete `trials` trials of x with the value (x - 0.3) ** 2, and return their x."""
    drawn = []
    for trial in range(trials):
        hparams = sampler.ask(trial)
        drawn.append(float(hparams["x"]))  # type: ignore[arg-type]
        tell(sampler, trial, drawn[-1], (16, (drawn[-1] - 0.3) ** 2), reason="completed")
    return drawn


@pytest.mark.parametrize(
    ("name", "trials"), [("tpe", 45), ("TPESampler", 45), pytest.param("gp", 20, marks=pytest.mark.slow)]
)
def test_proposals_approach_the_optimum(name: str, trials: int) -> None:
    """Uniform draws would come within .1 of the optimum 20 % of the time."""
    drawn = run(OptunaSampler(LINE, seed=1, rungs=RUNGS, name=name), trials)
    last = drawn[trials // 2 :]
    assert sum(abs(x - 0.3) < 0.1 for x in last) >= 0.4 * len(last)


def test_startup_draws_are_those_of_random_search() -> None:
    sampler, random = OptunaSampler(SPACE, seed=7, rungs=RUNGS), RandomSampler(SPACE, seed=7)
    assert [sampler.ask(trial) for trial in range(5)] == [random.ask(trial) for trial in range(5)]


def test_every_fourth_draw_of_tpe_stays_random() -> None:
    sampler, random = OptunaSampler(LINE, seed=7, rungs=RUNGS), RandomSampler(LINE, seed=7)
    run(sampler, 20)
    assert [trial for trial in range(20, 40) if sampler.ask(trial) == random.ask(trial)] == [20, 24, 28, 32, 36]


def test_trials_asked_at_the_same_time_differ() -> None:
    sampler = OptunaSampler(SPACE, seed=7, rungs=RUNGS, options={"n_startup_trials": 0})
    points = [json.dumps(sampler.ask(trial)) for trial in range(20)]
    assert len(set(points)) == 20


@pytest.mark.slow
@pytest.mark.parametrize("reason", ["errored", "diverged", "invalid_hp"])
def test_failed_points_are_not_proposed_again(reason: str) -> None:
    """One of four values fails, and is never proposed again."""
    space = parse_space({"x": {"type": "categorical", "vals": [0, 1, 2, 3]}})
    sampler = OptunaSampler(space, seed=2, rungs=RUNGS, options={"n_startup_trials": 1})
    drawn = []
    for trial in range(60):
        x = int(sampler.ask(trial)["x"])  # type: ignore[call-overload]
        drawn.append(x)
        if x == 2:
            tell(sampler, trial, x, reason=reason)
        else:
            tell(sampler, trial, x, (16, 1.0 + x), reason="completed")
    assert drawn.count(2) <= 1


# -------------------------------------------------------------------------------------------------------- distributions


def test_spaces_become_flat_distributions() -> None:
    assert to_optuna(parse_space(SPEC | CONDITIONAL)) == {
        "act": CategoricalDistribution((0, 1, 2)),
        "lr": FloatDistribution(1e-4, 1e-1, log=True),
        "model.width": IntDistribution(8, 64, step=8),
        "n": IntDistribution(1, 400),
        "optimizer": CategoricalDistribution((0, 1)),
        "optimizer[0].momentum": FloatDistribution(0, 0.9),
    }


def test_conditional_parameters_are_shown_only_in_their_branch() -> None:
    space = parse_space(CONDITIONAL)
    sampler = OptunaSampler(space, seed=1, rungs=RUNGS)
    sampler.tell(Started(trial=0), {"optimizer": {"name": "adam"}, "model": {"width": 16}})
    sampler.tell(Started(trial=1), {"optimizer": {"name": "sgd", "momentum": 0.5}, "model": {"width": 64}})
    assert [trial.params for trial in sampler.shown()] == [
        {"optimizer": 1, "model.width": 16},
        {"optimizer": 0, "optimizer[0].momentum": 0.5, "model.width": 64},
    ]


# --------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("name", "options", "path", "says"),
    [
        ("tpee", {}, "name", "did you mean tpe?"),
        ("PartialFixedSampler", {}, "name", "must be random, or one of"),
        ("tpe", {"n_startup": 3}, "options.n_startup", "is not an option of TPESampler; did you mean"),
        ("tpe", {"n_startup_trials": -1}, "options.n_startup_trials", "must be an integer >= 0, got -1"),
        ("tpe", {"multivariate": False, "group": True}, "options", "TPESampler does not accept"),
        ("tpe", {"seed": 3}, "options.seed", "is not an option"),
    ],
    ids=str,
)
def test_invalid_fields(name: str, options: dict[str, object], path: str, says: str) -> None:
    with pytest.raises(FieldError) as caught:
        OptunaSampler(SPACE, seed=1, rungs=RUNGS, name=name, options=options)
    ((where, what),) = caught.value.faults
    assert where == f"searcher.sampler.{path}"
    assert says in what


def test_a_sampler_whose_package_is_missing_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cmaes", None)  # Python does this for modules that cannot be imported
    with pytest.raises(
        FieldError, match=r"searcher.sampler.name: 'cmaes' needs a package that is not installed: .*cmaes"
    ):
        OptunaSampler(SPACE, seed=1, rungs=RUNGS, name="cmaes")


def test_cmaes_learns() -> None:
    plane = parse_space({name: {"type": "double", "minval": 0, "maxval": 1} for name in "xy"})
    sampler = OptunaSampler(plane, seed=1, rungs=RUNGS, name="cmaes")
    values = []
    for trial in range(80):
        point = sampler.ask(trial)
        values.append((point["x"] - 0.3) ** 2 + (point["y"] - 0.8) ** 2)  # type: ignore[operator]
        sampler.tell(Started(trial=trial), point)
        sampler.tell(Reported(trial=trial, step=16, value=values[-1]), point)
        sampler.tell(Exited(trial=trial, reason="completed"), point)
    assert sum(values[-20:]) < 0.2 * sum(values[:20])


def test_a_conditional_space_works_with_independent_tpe() -> None:
    options = {"multivariate": False, "n_startup_trials": 0}
    sampler = OptunaSampler(parse_space(CONDITIONAL), seed=1, rungs=RUNGS, options=options)
    assert [parse_space(CONDITIONAL).check(sampler.ask(trial), path="p") for trial in (1, 2, 3)]
