"""The section ``searcher``: which trials run, for how long, and which fields each method uses."""

from __future__ import annotations

import difflib
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AfterValidator, BeforeValidator, Field

from dray.config.entrypoint import is_class
from dray.config.length import Length, LengthUnit, parse_length
from dray.config.section import Section, as_dict, as_text, whole_if_whole
from searchers.method import MAX_RUNGS, MAX_TRIALS

Variant: TypeAlias = Literal["stopping", "promotion"]
Mode: TypeAlias = Literal["aggressive", "standard", "conservative"]


#: Methods of Determined's older configs, and their successors.
_SUCCESSORS = {
    "sync_halving": "asha (its max_length, num_rungs and divisor mean the same)",
    "adaptive": "adaptive_asha",
    "adaptive_simple": "adaptive_asha",
    "manual": "custom, with your own method",
    "pbt": "adaptive_asha, or your own method",
}


#: The method that is given from Python, as in Determined.
CUSTOM = "custom"


def _method(raw: object) -> object:
    if isinstance(raw, str) and raw in _SUCCESSORS:
        raise ValueError(f"{raw} was removed, also from Determined; use {_SUCCESSORS[raw]}")
    if isinstance(raw, str) and not is_class(raw) and raw not in SEARCHER_FIELDS:
        near = difflib.get_close_matches(raw, SEARCHER_FIELDS, n=1)
        hint = f"did you mean {near[0]}?" if near else "for example name: asha"
        raise ValueError(f"must be one of {', '.join(SEARCHER_FIELDS)}, or module:Class, got {raw!r}; {hint}")
    return raw


def _named_sampler(raw: object) -> object:
    if isinstance(raw, str):
        return {"name": raw}
    return {field: value for field, value in raw.items() if value is not None} if isinstance(raw, dict) else raw


def _length(raw: object) -> Length:
    return parse_length(raw, minimum=1)


def _no_number(raw: object) -> object:
    if isinstance(raw, int) and not isinstance(raw, bool):
        raise ValueError(
            f"must be the directory of a trial, got {raw}: trial numbers are not unique here; for a Determined trial, "
            "set source_checkpoint_uuid instead, to the UUID of its latest checkpoint"
        )
    return raw


MaxLength: TypeAlias = Annotated[Length, BeforeValidator(_length), as_dict]


def variant_of(stop_once: bool) -> Variant:
    """The variant that Determined's ``stop_once`` means."""
    return "stopping" if stop_once else "promotion"


class SamplerChoice(Section):
    """How hyperparameters are sampled."""

    name: str = Field(
        default="random",
        min_length=1,
        description="random, tpe, gp, cmaes, another Optuna sampler, or module:Class",
        examples=["tpe"],
    )
    options: dict[str, Any] = Field(
        default_factory=dict, description="arguments of the sampler", examples=["{n_startup_trials: 20}"]
    )


#: The values of ``time_metric`` that no trial has to report.
OWN_TIMES: tuple[LengthUnit, ...] = ("batches", "epochs")


