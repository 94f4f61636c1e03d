"""The section ``loggers``: where else an experiment is recorded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal, TypeAlias

from pydantic import Field

from dray.config.section import Section, Url


class MLflow(Section):
    """Where MLflow stores its runs: one for the experiment, and a nested one for each trial."""

    place: ClassVar[str] = "loggers.mlflow"

    tracking_uri: Url | None = Field(
        default=None,
        description="URI of the tracking server; MLFLOW_TRACKING_URI by default",
        examples=["http://mlflow:5000"],
    )
    experiment_name: str | None = Field(
        default=None,
        min_length=1,
        description="MLflow experiment; by default, the name of this experiment",
        examples=["digits"],
    )


class WandB(Section):
    """Where Weights & Biases stores its runs: one for each trial, in a group for the experiment."""

    place: ClassVar[str] = "loggers.wandb"

    project: str | None = Field(
        default=None, min_length=1, description="the project; by default, the experiment's name", examples=["digits"]
    )
    entity: str | None = Field(default=None, min_length=1, description="a user or a team", examples=["my-team"])
    mode: Literal["online", "offline"] | None = Field(
        default=None,
        description="offline: write to the experiment's directory, for wandb sync; WANDB_MODE by default",
        examples=["offline"],
    )


class Loggers(Section):
    """Experiment trackers to log to as well. A list works too: ``[mlflow, wandb]``."""

    place: ClassVar[str] = "loggers"

    mlflow: MLflow | None = Field(default=None, description="MLflow", examples=[{"tracking_uri": "http://mlflow:5000"}])
    wandb: WandB | None = Field(default=None, description="Weights & Biases", examples=[{"project": "digits"}])


_Form: TypeAlias = Literal["mlflow", "wandb"] | Loggers
LoggersForm: TypeAlias = _Form | list[_Form]


def named_loggers(raw: object) -> object:
    """A list of names, or of names with fields, as a mapping."""
    named: dict[object, object] = {}
    for each in raw if isinstance(raw, list) else [raw]:
        if isinstance(each, str):
            named.setdefault(each, {})
        elif isinstance(each, Mapping):
            named |= {name: {} if fields is None else fields for name, fields in each.items()}
        else:
            return raw
    return named
