"""Searches that learn from trials that run out of memory where trials fit."""

from __future__ import annotations

from random import Random
from typing import Literal, cast

import pytest

from searchers import Exited, Reported, Started, parse_space
from searchers.memory_model import MemoryModel
from searchers.named_sampler import named_sampler
from searchers.samplers import RandomSampler, Sampler

SPACE = parse_space(
    {
        "hidden": {"type": "log", "base": 2, "minval": 4, "maxval": 12},
        "batch": {"type": "categorical", "vals": [8, 16, 32, 64, 128, 256]},
        "lr": {"type": "log", "base": 10, "minval": -5, "maxval": -1},
    }
)


def fits(point: dict[str, object]) -> bool:
    """Whether a trial fits: half of the space does."""
    return cast("float", point["hidden"]) * cast("int", point["batch"]) < 2**13.5


def end(sampler: Sampler | MemoryModel, trial: int, point: dict[str, object], reason: str | None) -> None:
    """Let a trial report and complete, or end without a report for this reason."""
    if not isinstance(sampler, MemoryModel):
        sampler.tell(Started(trial=trial), point)
    if reason is None:
        sampler.tell(Reported(trial=trial, step=1, value=-cast("float", point["hidden"])), point)
    sampler.tell(Exited(trial=trial, reason=reason or "completed"), point)  # type: ignore[arg-type]


def num_failures(name: str, reason: Literal["errored", "out_of_memory"], trials: int) -> int:
    """Run trials one after another, of which larger ones are better; return how many do not fit."""
    sampler, failures = named_sampler(name, SPACE, seed=0, rungs=(1,)), 0
    for trial in range(trials):
        point = sampler.ask(trial)
        failures += not fits(point)
        end(sampler, trial, point, None if fits(point) else reason)
    return failures


@pytest.mark.parametrize(
    ("name", "trials"),
    [("tpe", 20), ("multi_fidelity", 20), pytest.param("gp", 14, marks=[pytest.mark.slow, pytest.mark.long])],
)
def test_most_failures_are_avoided(name: str, trials: int) -> None:
    """For figures see `bench/out_of_memory.py`."""
    assert num_failures(name, "out_of_memory", trials) <= 0.5 * num_failures(name, "errored", trials)


@pytest.mark.parametrize("name", ["tpe", "multi_fidelity"])
def test_without_a_trial_out_of_memory_the_startup_draws_are_those_of_random_search(name: str) -> None:
    sampler, random = named_sampler(name, SPACE, seed=7, rungs=(1,)), RandomSampler(SPACE, seed=7)
    for trial, reason in enumerate([None, "errored", "diverged", "invalid_hp", "canceled", None]):
        point = sampler.ask(trial)
        assert point == random.ask(trial)
        end(sampler, trial, point, reason)


def trained(fail: bool = True) -> MemoryModel:
    model = MemoryModel(SPACE)
    for trial in range(40):
        point = SPACE.sample(Random(trial))
        end(model, trial, point, None if fits(point) or not fail else "out_of_memory")
    return model


def test_points_that_probably_do_not_fit_are_neither_likely_nor_drawn() -> None:
    model = trained()
    points = [SPACE.sample(Random(f"new {number}")) for number in range(200)]
    assert sum(model.probably_fits(point) and not fits(point) for point in points) <= 5
    assert sum(model.probably_fits(point) for point in points if fits(point)) > 50
    assert sum(fits(model.sample(Random(number))) for number in range(50)) >= 45


def test_a_proposal_that_does_not_fit_is_moved_to_the_closest_point_that_does() -> None:
    model = trained()
    large: dict[str, object] = {"hidden": 2048.0, "batch": 256, "lr": 1e-3}
    assert not model.probably_fits(large)
    close = model.closest(large, Random(0))
    assert close is not None
    assert model.probably_fits(close)
    assert fits(close)
    assert 1e-4 < cast("float", close["lr"]) < 1e-2, "it has no part in the memory"
    assert model.closest(close, Random(0)) is close


def test_without_failures_every_point_is_likely_and_draws_are_unchanged() -> None:
    model = trained(fail=False)
    large: dict[str, object] = {"hidden": 4096.0, "batch": 256, "lr": 1e-3}
    assert model.probably_fits(large)
    assert model.closest(large, Random(0)) is large
    assert model.sample(Random(3)) == SPACE.sample(Random(3))


def test_failures_that_have_no_cause_among_the_hyperparameters_exclude_only_part_of_the_space() -> None:
    model = MemoryModel(SPACE)
    for trial in range(200):
        end(model, trial, SPACE.sample(Random(trial)), "out_of_memory" if Random(f"{trial}").random() < 0.4 else None)
    assert sum(model.probably_fits(SPACE.sample(Random(f"new {number}"))) for number in range(200)) > 60


def test_a_trial_that_runs_out_of_memory_after_a_report_does_not_fit() -> None:
    model = MemoryModel(SPACE)
    small: dict[str, object] = {"hidden": 32.0, "batch": 64, "lr": 1e-3}
    large: dict[str, object] = small | {"hidden": 2048.0}
    for trial, point in enumerate([small, large] * 4):
        end(model, trial, point, None)
    for trial in (1, 3, 5, 7):
        end(model, trial, large, "out_of_memory")
    assert model.probably_fits(small)
    assert not model.probably_fits(large)


def test_categories_and_conditional_hyperparameters_are_learned() -> None:
    space = parse_space(
        {
            "model": {
                "type": "categorical",
                "vals": ["small", {"name": "large", "layers": {"type": "int", "minval": 1, "maxval": 32}}],
            },
            "dropout": {"type": "double", "minval": 0, "maxval": 0.5},
        }
    )

    def point(layers: int | None, dropout: float) -> dict[str, object]:
        model: object = "small" if layers is None else {"name": "large", "layers": layers}
        return {"model": model, "dropout": dropout}

    model = MemoryModel(space)
    for trial, layers in enumerate([None, 1, 30, None, 3, 20, None, 2, 28, 25]):
        reason = "out_of_memory" if layers is not None and layers > 8 else None
        known = point(layers, trial / 20)
        if reason is None:
            model.tell(Reported(trial=trial, step=1, value=0.5), known)
        model.tell(Exited(trial=trial, reason=reason or "completed"), known)  # type: ignore[arg-type]
    assert [model.probably_fits(point(layers, 0.25)) for layers in (None, 2, 24, 32)] == [True, True, False, False]


@pytest.mark.parametrize("name", ["nsga2", "cmaes"])
def test_samplers_with_generations_count_such_a_trial_as_one_of_the_worst(name: str) -> None:
    """Their proposals are not moved: a moved one would not count for its generation."""
    searches = []
    for reason in ("errored", "out_of_memory"):
        sampler = named_sampler(name, SPACE, seed=0, rungs=(1,))
        points = []
        for trial in range(16):
            points.append(sampler.ask(trial))
            end(sampler, trial, points[-1], None if fits(points[-1]) else reason)
        searches.append(points)
    assert searches[0] == searches[1]
