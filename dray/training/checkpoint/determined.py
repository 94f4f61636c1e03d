"""Reading checkpoints that Determined (0.12 to 0.38) wrote, as data, without running anything in them; and writing
ours in the format of 0.38.

File of the state        state_dict.pth, determined/state_dict.pth, pedl/state_dict.pth or checkpoint.pt
Keys of the state        lists as ours; or model_state_dict, optimizer_state_dict and lr_scheduler for single objects
Names of parameters      prefixed by DDP's `module.`, if the trial ran in several processes
Position                 trial_state.pkl; before 0.18 workload_sequencer.pkl; before 0.15 only the master knew it
About the trial          load_data.json; before 0.17.8 metadata.json, which `Checkpoint.download()` wrote
RNG state                in the state, of the chief
"""

from __future__ import annotations

import json
import logging
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
import torch

from dray.storage import determined_state
from dray.training import rng
from dray.training.checkpoint.plain_state import read_json
from dray.training.parallel.division import Division
from dray.training.progress import Progress

log = logging.getLogger(__name__)

LOAD_DATA = "load_data.json"
METADATA = "metadata.json"
POSITIONS = {
    "trial_state.pkl": ("batches_trained",),
    # The second key is that of 0.15 to 0.17.
    "workload_sequencer.pkl": ("steps_completed", "latest_batch"),
}
MAX_POSITION_BYTES = 1 << 20
_WITHOUT_POSITION = "remove the file to continue from the weights alone, counting from batch 0"

_SINGLE = {
    "model_state_dict": "models_state_dict",
    "optimizer_state_dict": "optimizers_state_dict",
    "lr_scheduler": "lr_schedulers_state_dict",
}


def is_legacy(directory: Path) -> bool:
    """Whether Determined wrote a checkpoint."""
    return determined_state(directory) is not None


def modern(state: Mapping[str, Any]) -> dict[str, Any]:
    """A state with the keys of ours; other keys stay.

    Raises:
        ValueError: it has both a single object and a list of such objects.
    """
    found = dict(state)
    for old, new in _SINGLE.items():
        if old in found:
            if new in found:
                raise ValueError(f"the checkpoint has both {old!r} and {new!r}, but must have only one of them")
            single = found.pop(old)
            found[new] = [] if single is None else [single]
        found.setdefault(new, [])
    found.setdefault("callbacks", {})
    if found.pop("amp_state", None) is not None:
        log.warning("ignoring the checkpoint's state of NVIDIA apex; use context.experimental.use_amp() instead")
    return found


def without_ddp_prefix(state: dict[str, Any], models: Sequence[torch.nn.Module]) -> None:
    """Remove the prefix `module.` from parameters' names, in place, unless the trial's models have it themselves."""
    for index, (model, saved) in enumerate(zip(models, state["models_state_dict"], strict=False)):
        own = model.state_dict().keys()
        if saved and all(name.startswith("module.") for name in saved) and not own <= saved.keys():
            state["models_state_dict"][index] = {name.removeprefix("module."): value for name, value in saved.items()}


def rng_of(state: Mapping[str, Any]) -> dict[str, Any] | None:
    """The RNG state as `rng.restore` takes it; None in checkpoints too old to have it."""
    saved = state.get("rng_state")
    if saved is None:
        return None
    found = rng.packed(saved["random_rng_state"], saved["np_rng_state"], saved["cpu_rng_state"])
    if "gpu_rng_state" in saved:
        found["cuda"] = saved["gpu_rng_state"]
    return found


def order_seeds(directory: Path, state: Mapping[str, Any], begun: Mapping[int, int]) -> dict[int, int]:
    """The seeds of the orders of epochs that had begun before a checkpoint, with `shuffle=True`.

    Such a seed was drawn when the epoch began, and is not in the checkpoint; but the state of torch's generator is, and
    has the last numbers drawn. If training draws none on the CPU, these are the seeds, and what torch draws for each
    validation, the last of which is known. Otherwise the result is arbitrary seeds, as good as any.

    Args:
        begun: the epochs, in order, each with the batches trained when its order was drawn (negative for the first).

    Returns:
        Seeds by epoch; only of epochs that had begun, and none if they can't be recovered.
    """
    generator = (state.get("rng_state") or {}).get("cpu_rng_state")
    progress = read_progress(directory)
    drawn: list[tuple[int, int]] = [(at, epoch) for epoch, at in begun.items() if at < progress.batches]
    if not drawn or generator is None or generator.numel() != MT19937_BYTES:
        return {}
    if progress.validated is not None and progress.validated > drawn[0][0]:
        # The validation's draw sorts before that of an epoch at the same number of batches.
        drawn.append((progress.validated, VALIDATION))
    numbers = mt19937_drawn(generator, 2 * len(drawn))
    if numbers is None:
        return {}
    pairs = zip(sorted(drawn), numbers[::2], numbers[1::2], strict=True)
    return {epoch: (high << 32 | low) % 2**63 for (_, epoch), high, low in pairs if epoch != VALIDATION}


VALIDATION = -1
MT19937_BYTES = 5056
"""Size of the CPU generator's state: seed, numbers left, seeded?, index of the next, 624 words of 8 bytes, ..."""


def mt19937_drawn(state: torch.Tensor, count: int) -> list[int] | None:
    """The last `count` 32-bit numbers that torch's CPU generator drew; None if its state has been refilled since."""
    content = state.numpy().tobytes()
    following = int.from_bytes(content[16:24], "little")
    if following < count:
        return None
    words = np.frombuffer(content, dtype=np.uint64, count=624, offset=24)[following - count : following]
    found = []
    for word in map(int, words):
        word ^= word >> 11
        word ^= word << 7 & 0x9D2C5680
        word ^= word << 15 & 0xEFC60000
        found.append((word ^ word >> 18) & 0xFFFFFFFF)
    return found


