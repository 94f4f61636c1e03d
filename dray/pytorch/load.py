"""Loading a trained trial from a checkpoint."""

from __future__ import annotations

import importlib
import inspect
import logging
from pathlib import Path
from typing import Any

import torch
from typing_extensions import TypeVar

from dray.compat import real_package_hint
from dray.core import DistributedContext
from dray.hosts import LocalHost
from dray.imports import import_from_path
from dray.pytorch.context import PyTorchTrialContext
from dray.pytorch.trial import PyTorchTrial
from dray.pytorch.trial_run import TrialRun
from dray.storage import opened
from dray.training.checkpoint import files, sharded
from dray.training.checkpoint.mapped import MappedTensors
from dray.training.optimisation import bare
from dray.training.parallel.device import CPU, is_for_cpus
from dray.training.units import Batch

T = TypeVar("T", bound=PyTorchTrial, default=Any)

log = logging.getLogger(__name__)


class CheckpointLoadContext(PyTorchTrialContext):
    """A context for making a trial outside training, for example to load a checkpoint into it.

    Args:
        hparams: the hyperparameters for `get_hparam`.
        exp_conf: the experiment config for `get_experiment_config`.
    """

    def __init__(self, hparams: dict[str, Any] | None = None, exp_conf: dict[str, Any] | None = None) -> None:
        super().__init__(
            TrialRun(
                host=LocalHost(trial_seed=0),
                peers=DistributedContext(),
                # On a GPU the current device, which a rank of a trial has set.
                device=CPU if is_for_cpus(exp_conf) or not torch.cuda.is_available() else torch.device("cuda"),
                hparams=hparams,
                config=exp_conf,
                max_length=Batch(1),  # nothing is trained, but the constructor may make a schedule
                enable_tensorboard_logging=False,
                shards=False,
            )
        )


def load_trial_from_checkpoint_path(
    path: str | Path,
    trial_class: type[T] | None = None,
    trial_kwargs: dict[str, Any] | None = None,
    torch_load_kwargs: dict[str, Any] | None = None,
    **kwargs: Any,
) -> T:
    """Load the trial that wrote a checkpoint, with its weights.

    Args:
        path: the directory of a checkpoint that dray or Determined wrote, or its URI, with credentials from the
            environment.
        trial_class: the trial's class. Default: imported from the checkpoint's code/.
        trial_kwargs: arguments of the constructor besides `context`. A `context` among them replaces the default one,
            which has the checkpoint's hyperparameters.
        torch_load_kwargs: arguments of `torch.load`.
        kwargs: deprecated; use torch_load_kwargs.

    Returns:
        The trial with its models restored, in eval mode: call `model.train()` to train them further.

    Raises:
        ValueError: both torch_load_kwargs and kwargs are given; the trial's constructor does not take trial_kwargs; the
            checkpoint is damaged or does not fit the trial.
        FileNotFoundError: there is no such directory.
        StorageError: the object store can't be used.
    """
    if kwargs and torch_load_kwargs:
        raise ValueError(
            "pass torch.load's arguments in torch_load_kwargs only, not also as keyword arguments "
            f"({', '.join(sorted(kwargs))})"
        )
    if kwargs:
        log.warning("load_trial_from_checkpoint_path(**kwargs) is deprecated: use torch_load_kwargs")
    arguments = dict(trial_kwargs or {})
    with opened(path, without_manifest=True) as directory:
        saved = files.describe(directory)
        context = arguments.pop("context", None)
        if context is None:
            context = CheckpointLoadContext(hparams=saved["hparams"], exp_conf=saved["experiment_config"])
            context._run.length = Batch(max(1, files.read_progress(directory).batches))
            context._run.position.epoch_length = files.read_length(directory, "epoch_length")
        cls: Any = trial_class or _import_class(directory / "code", saved["trial_cls_spec"])
        try:
            inspect.signature(cls).bind(context, **arguments)
        except TypeError as error:
            raise ValueError(f"can't construct {cls.__name__}: {error}; pass trial_kwargs={{...}}") from None
        trial: T = cls(context, **arguments)
        models = [bare(model) for model in context.models]
        state = files.read_state(directory, models, **(torch_load_kwargs or kwargs))
        mapped = MappedTensors(state)
        state = mapped.copied(state)
        sharded.load(state, directory, models)
        context._run.optimisation.load_models(state)
        mapped.release(models, [])
        context._run.optimisation.eval_mode()
        return trial


def _import_class(code: Path, spec: str | None) -> type[PyTorchTrial]:
    if not spec or ":" not in spec:
        raise ValueError(f"{code.parent} does not name the class of its trial; pass trial_class=...")
    module_name, _, class_name = spec.partition(":")
    try:
        with import_from_path(code):
            imported: Any = importlib.import_module(module_name)
            for part in class_name.split("."):
                imported = getattr(imported, part)
    except (ImportError, AttributeError, FileNotFoundError) as error:
        raise ValueError(
            f"can't import the trial's class {spec!r} from {code}: {error}; pass trial_class=..."
        ) from error
    if not (isinstance(imported, type) and issubclass(imported, PyTorchTrial)):
        hint = real_package_hint() or "pass trial_class=..."
        raise ValueError(f"{spec!r} from {code} must be a subclass of PyTorchTrial, got {imported!r}; {hint}")
    return imported
