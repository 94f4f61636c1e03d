"""Checkpoints that Determined wrote (0.12 to 0.38), read as ours are: as data, without running anything in them.

Where the state is       state_dict.pth, determined/state_dict.pth, pedl/state_dict.pth or checkpoint.pt
Keys of the state        lists as ours; or model_state_dict, optimizer_state_dict and lr_scheduler for a single one
Names of parameters      with DDP's `module.` before them, if the trial ran over several processes
Position                 trial_state.pkl; before 0.18 workload_sequencer.pkl; before 0.15 the master knew it alone
What the trial was       load_data.json; before 0.17.8 metadata.json, which `Checkpoint.download()` wrote
Random numbers           in the state, of the chief
"""

from __future__ import annotations

import json
import logging
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard

import torch

from dray.storage import determined_state
from dray.training import rng
from dray.training.progress import Progress

log = logging.getLogger(__name__)

LOAD_DATA = "load_data.json"
METADATA = "metadata.json"
POSITIONS = {
    "trial_state.pkl": ("batches_trained",),
    # The second name is that of 0.15 to 0.17.
    "workload_sequencer.pkl": ("steps_completed", "latest_batch"),
}
MAX_POSITION_BYTES = 1 << 20

_SINGLE = {
    "model_state_dict": "models_state_dict",
    "optimizer_state_dict": "optimizers_state_dict",
    "lr_scheduler": "lr_schedulers_state_dict",
}


def is_legacy(directory: Path) -> bool:
    """Whether a checkpoint is one of Determined's."""
    return determined_state(directory) is not None


def modern(state: Mapping[str, Any]) -> dict[str, Any]:
    """A state with the keys that ours have; what else is in it stays.

    Raises:
        ValueError: a single object and a list of such objects are both in it.
    """
    found = dict(state)
    for old, new in _SINGLE.items():
        if old in found:
            if new in found:
                raise ValueError(f"the checkpoint has both {old!r} and {new!r}, and should have one of them")
            single = found.pop(old)
            found[new] = [] if single is None else [single]
        found.setdefault(new, [])
    found.setdefault("callbacks", {})
    if found.pop("amp_state", None) is not None:
        log.warning("the checkpoint's state of NVIDIA apex is left out: use context.experimental.use_amp()")
    return found


def without_ddp_prefix(state: dict[str, Any], models: Sequence[torch.nn.Module]) -> None:
    """Take `module.` off the names of parameters, in place, where the trial's models do not have it themselves."""
    for index, (model, saved) in enumerate(zip(models, state["models_state_dict"], strict=False)):
        own = model.state_dict().keys()
        if saved and all(name.startswith("module.") for name in saved) and not own <= saved.keys():
            state["models_state_dict"][index] = {name.removeprefix("module."): value for name, value in saved.items()}


def rng_of(state: Mapping[str, Any]) -> dict[str, Any] | None:
    """The random number generators as `rng.restore` takes them; None if the checkpoint is older than their keeping."""
    saved = state.get("rng_state")
    if saved is None:
        return None
    found = rng.packed(saved["random_rng_state"], saved["np_rng_state"], saved["cpu_rng_state"])
    if "gpu_rng_state" in saved:
        found["cuda"] = saved["gpu_rng_state"]
    return found


def read_progress(directory: Path) -> Progress:
    """How far training had come, in batches.

    Raises:
        ValueError: a file that should say so says something else, or holds objects in the place of plain data.
    """
    for name, keys in POSITIONS.items():
        path = directory / name
        if not path.exists():
            continue
        position = _unpickle(path)
        if not isinstance(position, dict):
            raise ValueError(f"{path} should hold a dict with the position of training, it holds {position!r}")
        batches = next((position[key] for key in keys if key in position), None)
        validated = position.get("last_val") or None
        if not _is_count(batches) or not (validated is None or _is_count(validated)):
            raise ValueError(f"{path} should say how many batches were trained ({' or '.join(keys)}), got {position!r}")
        return Progress(batches=batches, validated=validated, saved=batches)
    batches = (_read_json(directory / METADATA) or {}).get("steps_completed")
    if _is_count(batches):
        return Progress(batches=batches, saved=batches)
    log.warning(
        "%s does not say how far training had come (before version 0.15 Determined's master alone knew): its weights "
        "are gone on from, counting from batch 0",
        directory,
    )
    return Progress()


def describe(directory: Path) -> dict[str, Any]:
    """What the trial was: trial_cls_spec, hparams, experiment_config; None for what is not known."""
    found = _read_json(directory / LOAD_DATA) or _read_json(directory / METADATA) or {}
    config = found.get("experiment_config")
    spec = found.get("trial_cls_spec") or (config or {}).get("entrypoint")
    return {
        # Later entrypoints are commands; only "module:Class" names a class.
        "trial_cls_spec": spec if isinstance(spec, str) and ":" in spec and " " not in spec.strip() else None,
        "hparams": found.get("hparams"),
        "experiment_config": config,
    }


class _PlainUnpickler(pickle.Unpickler):
    """Reads numbers, strings and what holds them. A pickle can do nothing else without naming something to call."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        raise pickle.UnpicklingError(f"it names {module_name}.{global_name}")


def _unpickle(path: Path) -> Any:
    if path.stat().st_size > MAX_POSITION_BYTES:
        raise ValueError(f"{path} has {path.stat().st_size} bytes, far more than the position of training takes")
    try:
        with path.open("rb") as file:
            return _PlainUnpickler(file).load()
    except Exception as error:  # whatever a damaged pickle makes of the unpickler
        raise ValueError(
            f"{path} can't be read as plain data: {error}; nothing in it was run. Take the file away to go on from the "
            "weights alone, counting from batch 0"
        ) from error


def _is_count(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _read_json(path: Path) -> Any:
    return json.loads(path.read_text()) if path.exists() else None
