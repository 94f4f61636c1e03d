"""Builds the search of a config: the space, the method and the sampler that the ``searcher`` section names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from dray.config.custom import Custom
from dray.config.entrypoint import is_class
from dray.config.schema import ExperimentConfig
from dray.config.searcher import (
    AdaptiveASHASearcher,
    ASHASearcher,
    AutoSearcher,
    ClassSearcher,
    CustomSearcher,
    GridSearcher,
    PBTSearcher,
    RandomSearcher,
    SamplerChoice,
    Searcher,
    SingleSearcher,
)
from dray.config.sections import Budget
from dray.errors import ConfigError, Fault
from searchers.adaptive_asha import AdaptiveASHA
from searchers.asha import ASHA
from searchers.asha_promotion import PromotionASHA
from searchers.auto import Auto
from searchers.errors import FieldError, MethodError
from searchers.method import MAX_TRIALS, Fields, Method
from searchers.named_sampler import check_use, named_sampler
from searchers.objectives import Objectives
from searchers.pbt import PBT, Explorer
from searchers.random_search import Grid, RandomSearch, Single
from searchers.repeats import Repeats
from searchers.samplers import FirstPoints, GridSampler, Prior, RandomSampler, Sampler
from searchers.search import Record, Search
from searchers.space import MAX_GRID, Space

_NOT_CUSTOM = Custom()

AUTO_SAMPLER = SamplerChoice(name="multi_fidelity")

LIMITS = ("budget", "until", "patience")
CHANGEABLE = (*LIMITS, "prices")  # by an extension
"""Fields of a config that end its search early. An extension may change them."""

#: Fields that methods have under the same names.
_FIELDS = (
    *("max_trials", "max_concurrent_trials", "num_rungs", "divisor", "skip_uninformative_rungs"),
    *("max_rungs", "mode", "bracket_rungs"),
)


def build_method(config: ExperimentConfig, custom: Custom = _NOT_CUSTOM) -> Method:
    """A new search method of a config; lengths and rungs are in ``config.searcher.unit``."""
    method, repeat = _method(config, custom), config.repeat
    if repeat is None:
        return method
    most = 1 if isinstance(config.searcher, SingleSearcher) else getattr(config.searcher, "max_concurrent_trials", 0)
    try:
        return Repeats(method, seeds=repeat.seeds, top=repeat.top, max_concurrent_trials=most)
    except MethodError as error:  # the method is the user's own
        raise ConfigError(error.faults) from None


def _method(config: ExperimentConfig, custom: Custom) -> Method:
    searcher = config.searcher
    fields: dict[str, Any] = {name: getattr(searcher, name) for name in _FIELDS if hasattr(searcher, name)}
    fields |= {"max_length": searcher.length}
    if "max_trials" in fields and fields["max_trials"] is None:
        fields["max_trials"] = MAX_TRIALS
    pareto = searcher.metrics is not None
    match searcher:
        case SingleSearcher():
            return Single(**fields)
        case RandomSearcher():
            return RandomSearch(**fields)
        case GridSearcher():
            return Grid(points=len(GridSampler(config.space, searcher.max_points)), **fields)
        case ASHASearcher():
            return (ASHA if searcher.variant == "stopping" else PromotionASHA)(**fields, pareto=pareto)
        case AdaptiveASHASearcher():
            return AdaptiveASHA(**fields, variant=searcher.variant, pareto=pareto)
        case AutoSearcher():
            return Auto(**fields, pareto=pareto)
        case PBTSearcher():
            return PBT(
                population=searcher.population,
                interval=searcher.interval.value,
                quantile=searcher.quantile,
                seed=config.reproducibility.experiment_seed,
                **fields,
            )
        case _:
            return custom.new_method(searcher)


def rungs_of(config: ExperimentConfig) -> tuple[float, ...]:
    """The rungs of a search, in the searcher's unit; () for the user's own method."""
    # The user's method is in the experiment's code, which may not be importable here.
    is_own = isinstance(config.searcher, CustomSearcher | ClassSearcher)
    return () if is_own else tuple(build_method(config).rungs)


def sampler_of(searcher: Searcher) -> SamplerChoice:
    """The sampler that a search draws its hyperparameters from; `grid` and `single` ignore it."""
    if isinstance(searcher, AutoSearcher):
        return AUTO_SAMPLER
    return getattr(searcher, "sampler", SamplerChoice())


def build_sampler(config: ExperimentConfig, custom: Custom = _NOT_CUSTOM) -> Sampler:
    return _sampler(config, custom, config.space, build_method(config, custom).rungs)


def build_search(
    config: ExperimentConfig,
    log: Callable[[Record], None],
    *,
    records: Iterable[Mapping[str, Any]] = (),
    where: object = "journal",
    custom: Custom = _NOT_CUSTOM,
) -> Search:
    """The search of a config, replayed from a journal's records; `where` is its path in errors."""
    method, space = build_method(config, custom), replace(config.space, constraint=custom.constraint)

    def new_sampler() -> Sampler:
        return _sampler(config, custom, space, method.rungs)

    # Neither a grid's points nor an object from Python can serve a second code.
    is_only_one = custom.sampler is not None or isinstance(config.searcher, GridSearcher)
    return Search(
        method,
        space,
        seed=config.reproducibility.experiment_seed,
        smaller_is_better=config.searcher.sign == 1,
        log=log,
        sampler=new_sampler(),
        new_sampler=None if is_only_one else new_sampler,
        objectives=config.searcher.objectives,
    ).replay(records, where)


