"""dray trains PyTorch models and searches their hyperparameters on Ray.

The names below are loaded on first use, so that ``import dray.training.loop`` imports neither torch nor Ray.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from dray._version import __version__
from dray.text import LOG_FORMAT

if TYPE_CHECKING:
    from dray.errors import ConfigError as ConfigError
    from dray.errors import ExperimentError as ExperimentError
    from dray.errors import NoExperiment as NoExperiment
    from dray.experiment.experiment import Experiment as Experiment
    from dray.experiment.probe import probe as probe
    from dray.imports import import_from_path as import_from_path
    from dray.pytorch import InvalidHP as InvalidHP
    from dray.pytorch import PyTorchTrial as LegacyTrial
    from dray.pytorch import PyTorchTrialContext as TrialContext
    from dray.records.result import Result as Result
    from dray.serve.verbs.find import handle as handle
    from dray.training.cluster_info import ClusterInfo as ClusterInfo
    from dray.training.cluster_info import TrialInfo as TrialInfo
    from dray.training.cluster_info import get_cluster_info as get_cluster_info

_HOMES = {
    "ClusterInfo": "dray.training.cluster_info",
    "ConfigError": "dray.errors",
    "Experiment": "dray.experiment.experiment",
    "ExperimentError": "dray.errors",
    "Result": "dray.records.result",
    "InvalidHP": "dray.pytorch",
    "TrialInfo": "dray.training.cluster_info",
    "NoExperiment": "dray.errors",
    "get_cluster_info": "dray.training.cluster_info",
    "handle": "dray.serve.verbs.find",
    "import_from_path": "dray.imports",
    "probe": "dray.experiment.probe",
}

_RENAMED = {"LegacyTrial": "PyTorchTrial", "TrialContext": "PyTorchTrialContext"}
"""Determined's names, so that changing `determined` to `dray` in an import is enough."""

__all__ = [
    "LOG_FORMAT",
    "ClusterInfo",
    "ConfigError",
    "Experiment",
    "ExperimentError",
    "InvalidHP",
    "LegacyTrial",
    "NoExperiment",
    "Result",
    "TrialContext",
    "TrialInfo",
    "__version__",
    "get_cluster_info",
    "handle",
    "import_from_path",
    "probe",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES and name not in _RENAMED:
        raise AttributeError(f"module 'dray' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES.get(name, "dray.pytorch")), _RENAMED.get(name, name))
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES, *_RENAMED})
