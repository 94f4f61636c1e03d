"""The models of a config's sections, by their paths."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from dray.config.environment import Environment
from dray.config.loggers import Loggers, MLflow, WandB
from dray.config.resources import Resources, SlotRange
from dray.config.sampler import SamplerChoice
from dray.config.schema import ExperimentConfig, Optimizations, Reproducibility
from dray.config.searcher import METHODS, AnySearcher
from dray.config.section import Section
from dray.config.storage import STORAGES, AnyStorage

#: The model of each section by its path; of one with several kinds, the model that has the fields of all.
SECTIONS: dict[str, type[Section]] = {
    each.place: each
    for each in (
        ExperimentConfig,
        AnySearcher,
        SamplerChoice,
        Resources,
        SlotRange,
        Optimizations,
        Environment,
        AnyStorage,
        Loggers,
        MLflow,
        WandB,
        Reproducibility,
    )
}


class Kinds(NamedTuple):
    """The kinds of a section.

    Attributes:
        field: The field that says which it is.
        models: By kind.
    """

    field: str
    models: Mapping[str, type[Section]]


KINDS = {"searcher": Kinds("name", METHODS), "checkpoint_storage": Kinds("type", STORAGES)}