def read_progress(directory: Path) -> Progress:
    """How far training had come, in batches.

    Raises:
        ValueError: the position's file has something else in it, or objects instead of plain data.
    """
    for name, keys in POSITIONS.items():
        path = directory / name
        if not path.exists():
            continue
        position = _unpickle(path)
        if not isinstance(position, dict):
            raise ValueError(f"{path} must hold a dict with the position of training, got {position!r}")
        batches = next((position[key] for key in keys if key in position), None)
        validated = position.get("last_val") or None
        if not _is_count(batches) or not (validated is None or _is_count(validated)):
            raise ValueError(f"{path} must say how many batches were trained ({' or '.join(keys)}), got {position!r}")
        return Progress(batches=batches, validated=validated, saved=batches)
    batches = (read_json(directory / METADATA) or {}).get("steps_completed")
    if _is_count(batches):
        return Progress(batches=batches, saved=batches)
    log.warning(
        "%s does not say how far training had come (before version 0.15 only Determined's master knew): training "
        "continues from its weights, counting from batch 0",
        directory,
    )
    return Progress()


def write(
    directory: Path,
    *,
    state: Mapping[str, Any],
    rng_state: Mapping[str, Any] | None,
    progress: Progress,
    epoch_length: int | None,
    about: Mapping[str, Any],
) -> None:
    """Write the files besides code/ of a checkpoint that Determined 0.38.1 loads and resumes from.

    It loads as data, torch's default since 2.6, which Determined's own checkpoints do not.

    Args:
        directory: where to write them.
        state: a state of ours.
        rng_state: the chief's, as returned by `rng.capture`; None if unknown.
        progress, epoch_length: the position of training; epoch_length None for one endless epoch.
        about: trial_cls_spec, hparams, experiment_config, framework.
    """
    saved = dict(state)
    if rng_state is not None:
        saved["rng_state"] = _rng_state(rng_state)
    torch.save(saved, directory / "state_dict.pth")
    batches = progress.batches
    position = {
        # The id of a local run. In any other trial Determined takes the weights only, and counts from 0.
        "trial_id": 0,
        "last_ckpt": batches,
        "step_id": 0,
        "last_val": progress.validated or 0,
        "batches_trained": batches,
        "epochs_trained": 0 if epoch_length is None else batches // epoch_length,
    }
    (directory / "trial_state.pkl").write_bytes(pickle.dumps(position, protocol=4))
    load_data = {
        "trial_type": "PyTorchTrial",
        "experiment_config": about["experiment_config"],
        "hparams": about["hparams"],
        "trial_cls_spec": about["trial_cls_spec"],
        # So that the class is made with a plain context, or may be passed.
        "is_trainer": True,
    }
    (directory / LOAD_DATA).write_text(json.dumps(load_data))
    metadata = {"steps_completed": batches, "framework": about["framework"], "format": "pickle"}
    (directory / METADATA).write_text(json.dumps(metadata))


def _rng_state(packed: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of `rng_of`, in plain data: NumPy takes a list instead of its array."""
    python, numpy = packed["python"], packed["numpy"]
    found = {
        "cpu_rng_state": packed["torch"],
        "np_rng_state": (
            numpy["name"],
            numpy["keys"].tolist(),
            numpy["position"],
            numpy["has_gauss"],
            numpy["cached"],
        ),
        "random_rng_state": (python["version"], tuple(python["words"].tolist()), python["gauss"]),
    }
    if "cuda" in packed:
        found["gpu_rng_state"] = packed["cuda"]
    return found


def describe(directory: Path) -> dict[str, Any]:
    """About the trial: trial_cls_spec, hparams, experiment_config; None for what is unknown."""
    found = read_json(directory / LOAD_DATA) or read_json(directory / METADATA) or {}
    config = found.get("experiment_config")
    spec = found.get("trial_cls_spec") or (config or {}).get("entrypoint")
    return {
        # Later entrypoints are commands; only "module:Class" names a class.
        "trial_cls_spec": spec if isinstance(spec, str) and ":" in spec and " " not in spec.strip() else None,
        "hparams": found.get("hparams"),
        "experiment_config": config,
    }


def read_division(directory: Path) -> Division | None:
    """The number of processes, and the batch size of each, assuming that it is the global one divided by the slots."""
    about = describe(directory)
    resources = (about["experiment_config"] or {}).get("resources") or {}
    slots, size = resources.get("slots_per_trial"), (about["hparams"] or {}).get("global_batch_size")
    if isinstance(slots, float) and 0 < slots < 1:  # a trial of ours, exported: one process on a share of a slot
        slots = 1
    if not _is_count(slots) or not _is_count(size) or slots < 1 or size < slots:
        return None
    return Division(replicas=slots, batch_size=size // slots)


class _PlainUnpickler(pickle.Unpickler):
    """Reads numbers, strings and containers of them. For anything else a pickle must name something to call."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        raise pickle.UnpicklingError(f"it names {module_name}.{global_name}")


def _unpickle(path: Path) -> Any:
    if path.stat().st_size > MAX_POSITION_BYTES:
        raise ValueError(
            f"{path} has {path.stat().st_size} bytes, too many for the position of training (at most "
            f"{MAX_POSITION_BYTES}); {_WITHOUT_POSITION}"
        )
    try:
        with path.open("rb") as file:
            return _PlainUnpickler(file).load()
    except Exception as error:  # a damaged pickle can make the unpickler raise anything
        raise ValueError(
            f"{path} can't be read as plain data: {error}; nothing in it was run; {_WITHOUT_POSITION}"
        ) from error


def _is_count(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
