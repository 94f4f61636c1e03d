"""The field ``searcher.sampler``: how hyperparameters are sampled; a name, or a name and options."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, TypeAlias

from pydantic import BeforeValidator, Field

from dray.config.section import Section


def _named(raw: object) -> object:
    return {"name": raw} if isinstance(raw, str) else raw


class SamplerChoice(Section):
    """How hyperparameters are sampled."""

    place: ClassVar[str] = "searcher.sampler"

    name: str = Field(
        default="random",
        min_length=1,
        description="random, multi_fidelity, tpe, gp, nsga2, cmaes, another Optuna sampler, or module:Class",
        examples=["tpe"],
    )
    options: dict[str, Any] = Field(
        default_factory=dict, description="arguments of the sampler", examples=[{"n_startup_trials": 20}]
    )


Sampler: TypeAlias = Annotated[SamplerChoice, BeforeValidator(_named, json_schema_input_type=str | SamplerChoice)]
