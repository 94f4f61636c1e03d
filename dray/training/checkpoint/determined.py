"""Reads Determined's checkpoints (0.18 to 0.38) as data, without running any code in them.

State               state_dict.pth: models_state_dict, optimizers_state_dict, lr_schedulers_state_dict, callbacks, and
                    the chief's rng_state
Parameter names     with DDP's prefix `module.` if the trial ran in several processes
Position            trial_state.pkl; before 0.21 workload_sequencer.pkl
Description         load_data.json
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard

import torch

from dray.training import rng
from dray.training.checkpoint.plain_state import read_json
from dray.training.parallel.mesh import Division
from dray.training.progress import Progress
from dray.training.units import is_int

log = logging.getLogger(__name__)

LOAD_DATA = "load_data.json"
#: The key of the number of batches trained, by file.
POSITIONS = {"trial_state.pkl": "batches_trained", "workload_sequencer.pkl": "steps_completed"}


def adapt(state: Mapping[str, Any], models: Sequence[torch.nn.Module]) -> dict[str, Any]:
    """Convert a state to dray's layout. The trial's models tell DDP's prefix from a submodule called `module`."""
    adapted: dict[str, Any] = {f"{kind}_state_dict": [] for kind in ("models", "optimizers", "lr_schedulers")}
    adapted = {**adapted, "callbacks": {}, **state}
    if adapted.pop("amp_state", None) is not None:
        log.warning("ignoring the checkpoint's state of NVIDIA apex; use context.experimental.use_amp() instead")
    adapted["models_state_dict"] = list(adapted["models_state_dict"])
    for index, (model, saved) in enumerate(zip(models, adapted["models_state_dict"], strict=False)):
        own = model.state_dict().keys()
        if saved and all(name.startswith("module.") for name in saved) and not own <= saved.keys():
            adapted["models_state_dict"][index] = {name.removeprefix("module."): value for name, value in saved.items()}
    return adapted


def rng_of(state: Mapping[str, Any]) -> dict[str, Any] | None:
    saved = state.get("rng_state")
    if saved is None:
        return None
    rng_state = rng.packed(saved["random_rng_state"], saved["np_rng_state"], saved["cpu_rng_state"])
    if "gpu_rng_state" in saved:
        rng_state["cuda"] = saved["gpu_rng_state"]
    return rng_state


def read_progress(directory: Path) -> Progress:
    name = next((name for name in POSITIONS if (directory / name).exists()), None)
    if name is None:
        log.warning(
            "%s has no %s, so its position is unknown: training continues from its weights, counting from batch 0",
            directory,
            " or ".join(POSITIONS),
        )
        return Progress()
    path, key = directory / name, POSITIONS[name]
    position = _unpickle(path)
    known = position if isinstance(position, dict) else {}
    batches, validated = known.get(key), known.get("last_val") or None
    if not _is_count(batches) or not (validated is None or _is_count(validated)):
        raise ValueError(f"{path} must hold the number of batches trained ({key}), got {position!r}")
    return Progress(batches=batches, validated=validated, saved=batches)


def describe(directory: Path) -> dict[str, Any]:
    """The trial's trial_cls_spec, hparams and experiment_config, each None if unknown."""
    description = read_json(directory / LOAD_DATA) or {}
    config = description.get("experiment_config")
    spec = description.get("trial_cls_spec") or (config or {}).get("entrypoint")
    return {
        # Later entrypoints are commands; only "module:Class" names a class.
        "trial_cls_spec": spec if isinstance(spec, str) and ":" in spec and " " not in spec.strip() else None,
        "hparams": description.get("hparams"),
        "experiment_config": config,
    }


def read_division(directory: Path) -> Division | None:
    """The division of the data, assuming that each process's batch size is the global one divided by the slots."""
    about = describe(directory)
    resources = (about["experiment_config"] or {}).get("resources") or {}
    slots, size = resources.get("slots_per_trial"), (about["hparams"] or {}).get("global_batch_size")
    if not _is_count(slots) or not _is_count(size) or slots < 1 or size < slots:
        return None
    return Division(replicas=slots, batch_size=size // slots)


class _PlainUnpickler(pickle.Unpickler):
    """Reads numbers, strings and containers of them. For anything else, a pickle must name a global to call."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        raise pickle.UnpicklingError(f"it names {module_name}.{global_name}")


def _unpickle(path: Path) -> Any:
    try:
        with path.open("rb") as file:
            return _PlainUnpickler(file).load()
    except Exception as error:  # a damaged pickle can make the unpickler raise anything
        raise ValueError(
            f"{path} can't be read as plain data: {error}; nothing in it was run; remove the file to continue from the "
            "weights alone, counting from batch 0"
        ) from error


def _is_count(value: Any) -> TypeGuard[int]:
    return is_int(value) and value >= 0
