"""The description of a trial in its checkpoints, from which it can be built again."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from dray.hosts import LocalHost
from dray.masking import masked, texts
from dray.pytorch.trial import PyTorchTrial
from dray.pytorch.trial_run import TrialRun
from dray.training.checkpoint import source
from dray.training.checkpoint.files import Description
from dray.training.parallel.division import Division


def describe(trial: PyTorchTrial, run: TrialRun, division: Division | None) -> Description:
    """The trial's class, code, config and hyperparameters, and how its data were divided when it started."""
    host = run.host
    code = {}
    if host.code_dir is not None:
        leave_out = host.directory.parent if isinstance(host, LocalHost) else None
        secrets = [*host.secrets, *texts(run.config or {})]
        code = source.collect(host.code_dir, leave_out=leave_out, secrets=secrets)
    config = None if run.config is None else masked(run.config)
    return Description(
        metadata={
            "framework": f"torch-{torch.__version__}",
            "format": "dray",
            "trial_type": "PyTorchTrial",
            "trial_cls_spec": _class_spec(type(trial), host.code_dir),
            "experiment_id": host.experiment_id,
            "trial_id": host.trial_id,
            "trial_seed": run.seed,
            "hparams": run.hparams,
            "experiment_config": config,
        },
        hparams=run.hparams,
        experiment=config,
        code=code,
        division=division,
        epoch_length=run.position.epoch_length,
        total_batches=run.total_batches,
        sharing=run.mesh_shape.tp,
    )


def _class_spec(cls: type, code_dir: Path | None) -> str:
    """module:Class, importable from the checkpoint's code/."""
    module = cls.__module__
    if module == "__main__" and (file := getattr(sys.modules["__main__"], "__file__", None)):
        path = Path(file).resolve()
        if code_dir is not None and path.is_relative_to(code_dir.resolve()):
            path = path.relative_to(code_dir.resolve())
            module = ".".join(path.with_suffix("").parts)
        else:
            module = path.stem
    return f"{module}:{cls.__qualname__}"