def as_extended(config: ExperimentConfig, records: Iterable[Mapping[str, Any]]) -> ExperimentConfig:
    """The config with the size and the limits that the search was last extended to, by its journal's records."""
    searcher = config.searcher
    limits: dict[str, Any] = {}
    for record in records:
        if record.get("event") == "extended":
            trials, length = record.get("max_trials"), record.get("max_length")
            searcher = searcher if trials is None else searcher.with_trials(trials)
            searcher = searcher if length is None else searcher.with_length(length)
        elif record.get("event") == "limits":
            budget = record.get("budget")
            limits = {**record, "budget": None if budget is None else Budget.model_validate(budget)}
    changed = {name: limits[name] for name in CHANGEABLE if name in limits}
    return config.model_copy(update={"searcher": searcher, **changed})


def sizes_of(searcher: Searcher) -> dict[str, int | None]:
    """The fields of a search that an extension makes larger, with their present values."""
    return {"max_trials": searcher.trial_count, "max_length": searcher.length}


def check_growth(config: ExperimentConfig, extension: Mapping[str, Any]) -> None:
    """Raise a `ConfigError` if an extension would make a search smaller than it is."""
    check = Fields()
    for field, size in sizes_of(config.searcher).items():
        if size is not None and extension.get(field) is not None:
            check.integers(size, **{field: extension[field]})
    try:
        check.raise_faults()
    except MethodError as error:
        raise ConfigError(error.faults, "The extension") from None


def sampling_faults(
    method: str,
    choice: SamplerChoice,
    points: Sequence[Mapping[str, Any]],
    space: Space,
    objectives: Objectives | None = None,
    prior: Prior = MappingProxyType({}),
    max_points: int = MAX_GRID,
) -> Iterator[Fault]:
    """The faults of a sampler, of first points or of beliefs that don't fit the space."""

    def make_sampler() -> object:
        if method == "grid":
            return GridSampler(space, max_points)
        if is_class(choice.name) or method == "pbt" or choice.name == "pb2":
            check_use(prior, choice.name)
            return None  # the rules check the samplers of pbt
        return named_sampler(
            choice.name, space, seed=0, rungs=(), options=choice.options, objectives=objectives, prior=prior
        )

    for make in (make_sampler, lambda: FirstPoints(space, points, RandomSampler(space, seed=0))):
        try:
            make()
        except FieldError as error:
            yield from (Fault(path, what) for path, what in error.faults)


def _sampler(config: ExperimentConfig, custom: Custom, space: Space, rungs: Sequence[float]) -> Sampler:
    searcher, seed = config.searcher, config.reproducibility.experiment_seed
    choice = sampler_of(searcher)
    if custom.sampler is not None or is_class(choice.name):
        chosen = custom.new_sampler(choice, space, seed=seed, rungs=rungs)
    elif isinstance(searcher, GridSearcher):
        chosen = GridSampler(space, searcher.max_points)
    elif isinstance(searcher, PBTSearcher):
        chosen = _population_sampler(searcher, space, seed)
    else:
        chosen = named_sampler(
            choice.name,
            space,
            seed=seed,
            rungs=rungs,
            options=choice.options,
            objectives=searcher.objectives,
            prior=getattr(searcher, "prior", {}),
        )
    points = getattr(searcher, "points", [])
    return FirstPoints(space, points, chosen) if points else chosen


def _population_sampler(searcher: PBTSearcher, space: Space, seed: int) -> Sampler:
    if searcher.sampler.name == "pb2":
        from searchers.pb2 import PB2  # it imports scipy, which takes a while

        return PB2(space, seed=seed)
    fields = {name: getattr(searcher, name) for name in ("resample_probability", "factors")}
    return Explorer(space, seed, **{name: value for name, value in fields.items() if value is not None})
