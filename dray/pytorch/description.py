"""The description of a trial in its checkpoints, from which the trial can be rebuilt."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dray.hosts import LocalHost
from dray.masking import masked, texts
from dray.pytorch.trial import PyTorchTrial
from dray.pytorch.trial_run import TrialRun
from dray.training.checkpoint import source
from dray.training.checkpoint.files import Description
from dray.training.parallel.mesh import Division

log = logging.getLogger(__name__)


def describe(trial: PyTorchTrial, run: TrialRun, division: Division | None) -> Description:
    """The trial's class, code, config, hyperparameters and initial division of the data."""
    host = run.host
    code = {}
    if host.code_dir is not None:
        leave_out = host.directory.parent if isinstance(host, LocalHost) else None
        secrets = [*host.secrets, *texts(run.config or {})]
        code = source.collect(host.code_dir, leave_out=leave_out, secrets=secrets)
    config = None if run.config is None else masked(run.config)
    only_text: list[str] = []
    hparams = None if run.hparams is None else _as_json(run.hparams, "", only_text)
    if only_text:
        log.warning(
            "checkpoints hold these hyperparameters only as text, and a trial that is loaded from one gets the text: "
            "%s; pass names or numbers, and make the objects from them in the trial's constructor",
            ", ".join(only_text),
        )
    return Description(
        metadata={
            "framework": f"torch-{torch.__version__}",
            "format": "dray",
            "trial_type": "PyTorchTrial",
            "trial_cls_spec": _class_spec(type(trial), host.code_dir),
            "experiment_id": host.experiment_id,
            "trial_id": host.trial_id,
            "trial_seed": run.seed,
            "hparams": hparams,
            "experiment_config": config,
        },
        hparams=hparams,
        experiment=config,
        code=code,
        division=division,
        epoch_length=run.position.epoch_length,
        total_batches=run.total_batches,
        sharing=run.mesh_shape.sharing,
    )


def _as_json(value: Any, path: str, only_text: list[str]) -> Any:
    """Convert a value to JSON types. Values that become text are added to `only_text`, by path and type."""
    if isinstance(value, Mapping):
        only_text += [f"the key {key!r} of {path or 'hparams'}" for key in value if not isinstance(key, str)]
        return {str(key): _as_json(item, f"{path}.{key}".lstrip("."), only_text) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_as_json(item, f"{path}[{index}]", only_text) for index, item in enumerate(value)]
    if value is None or isinstance(value, str | int | float | np.generic | np.ndarray):
        return value
    only_text.append(f"{path} ({type(value).__name__})")
    return str(value)


def _class_spec(cls: type, code_dir: Path | None) -> str:
    """`module:Class`, importable from the checkpoint's code/."""
    module = cls.__module__
    if module == "__main__" and (file := getattr(sys.modules["__main__"], "__file__", None)):
        path = Path(file).resolve()
        if code_dir is not None and path.is_relative_to(code_dir.resolve()):
            path = path.relative_to(code_dir.resolve())
            module = ".".join(path.with_suffix("").parts)
        else:
            module = path.stem
    return f"{module}:{cls.__qualname__}"
