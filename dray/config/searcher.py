"""The section ``searcher``: the search method and its settings. Each method has a model with just its fields."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, TypeAlias, cast

from pydantic import AfterValidator, BeforeValidator, Field, PrivateAttr, WithJsonSchema
from typing_extensions import Self

from dray.config.entrypoint import CLASS_PATTERN
from dray.config.length import Length, LengthUnit, MaxLength
from dray.config.section import CLASS, Kinds, Section, as_text, int_if_whole, named, replace_older_field, unknown_kind
from searchers.method import MAX_RUNGS, MAX_TRIALS
from searchers.objectives import Metric, Objectives
from searchers.pbt import MAX_POPULATION
from searchers.space import MAX_GRID

Variant: TypeAlias = Literal["stopping", "promotion"]
Mode: TypeAlias = Literal["aggressive", "standard", "conservative"]

MAX_POINTS = 10_000  # of a grid, by default

#: The units of length that every trial counts itself; any other unit is a metric that it reports.
COUNTED: tuple[LengthUnit, ...] = ("batches", "epochs")

_NAME = Field(description="the search method")


def _no_number(raw: object) -> object:
    if isinstance(raw, int) and not isinstance(raw, bool):
        raise ValueError(
            f"must be the directory of a trial, got {raw}: trial numbers are not unique here; for a Determined trial, "
            "set source_checkpoint_uuid instead, to the UUID of its latest checkpoint"
        )
    return raw


def _as_names(raw: object) -> object:
    """One experiment or several, by names, paths or numbers."""
    given = raw if isinstance(raw, list) else [raw]
    return [str(each) if isinstance(each, int) and not isinstance(each, bool) else as_text(each) for each in given]


class MetricChoice(Section):
    """One of several metrics: an objective, or with a limit a constraint."""

    place: ClassVar[str] = "searcher.metrics[]"

    name: str = Field(min_length=1, description="a validation metric", examples=["validation_loss"])
    smaller_is_better: bool | None = Field(
        default=None, description="true (the default): minimize the metric; false: maximize it", examples=[True]
    )
    at_most: float | None = Field(default=None, description="the greatest value allowed: a constraint", examples=[8000])
    at_least: float | None = Field(default=None, description="the least value allowed: a constraint", examples=[0.5])

    @classmethod
    def with_current_fields(cls, raw: dict[str, Any]) -> dict[str, Any]:
        if "at_most" not in raw and "at_least" not in raw:
            # Set here, so that an experiment's own copy of the config says it explicitly.
            return {"smaller_is_better": True, **raw}
        if "smaller_is_better" in raw:
            raise ValueError(
                "smaller_is_better: a constraint is not optimized; remove it, or the limit, or give an objective and a "
                "constraint of this name"
            )
        return raw


def objectives_of(metrics: list[MetricChoice]) -> Objectives:
    return Objectives(
        tuple(
            Metric(
                name=each.name,
                smaller_is_better=each.smaller_is_better is not False,
                at_most=each.at_most,
                at_least=each.at_least,
            )
            for each in metrics
        )
    )


def _have_objective(metrics: list[MetricChoice]) -> list[MetricChoice]:
    objectives_of(metrics)
    return metrics


class SamplerChoice(Section):
    """The sampler of hyperparameters."""

    place: ClassVar[str] = "searcher.sampler"

    name: str = Field(
        default="random",
        min_length=1,
        description="random, multi_fidelity, tpe, gp, nsga2, cmaes, another Optuna sampler, or module:Class. With pbt: "
        "random, pb2, or module:Class",
        examples=["tpe"],
    )
    options: dict[str, Any] = Field(
        default_factory=dict, description="arguments of the sampler", examples=[{"n_startup_trials": 20}]
    )


Metrics: TypeAlias = Annotated[list[MetricChoice], AfterValidator(_have_objective)]
SamplerField: TypeAlias = Annotated[SamplerChoice, BeforeValidator(named, json_schema_input_type=str | SamplerChoice)]
MaxTrials: TypeAlias = Annotated[int, Field(ge=1, le=MAX_TRIALS)]
PopulationSize: TypeAlias = Annotated[int, Field(ge=2, le=MAX_POPULATION)]
Points: TypeAlias = list[dict[str, Any]]
_Names: TypeAlias = str | int | list[str | int]
_POINTS = "hyperparameters of the first trials"
RungCount: TypeAlias = Annotated[int, Field(ge=1, le=MAX_RUNGS)]


class Searcher(Section):
    """The search: its method, its metric, and the length of trials."""

    place: ClassVar[str] = "searcher"

    name: str = _NAME
    metric: str | None = Field(
        default=None,
        min_length=1,
        description="the validation metric to optimize. Either this or metrics is required",
        examples=["validation_loss"],
    )
    metrics: Metrics | None = Field(
        default=None,
        description="several metrics to optimize, and constraints, instead of metric and smaller_is_better",
        examples=[[{"name": "validation_loss"}, {"name": "latency_ms"}, {"name": "memory_mb", "at_most": 8000}]],
    )
    smaller_is_better: bool = Field(
        default=True, description="true: minimize the metric; false: maximize it", examples=[True]
    )
    max_length: MaxLength | None = Field(
        default=None, description="maximum length of a trial", examples=[{"epochs": 16}]
    )
    source_trial_id: Annotated[
        str | None, BeforeValidator(as_text, json_schema_input_type=str), BeforeValidator(_no_number)
    ] = Field(
        default=None,
        min_length=1,
        description="the directory of a trial. Every new trial starts from its latest checkpoint",
        examples=["/mnt/results/digits/trial_7"],
    )
    source_checkpoint_uuid: Annotated[str | None, BeforeValidator(as_text)] = Field(
        default=None,
        min_length=1,
        description="a checkpoint of dray or Determined from which every trial starts: its directory, or its UUID in "
        "checkpoint_storage",
        examples=["/mnt/results/digits/trial_7/checkpoint_352"],
    )

    _extended_to: int | None = PrivateAttr(default=None)

    @property
    def objectives(self) -> Objectives | None:
        """The objectives and constraints of ``metrics``; None if there is one ``metric``."""
        return None if self.metrics is None else objectives_of(self.metrics)

    @property
    def first_metric(self) -> str:
        """The metric that the search optimizes, or the first objective."""
        if (objectives := self.objectives) is not None:
            return objectives.first.name
        assert self.metric is not None, "the rules require it"
        return self.metric

    @property
    def sign(self) -> int:
        """1 if smaller values of ``first_metric`` are better, else -1: ``sign * value`` is always minimized."""
        objectives = self.objectives
        return 1 if (self.smaller_is_better if objectives is None else objectives.first.smaller_is_better) else -1

    @property
    def trial_count(self) -> int | None:
        """``max_trials``, or the number set by an extension; None if the method determines it."""
        return self._extended_to

    @property
    def time(self) -> tuple[int, str] | None:
        """The maximum length of a trial and its unit, if ``max_time`` is set."""
        return None

    @property
    def length(self) -> int | None:
        """The maximum length of a trial, in the searcher's unit; None if a program's ``fit()`` sets it."""
        if self.time is not None:
            return self.time[0]
        return None if self.max_length is None else self.max_length.value

    @property
    def unit(self) -> str:
        """The searcher's unit of length: batches, epochs, records, or a metric's name."""
        if self.time is not None:
            return self.time[1]
        return "batches" if self.max_length is None else self.max_length.unit

    @property
    def counted_by(self) -> str | None:
        """The validation metric that is the unit of length; None for units that every trial counts itself."""
        return None if self.time is None or self.time[1] in COUNTED else self.time[1]

    @property
    def counted_length(self) -> Length | None:
        """The maximum length of a trial in a unit that every trial counts itself."""
        if self.time is None or self.counted_by is not None:
            return self.max_length
        return Length(unit=cast(LengthUnit, self.unit), value=self.time[0])

    def with_trials(self, count: int) -> Self:
        copy = self.model_copy()
        copy._extended_to = count
        return copy

    def with_length(self, length: int) -> Self:
        if self.time is not None:
            return self.model_copy(update={"max_time": length})
        return self.model_copy(update={"max_length": Length(unit=cast(LengthUnit, self.unit), value=length)})


class _Timed(Searcher):
    """A method whose rungs may be in the unit of a metric, such as seconds."""

    max_time: int | None = Field(
        default=None, ge=1, description="maximum length of a trial, measured by time_metric", examples=[600]
    )
    time_metric: str | None = Field(
        default=None,
        min_length=1,
        description="the unit of max_time and the rungs: batches, epochs, or a validation metric",
        examples=["seconds"],
    )

    @property
    def time(self) -> tuple[int, str] | None:
        return None if self.max_time is None else (self.max_time, str(self.time_metric))


class _Concurrent(Searcher):
    """A method that runs several trials at a time."""

    max_concurrent_trials: int = Field(
        default=16,
        ge=0,
        le=MAX_TRIALS,
        description="maximum number of trials that run at a time. 0: 10,000 for random and grid, and divisor to "
        "the power of num_rungs - 1 for the others",
        examples=[16],
    )


class PointedSearcher(Searcher):
    """A method that draws hyperparameters, but may begin with given ones."""

    points: Points = Field(default_factory=list, description=_POINTS, examples=[[{"lr": 0.01}]])
    like: Annotated[list[str], BeforeValidator(_as_names, json_schema_input_type=_Names)] = Field(
        default_factory=list,
        description="earlier experiments from which to learn the first points: numbers, names, patterns such as "
        "digits-*, or paths",
        examples=[["12", "digits-*"]],
    )


class SamplingSearcher(PointedSearcher):
    """A method that draws hyperparameters from a sampler."""

    sampler: SamplerField = Field(
        default_factory=SamplerChoice, description="how hyperparameters are sampled", examples=["tpe"]
    )


class _Budgeted(_Concurrent):
    """A method that runs a given number of trials."""

    max_trials: MaxTrials | None = Field(
        default=None,
        description="number of trials. May be omitted if budget, until or patience ends the search",
        examples=[64],
    )
    prior: dict[str, dict[str, Any]] = Field(
        default_factory=dict,
        description="where you expect the best values of hyperparameters, by dotted name. Used by auto and the sampler "
        "multi_fidelity",
        examples=[{"lr": {"around": 0.001, "within": 3}}],
    )

    @property
    def trial_count(self) -> int | None:
        return self.max_trials

    def with_trials(self, count: int) -> Self:
        return self.model_copy(update={"max_trials": count})


class _Halving(_Budgeted, SamplingSearcher, _Timed):
    """A method that compares trials at rungs."""

    divisor: Annotated[float, AfterValidator(int_if_whole)] = Field(
        default=4, gt=1, description="one in this many trials continues at each rung", examples=[4]
    )
    variant: Variant = Field(
        default="stopping",
        description="what happens to a trial that does not continue at a rung. stopping: it ends; promotion: it "
        "pauses, and may continue later",
        examples=["promotion"],
    )
    skip_uninformative_rungs: bool = Field(
        default=False,
        description="let more trials than one in divisor continue at rungs that predict the next rung poorly",
        examples=[True],
    )
    stop_once: bool | None = Field(
        default=None, description="as in Determined: true means stopping, false means promotion", examples=[True]
    )

    @classmethod
    def with_current_fields(cls, raw: dict[str, Any]) -> dict[str, Any]:
        replace_older_field(raw, cls.place, "stop_once", "variant", {True: "stopping", False: "promotion"})
        return raw


class SingleSearcher(Searcher):
    """One trial."""

    name: Literal["single"] = _NAME


class GridSearcher(_Concurrent):
    """A trial for each point of a grid."""

    name: Literal["grid"] = _NAME
    max_points: int = Field(
        default=MAX_POINTS, ge=1, le=MAX_GRID, description="the most points that the grid may have", examples=[100_000]
    )


class RandomSearcher(_Budgeted, SamplingSearcher):
    """Independent trials of the same length."""

    name: Literal["random"] = _NAME


class ASHASearcher(_Halving):
    """Asynchronous successive halving."""

    name: Literal["asha", "async_halving"] = _NAME
    num_rungs: RungCount = Field(description="number of rungs: lengths at which trials are compared", examples=[3])


class AdaptiveASHASearcher(_Halving):
    """Asynchronous successive halving in several brackets."""

    name: Literal["adaptive_asha"] = _NAME
    mode: Mode = Field(
        default="standard",
        description="number of brackets. aggressive: one; conservative: the most",
        examples=["standard"],
    )
    max_rungs: RungCount = Field(default=5, description="maximum number of rungs of a bracket", examples=[5])
    bracket_rungs: list[RungCount] = Field(
        default_factory=list,
        max_length=MAX_RUNGS,
        description="number of rungs of each bracket, instead of mode",
        examples=[[3, 2]],
    )


class AutoSearcher(_Budgeted, PointedSearcher):
    """The recommended search: asynchronous successive halving with fixed settings, and a model of the results."""

    name: Literal["auto"] = _NAME


class PBTSearcher(SamplingSearcher):
    """Population-based training."""

    name: Literal["pbt"] = _NAME
    population: PopulationSize = Field(description="number of trials that train side by side", examples=[8])
    interval: MaxLength = Field(
        description="length of training between two comparisons, in the unit of max_length", examples=[{"epochs": 1}]
    )
    quantile: float = Field(
        default=0.25,
        gt=0,
        le=0.5,
        description="share of the population that is replaced at each comparison. Its replacements continue from the "
        "same share of best trials",
        examples=[0.25],
    )
    resample_probability: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="with sampler random: the probability that a new trial draws a hyperparameter anew instead of "
        "changing it. By default, 0.25",
        examples=[0.25],
    )
    factors: list[Annotated[float, Field(gt=0)]] | None = Field(
        default=None,
        min_length=1,
        description="with sampler random: a number is multiplied by one of these factors, drawn at random. By default, "
        "[0.8, 1.2]",
        examples=[[0.8, 1.2]],
    )


class CustomSearcher(SamplingSearcher, _Timed):
    """A search method given from Python, as in Determined."""

    name: Literal["custom"] = _NAME


class ClassSearcher(SamplingSearcher, _Timed):
    """A user's search method, imported from the model directory."""

    name: Annotated[str, WithJsonSchema({"type": "string", "pattern": CLASS_PATTERN})] = _NAME
    options: dict[str, Any] = Field(
        default_factory=dict, description="arguments of the class in name", examples=[{"max_trials": 64}]
    )


#: The model of each search method.
METHODS: dict[str, type[Searcher]] = {
    "single": SingleSearcher,
    "random": RandomSearcher,
    "grid": GridSearcher,
    "asha": ASHASearcher,
    "async_halving": ASHASearcher,
    "adaptive_asha": AdaptiveASHASearcher,
    "auto": AutoSearcher,
    "pbt": PBTSearcher,
    "custom": CustomSearcher,
    CLASS: ClassSearcher,
}
#: Methods of Determined's older configs, with their replacements.
_REMOVED = {
    "sync_halving": "asha (its max_length, num_rungs and divisor mean the same)",
    "adaptive": "adaptive_asha",
    "adaptive_simple": "adaptive_asha",
    "manual": "custom, with your own method",
}


class AnySearcher(GridSearcher, ASHASearcher, AdaptiveASHASearcher, PBTSearcher, ClassSearcher):
    """The fields of all search methods."""

    name: Annotated[str, unknown_kind(METHODS, _REMOVED)] = Field(  # type: ignore[assignment]
        description="the search method", examples=["asha"]
    )


BY_METHOD = Kinds("name", METHODS, unknown=AnySearcher)
