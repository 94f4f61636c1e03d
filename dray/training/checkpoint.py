"""What is in a checkpoint's directory.

state-dict.pth   models_state_dict, optimizers_state_dict, lr_schedulers_state_dict (lists), callbacks (dict), and
                 scaler_state_dict with AMP; plain tensors, without DDP's `module.` prefix
progress.json    how far training had come, over how many processes, and how the run divided its data when it began
rng/rank_N.pth   the random number generators of every rank
gradients/rank_N.pth   which the next batch adds to: of an aggregation that is cut in two, or kept by the trial's code
code/, experiment.yaml, hparams.json, metadata.json   what the trial was, so that it can be built again

Everything loads with `torch.load(weights_only=True)` (numpy arrays and scalars allowed by name): state is data, and
can't run code. What would not load so is refused when it is saved. Determined's checkpoints (see `legacy`) load too.
"""

from __future__ import annotations

import io
import json
import pickle
import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dray.storage import determined_state
from dray.training import legacy
from dray.training.division import Division
from dray.training.progress import Progress

STATE = "state-dict.pth"
PROGRESS = "progress.json"
METADATA = "metadata.json"
HPARAMS = "hparams.json"
EXPERIMENT = "experiment.yaml"


class UnsavableState(TypeError):
    """State that a checkpoint can't hold, because it could not be loaded as data."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankState:
    """What each rank adds of its own."""

    rng: dict[str, Any]
    gradients: list[list[torch.Tensor | None]] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """What the trial is, the same in all its checkpoints.

    Args:
        metadata: of `metadata.json`: the trial's class, versions.
        hparams, experiment: None if the run has none.
        code: source files by relative path.
        division: of the data; None with a loader of the user's own.
    """

    metadata: Mapping[str, Any]
    hparams: Mapping[str, Any] | None = None
    experiment: Mapping[str, Any] | None = None
    code: Mapping[str, bytes] = field(default_factory=dict)
    division: Division | None = None


def write(
    directory: Path,
    *,
    state: dict[str, Any],
    progress: Progress,
    ranks: Sequence[RankState],
    description: Description,
) -> None:
    """Fill a staged checkpoint directory.

    Raises:
        UnsavableState: state that `torch.load(weights_only=True)` would refuse.
    """
    check_savable(state)
    torch.save(state, directory / STATE)
    (directory / "rng").mkdir()
    for rank, part in enumerate(ranks):
        torch.save(part.rng, directory / "rng" / f"rank_{rank}.pth")
        if part.gradients is not None:
            (directory / "gradients").mkdir(exist_ok=True)
            torch.save(part.gradients, directory / "gradients" / f"rank_{rank}.pth")
    division = None if description.division is None else description.division.as_dict()
    _write_json(directory / PROGRESS, {**progress.as_dict(), "size": len(ranks), "division": division})
    _write_json(directory / METADATA, {**description.metadata, "steps_completed": progress.batches})
    if description.hparams is not None:
        _write_json(directory / HPARAMS, description.hparams)
    if description.experiment is not None:
        # JSON is YAML, and writing it costs a twentieth.
        _write_json(directory / EXPERIMENT, description.experiment)
    made: set[Path] = set()
    for name, content in description.code.items():
        path = directory / "code" / name
        if path.parent not in made:
            path.parent.mkdir(parents=True, exist_ok=True)
            made.add(path.parent)
        path.write_bytes(content)


def read_progress(directory: Path) -> Progress:
    """How far training had come."""
    if legacy.is_legacy(directory):
        return legacy.read_progress(directory)
    return Progress.from_dict(json.loads((directory / PROGRESS).read_text()))


def read_division(directory: Path) -> Division | None:
    """How the run that wrote a checkpoint divided its data; None if it is not known."""
    division = (read_json(directory / PROGRESS) or {}).get("division")
    return None if division is None else Division.from_dict(division)


def read_trial_seed(directory: Path) -> int | None:
    """The seed of the trial that wrote a checkpoint; None if it is not known."""
    seed = (read_json(directory / METADATA) or {}).get("trial_seed")
    return seed if isinstance(seed, int) else None


def describe(directory: Path) -> dict[str, Any]:
    """What the trial was: `trial_cls_spec` (module:Class), `hparams`, `experiment_config`; None for what is unknown."""
    if legacy.is_legacy(directory):
        return legacy.describe(directory)
    metadata = read_json(directory / METADATA) or {}
    return {key: metadata.get(key) for key in ("trial_cls_spec", "hparams", "experiment_config")}


def read_state(directory: Path, models: Sequence[torch.nn.Module], **torch_load_kwargs: Any) -> dict[str, Any]:
    """`state-dict.pth`, on the CPU unless `torch_load_kwargs` say otherwise; without running code.

    Args:
        models: those that it is for, bare: names of parameters in a checkpoint of Determined's depend on how it ran.

    Raises:
        ValueError: it holds what can't be loaded as data, or is no dict.
    """
    old = determined_state(directory)
    path = directory / STATE if old is None else old
    try:
        state: Any = _load(path, **torch_load_kwargs)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{path} can't be loaded as data: {_reason(str(error))}; nothing in it was run. If you trust the file, "
            "allow the type with torch.serialization.add_safe_globals([...]) first; or load it with torch.load("
            "weights_only=False), make plain values of what is not, and save it in its place"
        ) from error
    if not isinstance(state, dict):
        raise ValueError(f"{path} holds {type(state).__name__}, not the dict that a trainer writes")
    found: dict[str, Any] = state
    if old is not None:
        found = legacy.modern(found)
        legacy.without_ddp_prefix(found, models)
    return found


def _reason(message: str) -> str:
    """What `torch.load` found, out of a page on how to load it anyway."""
    if named := re.search(r"GLOBAL (\S+) was not", message):
        return f"it names {named.group(1)}"
    return " ".join(message.partition("WeightsUnpickler error:")[2].partition("Check the documentation")[0].split())


def read_rank(directory: Path, state: Mapping[str, Any], rank: int, size: int) -> RankState | None:
    """What rank `rank` of `size` has to put back beside `state`; None if fewer processes wrote the checkpoint.

    Gradients are this rank's own if as many processes wrote them, else the mean over those that did:
    that is what averaging over ranks would have made of them.
    """
    if legacy.is_legacy(directory):
        # All its processes had the chief's numbers.
        shared = legacy.rng_of(state)
        return None if shared is None else RankState(rng=shared)
    path = directory / "rng" / f"rank_{rank}.pth"
    files = sorted((directory / "gradients").glob("rank_*.pth"), key=lambda file: int(file.stem.removeprefix("rank_")))
    gradients = None
    if files and len(files) == size:
        gradients = _load(files[rank])
    elif files:
        gradients = _mean_gradients([_load(file) for file in files])
    if not path.exists() and gradients is None:
        return None
    return RankState(rng=_load(path) if path.exists() else {}, gradients=gradients)


def read_json(path: Path) -> Any:
    """A JSON file's content, None if there is no such file."""
    return json.loads(path.read_text()) if path.exists() else None


