"""The models of a config's sections, by their paths."""

from __future__ import annotations

from dray.config.environment import Environment
from dray.config.loggers import Loggers, MLflow, WandB
from dray.config.metrics import MetricChoice
from dray.config.notify import Notify
from dray.config.resources import MeshSizes, Resources, SlotRange
from dray.config.sampler import SamplerChoice
from dray.config.schema import ExperimentConfig, Optimizations, Profiling, Reproducibility
from dray.config.searcher import BY_METHOD, AnySearcher
from dray.config.section import Section
from dray.config.storage import BY_TYPE, AnyStorage

#: The model of each section by its path; of one with several kinds, the model that has the fields of all.
SECTIONS: dict[str, type[Section]] = {
    each.place: each
    for each in (
        ExperimentConfig,
        AnySearcher,
        MetricChoice,
        SamplerChoice,
        Resources,
        MeshSizes,
        SlotRange,
        Optimizations,
        Environment,
        AnyStorage,
        Loggers,
        MLflow,
        WandB,
        Notify,
        Profiling,
        Reproducibility,
    )
}
#: The sections of several kinds.
KINDS = {"searcher": BY_METHOD, "checkpoint_storage": BY_TYPE}