class Searcher(Section):
    """Which trials run, and for how long.

    In a file ``stop_once`` may stand for ``variant``; what ``load_config`` returns has ``variant`` only.
    """

    name: Annotated[str, BeforeValidator(_method)] = Field(description="the search method", examples=["asha"])
    metric: str = Field(
        min_length=1, description="the validation metric that the search optimizes", examples=["validation_loss"]
    )
    smaller_is_better: bool = Field(default=True, description="minimize the metric, else maximize it", examples=[True])
    max_length: MaxLength | None = Field(
        default=None, description="maximum length of a trial", examples=["{epochs: 16}"]
    )
    max_trials: int | None = Field(default=None, ge=1, le=MAX_TRIALS, description="number of trials", examples=[64])
    max_concurrent_trials: int = Field(
        default=16,
        ge=0,
        le=MAX_TRIALS,
        description="maximum number of trials that run at a time, 0 for no limit",
        examples=[16],
    )
    divisor: Annotated[float, AfterValidator(whole_if_whole)] = Field(
        default=4, gt=1, description="one in this many trials continues at each rung", examples=[4]
    )
    num_rungs: int | None = Field(
        default=None,
        ge=1,
        le=MAX_RUNGS,
        description="number of rungs, the lengths that trials are compared at",
        examples=[3],
    )
    variant: Variant = Field(
        default="stopping",
        description="what happens at a rung to a trial that does not continue: it is stopped for good, or paused, and "
        "perhaps promoted later",
        examples=["promotion"],
    )
    stop_once: bool | None = Field(
        default=None, description="as in Determined: true means stopping, false means promotion", examples=[True]
    )
    max_time: int | None = Field(
        default=None, ge=1, description="maximum length of a trial, measured by time_metric", examples=[600]
    )
    time_metric: str | None = Field(
        default=None,
        min_length=1,
        description="the unit of max_time and the rungs: batches, epochs, or a validation metric",
        examples=["seconds"],
    )
    mode: Mode = Field(default="standard", description="determines the number of brackets", examples=["standard"])
    max_rungs: int = Field(
        default=5, ge=1, le=MAX_RUNGS, description="maximum number of rungs of a bracket", examples=[5]
    )
    bracket_rungs: list[Annotated[int, Field(ge=1, le=MAX_RUNGS)]] = Field(
        default_factory=list,
        max_length=MAX_RUNGS,
        description="number of rungs of each bracket, instead of mode",
        examples=["[3, 2]"],
    )
    sampler: Annotated[SamplerChoice, BeforeValidator(_named_sampler)] = Field(
        default_factory=SamplerChoice, description="how hyperparameters are sampled", examples=["tpe"]
    )
    options: dict[str, Any] = Field(
        default_factory=dict, description="arguments of the class in name", examples=["{max_trials: 64}"]
    )
    points: list[dict[str, Any]] = Field(
        default_factory=list, description="hyperparameters of the first trials", examples=["[{lr: 0.01}]"]
    )

    source_trial_id: Annotated[str | None, BeforeValidator(as_text), BeforeValidator(_no_number)] = Field(
        default=None,
        min_length=1,
        description="a trial's directory; every trial starts from its latest checkpoint",
        examples=["/mnt/results/digits/trial_7"],
    )
    source_checkpoint_uuid: Annotated[str | None, BeforeValidator(as_text)] = Field(
        default=None,
        min_length=1,
        description="a checkpoint of dray or Determined that every trial starts from: its directory, or its UUID in "
        "checkpoint_storage",
        examples=["/mnt/results/digits/trial_7/checkpoint_352"],
    )

    @property
    def length(self) -> int | None:
        """The greatest length of a trial, in the search's unit."""
        if self.max_time is not None:
            return self.max_time
        return None if self.max_length is None else self.max_length.value

    @property
    def unit(self) -> str:
        """The search's unit of length: batches, epochs, records, or a metric's name."""
        if self.max_time is not None:
            return str(self.time_metric)
        return "batches" if self.max_length is None else self.max_length.unit

    @property
    def counted_length(self) -> Length | None:
        """``max_length``, or a ``max_time`` in batches or epochs, which every trial counts by itself."""
        unit = next((own for own in OWN_TIMES if own == self.time_metric), None)
        return self.max_length if unit is None or self.max_time is None else Length(unit=unit, value=self.max_time)

    @property
    def counted_by(self) -> str | None:
        """The validation metric that is the unit of length; None for units that every trial counts by itself."""
        return self.time_metric if self.max_time is not None and self.time_metric not in OWN_TIMES else None

    def of_length(self, length: int) -> Searcher:
        """The same with another ``length``, in the same unit."""
        if self.max_time is not None:
            return self.model_copy(update={"max_time": length})
        unit: LengthUnit = "batches" if self.max_length is None else self.max_length.unit
        return self.model_copy(update={"max_length": Length(unit=unit, value=length)})


_COMMON = frozenset({"name", "metric", "smaller_is_better", "max_length", "source_trial_id", "source_checkpoint_uuid"})
_GRID = _COMMON | {"max_concurrent_trials"}
_RANDOM = _GRID | {"max_trials", "sampler", "points"}
_HALVING = _RANDOM | {"divisor", "variant", "stop_once", "max_time", "time_metric"}
_ASHA = _HALVING | {"num_rungs"}
_ADAPTIVE = _HALVING | {"mode", "max_rungs", "bracket_rungs"}
_CUSTOM = _COMMON | {"sampler", "points", "max_time", "time_metric"}
_OWN = _CUSTOM | {"options"}


#: The fields under ``searcher`` that each method uses.
SEARCHER_FIELDS: dict[str, frozenset[str]] = {
    "single": _COMMON,
    "random": _RANDOM,
    "grid": _GRID,
    "asha": _ASHA,
    "async_halving": _ASHA,
    "adaptive_asha": _ADAPTIVE,
    CUSTOM: _CUSTOM,
}


def searcher_fields(name: str) -> frozenset[str]:
    """The fields under ``searcher`` that a method uses: one of dray's, or a class of the user's."""
    return _OWN if is_class(name) else SEARCHER_FIELDS[name]
