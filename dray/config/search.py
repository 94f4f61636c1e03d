"""From a config to its search: the space, the method and the sampler that the ``searcher`` section names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from dray.config.custom import NOTHING, Own, own_method, own_sampler
from dray.config.entrypoint import is_class
from dray.config.schema import ExperimentConfig
from dray.config.searcher import Searcher
from searchers.adaptive_asha import AdaptiveASHA
from searchers.asha import ASHA
from searchers.errors import FieldError
from searchers.grid import Grid
from searchers.method import Method
from searchers.promotion import PromotionASHA
from searchers.random_search import RandomSearch
from searchers.samplers import FirstPoints, GridSampler, RandomSampler, Sampler
from searchers.search import Record, Search
from searchers.single import Single
from searchers.space import Constraint, Space, parse


def build_space(config: ExperimentConfig, *, constraint: Constraint | None = None) -> Space:
    """The hyperparameter space of a checked config.

    Args:
        config: From ``load_config``.
        constraint: Says whether a point may be tried; others are drawn again.
    """
    return parse(config.hyperparameters, constraint=constraint)


def build_method(config: ExperimentConfig, own: Own = NOTHING) -> Method:
    """The search method of a checked config, at its start.

    Lengths and rungs are in ``searcher.max_length.unit``, or in that of the metric ``searcher.time_metric``.

    Args:
        config: From ``load_config``.
        own: What the user gave from Python.

    Raises:
        ConfigError: The user's own method can't be loaded, or is no method.
    """
    searcher = config.searcher
    places, length = searcher.max_concurrent_trials, searcher.length
    match searcher.name:
        case "single":
            return Single(max_length=length)
        case "random":
            assert searcher.max_trials is not None
            return RandomSearch(max_trials=searcher.max_trials, max_concurrent_trials=places, max_length=length)
        case "grid":
            points = len(GridSampler(build_space(config)))
            return Grid(points=points, max_concurrent_trials=places, max_length=length)
        case "asha" | "async_halving":
            assert searcher.max_trials is not None and searcher.num_rungs is not None and length is not None  # noqa: PT018
            kind = ASHA if searcher.variant == "stopping" else PromotionASHA
            return kind(
                max_trials=searcher.max_trials,
                max_length=length,
                num_rungs=searcher.num_rungs,
                divisor=searcher.divisor,
                max_concurrent_trials=places,
            )
        case "adaptive_asha":
            assert searcher.max_trials is not None and length is not None  # noqa: PT018
            return AdaptiveASHA(
                max_trials=searcher.max_trials,
                max_length=length,
                divisor=searcher.divisor,
                max_rungs=searcher.max_rungs,
                mode=searcher.mode,
                bracket_rungs=searcher.bracket_rungs,
                max_concurrent_trials=places,
                variant=searcher.variant,
            )
        case _:
            return own_method(config, own)


def build_sampler(config: ExperimentConfig, space: Space | None = None, own: Own = NOTHING) -> Sampler:
    """The sampler of a checked config, at its start.

    Args:
        config: From ``load_config``.
        space: ``build_space(config)`` by default.
        own: What the user gave from Python.

    Raises:
        ConfigError: The user's own method or sampler can't be loaded, or is none.
    """
    space = build_space(config) if space is None else space
    rungs = build_method(config, own).rungs
    if own.sampler is not None or is_class(config.searcher.sampler.name):
        chosen = own_sampler(config, own, space, rungs=rungs)
    else:
        chosen = _sampler(config.searcher, space, seed=config.reproducibility.experiment_seed, rungs=rungs)
    points = config.searcher.points
    return FirstPoints(space, points, chosen) if points else chosen


def build_search(
    config: ExperimentConfig,
    log: Callable[[Record], None],
    *,
    records: Iterable[Mapping[str, Any]] = (),
    own: Own = NOTHING,
) -> Search:
    """The search of a checked config, replayed from a journal's records.

    Args:
        log: Called with one record per event, before it is acted on.
        records: Of the journal so far; none for a new search.
        own: What the user gave from Python.

    Raises:
        ConfigError: The user's own method or sampler can't be loaded, or is none.
        JournalError: The records are of another search, or damaged.
    """
    space = build_space(config, constraint=own.constraint)
    return Search.replay(
        records,
        build_method(config, own),
        space,
        seed=config.reproducibility.experiment_seed,
        smaller_is_better=config.searcher.smaller_is_better,
        log=log,
        sampler=build_sampler(config, space, own),
    )


def recorded_search(config: ExperimentConfig, records: Sequence[Mapping[str, Any]]) -> Search:
    """The search of a journal's records, to look at, not to run.

    Raises:
        JournalError: The records are of another search, or damaged.
    """
    return Search.recorded(
        records,
        build_space(config),
        seed=config.reproducibility.experiment_seed,
        smaller_is_better=config.searcher.smaller_is_better,
    )


def as_extended(config: ExperimentConfig, records: Iterable[Mapping[str, Any]]) -> ExperimentConfig:
    """The config with the budget that the search was last extended to, by its journal's records."""
    searcher = config.searcher
    for record in records:
        if record.get("event") == "extended":
            trials, length = record.get("max_trials"), record.get("max_length")
            searcher = searcher.model_copy(update={} if trials is None else {"max_trials": trials})
            searcher = searcher if length is None else searcher.of_length(length)
    return config.model_copy(update={"searcher": searcher})


def check_sampler(searcher: Searcher, space: Space) -> None:
    """Check ``sampler``, if it is one of dray's or Optuna's; the user's own needs the model's directory.

    Raises:
        FieldError: No such sampler, or none of such options; a grid of a space that has none.
    """
    if not is_class(searcher.sampler.name):
        _sampler(searcher, space, seed=0, rungs=())


def first_points(searcher: Searcher, space: Space) -> None:
    """Check ``points``.

    Raises:
        FieldError: A point is not of the space.
    """
    FirstPoints(space, searcher.points, RandomSampler(space, seed=0))


def _sampler(searcher: Searcher, space: Space, *, seed: int, rungs: Sequence[float]) -> Sampler:
    if searcher.name == "grid":
        return GridSampler(space)
    choice = searcher.sampler
    if choice.name != "random":
        # Here, not above: Optuna takes most of a second to import.
        from searchers.optuna_sampler import OptunaSampler

        return OptunaSampler(space, seed=seed, rungs=rungs, name=choice.name, options=choice.options)
    if choice.options:
        raise FieldError([("searcher.sampler.options", f"random has no options, got {choice.options}; remove them")])
    return RandomSampler(space, seed)