def check_savable(state: Mapping[str, Any]) -> None:
    """Refuse state that could be saved, but not loaded as data.

    Raises:
        UnsavableState: names the callback (or the part), the key, the type and the cure.
    """
    for part, value in state.items():
        if part == "callbacks" and isinstance(value, dict):
            for name, callback_state in value.items():
                _check(callback_state, f"the state of callback {name!r}", ())
        else:
            _check(value, f"{part!r}", ())


_PLAIN = (type(None), bool, int, float, str, bytes, complex, torch.dtype, torch.device, torch.Size)
_TENSORS = (torch.Tensor, torch.nn.Parameter)


def _check(value: Any, what: str, keys: tuple[Any, ...]) -> None:
    kind = type(value)
    if kind in _PLAIN or kind in _TENSORS:
        return
    if kind is dict or kind is OrderedDict:
        for key, item in value.items():
            if type(key) not in _PLAIN:
                _check(key, what, (*keys, key))
            _check(item, what, (*keys, key))
    elif kind in (list, tuple, set):
        for index, item in enumerate(value):
            _check(item, what, (*keys, index))
    elif (kind is np.ndarray or isinstance(value, np.generic)) and value.dtype.kind in "fiubcUSmM":
        return
    else:
        _check_by_trying(value, what, keys)


def _check_by_trying(value: Any, what: str, keys: tuple[Any, ...]) -> None:
    # Subclasses of tensors, and types that the user has allowed with torch.serialization.add_safe_globals.
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        buffer.seek(0)
        _load(buffer)
    except Exception as error:
        where = "".join(f"[{key!r}]" for key in keys)
        raise UnsavableState(
            f"{what}{where and ' at ' + where} is of type {type(value).__module__}.{type(value).__qualname__}, which a "
            "checkpoint can't hold: it would have to run code when loaded. Return tensors, numpy arrays, numbers, "
            "strings, "
            "and dicts, lists, tuples and sets of them (a deque as a list, an Enum as its value, an object as its "
            "attributes), and turn them back in load_state_dict()"
        ) from error


_NUMPY_GLOBALS: list[Any] = [
    np.ndarray,
    np.dtype,
    *{type(np.dtype(code)) for code in "?bBhHiIlLqQefdgFDGUSmM"},
    (np.ones(1).__reduce__()[0], "numpy.core.multiarray._reconstruct"),
    np.ones(1).__reduce__()[0],
    (np.float64(1).__reduce__()[0], "numpy.core.multiarray.scalar"),
    np.float64(1).__reduce__()[0],
]


def _load(file: Path | io.BytesIO, **kwargs: Any) -> Any:
    with torch.serialization.safe_globals(_NUMPY_GLOBALS):
        return torch.load(file, **{"map_location": "cpu", "weights_only": True, **kwargs})


def _mean_gradients(ranks: list[list[list[torch.Tensor | None]]]) -> list[list[torch.Tensor | None]]:
    def mean(gradients: tuple[torch.Tensor | None, ...]) -> torch.Tensor | None:
        known = [g for g in gradients if g is not None]
        return torch.stack(known).sum(0) / len(gradients) if known else None

    return [[mean(parts) for parts in zip(*models, strict=True)] for models in zip(*ranks, strict=True)]


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=1, default=_jsonable))


def _jsonable(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, (np.generic, np.ndarray)):
        return value.tolist()
    return str(value)
