"""A trained trial out of a checkpoint's directory."""

from __future__ import annotations

import contextlib
import importlib
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch

from dray.core import DistributedContext
from dray.hosts import LocalHost
from dray.pytorch.context import PyTorchTrialContext
from dray.pytorch.trial import PyTorchTrial
from dray.storage import verify
from dray.training import checkpoint

log = logging.getLogger(__name__)


class CheckpointLoadContext(PyTorchTrialContext):
    """A context to make a trial with outside of training, such as to load a checkpoint into it.

    Args:
        hparams: hyperparameters, for `get_hparam`.
        exp_conf: an experiment config, for `get_experiment_config`.
    """

    def __init__(self, hparams: dict[str, Any] | None = None, exp_conf: dict[str, Any] | None = None) -> None:
        super().__init__(
            host=LocalHost(trial_seed=0),
            distributed=DistributedContext(),
            device=torch.device("cuda" if torch.cuda.is_available() else "cpu"),
            trial_seed=0,
            hparams=hparams,
            exp_conf=exp_conf,
            enable_tensorboard_logging=False,
        )


def load_trial_from_checkpoint_path(
    path: str | Path,
    trial_class: type[PyTorchTrial] | None = None,
    trial_kwargs: dict[str, Any] | None = None,
    torch_load_kwargs: dict[str, Any] | None = None,
    **kwargs: Any,
) -> PyTorchTrial:
    """The trial that wrote a checkpoint, with the weights that it had.

    Args:
        path: the checkpoint's directory.
        trial_class: of the trial; imported from the checkpoint's code/ if None.
        trial_kwargs: arguments of its constructor beside `context`; a `context` among them is used in the place of one
            with the checkpoint's hyperparameters.
        torch_load_kwargs: passed to `torch.load`.
        kwargs: deprecated, the same.

    Returns:
        The trial, its models restored, in train mode as constructed.

    Raises:
        ValueError: both torch_load_kwargs and kwargs are given; the checkpoint is damaged or does not fit.
        FileNotFoundError: there is no such directory.
    """
    if kwargs and torch_load_kwargs:
        raise ValueError(
            f"give torch.load's arguments as torch_load_kwargs only, not also as keywords ({', '.join(sorted(kwargs))})"
        )
    if kwargs:
        log.warning("load_trial_from_checkpoint_path(**kwargs) is deprecated: use torch_load_kwargs")
    directory = verify(Path(path))
    metadata = checkpoint.read_json(directory / checkpoint.METADATA) or {}
    arguments = dict(trial_kwargs or {})
    context = arguments.pop("context", None) or CheckpointLoadContext(
        hparams=metadata.get("hparams"), exp_conf=metadata.get("experiment_config")
    )
    if trial_class is None:
        trial_class = _import_class(directory / "code", metadata.get("trial_cls_spec"))
    trial = trial_class(context, **arguments)
    state = checkpoint.read_state(directory, **(torch_load_kwargs or kwargs))
    context._optimisation.load_models(state)
    return trial


def _import_class(code: Path, spec: str | None) -> type[PyTorchTrial]:
    if not spec or ":" not in spec:
        raise ValueError(f"{code.parent} does not say which class its trial was; pass trial_class=")
    module_name, _, class_name = spec.partition(":")
    with _importing_from(code):
        try:
            found: Any = importlib.import_module(module_name)
            for part in class_name.split("."):
                found = getattr(found, part)
        except (ImportError, AttributeError) as error:
            raise ValueError(
                f"can't import the trial's class {spec!r} from {code}: {error}; pass trial_class="
            ) from error
    return cast("type[PyTorchTrial]", found)


@contextlib.contextmanager
def _importing_from(code: Path) -> Iterator[None]:
    """Import the modules below `code` from there, whatever of the same name was imported before; then forget them."""
    names = {path.stem for path in code.glob("*.py")} | {path.name for path in code.glob("*/") if path.is_dir()}
    before = {name: module for name, module in sys.modules.items() if name.partition(".")[0] in names}
    for name in before:
        del sys.modules[name]
    sys.path.insert(0, str(code))
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(str(code))
        for name in [name for name in sys.modules if name.partition(".")[0] in names]:
            del sys.modules[name]
        sys.modules.update(before)
