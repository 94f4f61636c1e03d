"""What is in a checkpoint's directory.

state-dict.pth   models_state_dict, optimizers_state_dict, lr_schedulers_state_dict (lists), callbacks (dict), and
                 scaler_state_dict with AMP; plain tensors, without DDP's `module.` prefix
progress.json    how far training had come, over how many processes, the batches of an epoch, and how the run divided
                 its data when it began
rng/rank_N.pth   the random number generators of every rank; in a run that began with a checkpoint of Determined's also
                 the seeds of epochs' orders, which it drew
gradients/rank_N.pth   which the next batch adds to: of an aggregation that is cut in two, or kept by the trial's code
code/, experiment.yaml, hparams.json, metadata.json   what the trial was, so that it can be built again

Everything loads with `torch.load(weights_only=True)` (numpy arrays and scalars allowed by name): state is data, and
can't run code. What would not load so is refused when it is saved. Determined's checkpoints (see `legacy`) load too.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import re
import zipfile
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from typing_extensions import Buffer

from dray.storage import determined_state
from dray.storage.disk import begin_writing
from dray.training import legacy
from dray.training.division import Division
from dray.training.progress import Progress

T = TypeVar("T")

STATE = "state-dict.pth"
PROGRESS = "progress.json"
METADATA = "metadata.json"
HPARAMS = "hparams.json"
EXPERIMENT = "experiment.yaml"
DRAWN = "epochs"

PIECE_BYTES = 1 << 20
"""What is written and hashed in turn: still in the processor's cache."""
PASSED_ON_BYTES = 8 << 20
"""So much of a file that is not read soon is left in the system's memory before its way to the disk begins."""


class UnsavableState(TypeError):
    """State that a checkpoint can't hold, because it could not be loaded as data."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankState:
    """What each rank adds of its own."""

    rng: dict[str, Any]
    gradients: list[list[torch.Tensor | None]] | None = None
    drawn: dict[int, int] | None = None


@dataclass(frozen=True, kw_only=True)
class Description:
    """What the trial is, the same in all its checkpoints.

    Args:
        metadata: of `metadata.json`: the trial's class, versions.
        hparams, experiment: None if the run has none.
        code: source files by relative path.
        division: of the data; None with a loader of the user's own.
        epoch_length: in batches; None for one endless epoch.
    """

    metadata: Mapping[str, Any]
    hparams: Mapping[str, Any] | None = None
    experiment: Mapping[str, Any] | None = None
    code: Mapping[str, bytes] = field(default_factory=dict)
    division: Division | None = None
    epoch_length: int | None = None

    @cached_property
    def texts(self) -> Mapping[str, bytes]:
        """The files that are the same in each checkpoint, by name."""
        # JSON is YAML, and writing it costs a twentieth.
        documents = {HPARAMS: self.hparams, EXPERIMENT: self.experiment}
        texts = {name: _json(found, indent=1) for name, found in documents.items() if found is not None}
        return texts | {f"code/{name}": content for name, content in self.code.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """What is to be written: one checkpoint.

    Args:
        objects: what `torch.save` gets, by the file's name; tensors in it may be those that are trained.
        texts: the other files, by name; nothing can change them any more.
        nbytes: of the tensors in the state.
    """

    objects: Mapping[str, Any]
    texts: Mapping[str, bytes]
    nbytes: int


def contents(
    *, state: dict[str, Any], progress: Progress, ranks: Sequence[RankState], description: Description
) -> Contents:
    """The files of a checkpoint.

    Raises:
        UnsavableState: state that `torch.load(weights_only=True)` would refuse.
    """
    nbytes = check_savable(state)
    objects: dict[str, Any] = {STATE: state}
    for rank, part in enumerate(ranks):
        objects[f"rng/rank_{rank}.pth"] = part.rng if part.drawn is None else {**part.rng, DRAWN: part.drawn}
        if part.gradients is not None:
            objects[f"gradients/rank_{rank}.pth"] = part.gradients
    division = None if description.division is None else description.division.as_dict()
    texts = {
        PROGRESS: _json(
            {
                **progress.as_dict(),
                "size": len(ranks),
                "division": division,
                "epoch_length": description.epoch_length,
            }
        ),
        METADATA: _json({**description.metadata, "steps_completed": progress.batches}),
        **description.texts,
    }
    return Contents(objects=objects, texts=texts, nbytes=nbytes)


def write(directory: Path, contents: Contents, *, read_soon: bool = True) -> dict[str, str]:
    """Fill a staged checkpoint directory; the SHA-256 of its files, by their names.

    Args:
        directory: to be filled.
        contents: of it.
        read_soon: leave what is written in the system's memory for whoever reads it. Else it goes to the disk at once
            and takes the same few megabytes of memory again and again: where memory has to be found first, that takes
            a fifth of the system's time.

    Raises:
        OSError: a file can't be written.
    """
    digests: dict[str, str] = {}
    # Plain strings: paths of pathlib take as long as the files do.
    for parent in {name.rpartition("/")[0] for name in (*contents.texts, *contents.objects)}:
        os.makedirs(f"{directory}/{parent}", exist_ok=True)
    for name, content in contents.texts.items():
        with open(f"{directory}/{name}", "wb") as file:
            file.write(content)
        digests[name] = hashlib.sha256(content).hexdigest()
    for name, value in contents.objects.items():
        with _Output(f"{directory}/{name}", read_soon) as output:
            torch.save(value, output)
        digests[name] = output.digest.hexdigest()
    return digests


class _Output(io.FileIO):
    """A file for `torch.save`: one that is hashed while it is written, and says why it can't be.

    torch raises an error of its own after that of the file, about what it finds at the end. So it is left to end as if
    nothing had happened. torch writes a small tensor in seven pieces, which are collected here, and not by Python's
    buffered files: if a process is forked meanwhile (a DataLoader's worker), its copy of what they hold could be
    written, too.
    """

    def __init__(self, path: str, read_soon: bool) -> None:
        super().__init__(path, "wb")
        self._read_soon = read_soon
        self._left = 0
        self.digest = hashlib.sha256()
        self._small = bytearray()
        self._error: OSError | None = None

    def __exit__(self, *_: object) -> None:
        self._pass_on(memoryview(self._small))
        self.close()
        if self._error is not None:
            raise self._error

    def write(self, data: Buffer) -> int:
        view = memoryview(data).cast("B")
        if len(self._small) + len(view) <= PIECE_BYTES:
            self._small += view
        else:
            small, self._small = self._small, bytearray()
            self._pass_on(memoryview(small))
            self._pass_on(view)
        return len(view)

    def _pass_on(self, view: memoryview) -> None:
        done = 0
        while self._error is None and done < len(view):
            piece = view[done : done + PIECE_BYTES]
            try:
                written = super().write(piece)
            except OSError as error:
                self._error = error
            else:
                self.digest.update(piece[:written])
                done += written
                self._left += written
                if self._left >= PASSED_ON_BYTES and not self._read_soon:
                    begin_writing(self.fileno())
                    self._left = 0


def read_progress(directory: Path) -> Progress:
    """How far training had come."""
    if legacy.is_legacy(directory):
        return legacy.read_progress(directory)
    return Progress.from_dict(json.loads((directory / PROGRESS).read_text()))


def read_division(directory: Path) -> Division | None:
    """How the run that wrote a checkpoint divided its data; None if it is not known."""
    if legacy.is_legacy(directory):
        return legacy.read_division(directory)
    division = (read_json(directory / PROGRESS) or {}).get("division")
    return None if division is None else Division.from_dict(division)


def read_drawn(directory: Path) -> dict[int, int] | None:
    """The seeds of epochs' orders that were drawn; None for a run that does not draw them.

    Raises:
        ValueError: a file holds what can't be loaded as data, or something else than it should.
    """
    if legacy.is_legacy(directory):
        return {}
    path = directory / "rng" / "rank_0.pth"
    return _load_as(dict, path).get(DRAWN) if path.exists() else None


def read_order_seeds(directory: Path, begun: Mapping[int, int]) -> dict[int, int]:
    """The seeds of epochs' orders of a run of Determined's; for `begun` see `legacy.order_seeds`.

    Raises:
        ValueError: the state can't be loaded as data.
    """
    path = determined_state(directory)
    if path is None:
        return {}
    # All of it was read once more for a few numbers, were it not mapped; which torch's old format can't be.
    return legacy.order_seeds(directory, _load_as(dict, path, mmap=zipfile.is_zipfile(path)), begun)


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
    if not path.exists():
        raise ValueError(
            f"{directory} has no {STATE}: a program saved it by the core API, and knows what is in it; dray checkpoint "
            "download copies its files"
        )
    found: dict[str, Any] = _load_as(dict, path, **torch_load_kwargs)
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

    Raises:
        ValueError: a file holds what can't be loaded as data, or something else than it should.
    """
    if legacy.is_legacy(directory):
        # All its processes had the chief's numbers.
        shared = legacy.rng_of(state)
        return None if shared is None else RankState(rng=shared)
    path = directory / "rng" / f"rank_{rank}.pth"
    files = sorted((directory / "gradients").glob("rank_*.pth"), key=lambda file: int(file.stem.removeprefix("rank_")))
    gradients = None
    if files and len(files) == size:
        gradients = _load_as(list, files[rank])
    elif files:
        gradients = _mean_gradients([_load_as(list, file) for file in files])
    if not path.exists() and gradients is None:
        return None
    return RankState(rng=_load_as(dict, path) if path.exists() else {}, gradients=gradients)


def read_json(path: Path) -> Any:
    """A JSON file's content, None if there is no such file."""
    return json.loads(path.read_text()) if path.exists() else None


def check_savable(state: Mapping[str, Any]) -> int:
    """Refuse state that could be saved, but not loaded as data; return the bytes of the tensors in it.

    Raises:
        UnsavableState: names the callback (or the part), the key, the type and the cure.
    """
    nbytes = 0
    for part, value in state.items():
        if part == "callbacks" and isinstance(value, dict):
            nbytes += sum(_check(own, f"the state of callback {name!r}", ()) for name, own in value.items())
        else:
            nbytes += _check(value, f"{part!r}", ())
    return nbytes


_PLAIN = (type(None), bool, int, float, str, bytes, complex, torch.dtype, torch.device, torch.Size)
_TENSORS = (torch.Tensor, torch.nn.Parameter)


def _check(value: Any, what: str, keys: tuple[Any, ...]) -> int:
    kind = type(value)
    if kind in _TENSORS:
        return int(value.nbytes) if value.layout is torch.strided else 0
    if kind in _PLAIN:
        return 0
    if kind is dict or kind is OrderedDict:
        for key in value:
            if type(key) not in _PLAIN:
                _check(key, what, (*keys, key))
        return sum(_check(item, what, (*keys, key)) for key, item in value.items())
    if kind in (list, tuple, set):
        return sum(_check(item, what, (*keys, index)) for index, item in enumerate(value))
    if (kind is np.ndarray or isinstance(value, np.generic)) and value.dtype.kind in "fiubcUSmM":
        return int(value.nbytes)
    _check_by_trying(value, what, keys)
    return 0


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


def _load_as(kind: type[T], path: Path, **kwargs: Any) -> T:
    """A file of a checkpoint, without running code.

    Raises:
        ValueError: it holds what can't be loaded as data, or is of another type.
    """
    try:
        found: Any = _load(path, **kwargs)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{path} can't be loaded as data: {_reason(str(error))}; nothing in it was run. If you trust the file, "
            "allow the type with torch.serialization.add_safe_globals([...]) first; or load it with torch.load("
            "weights_only=False), make plain values of what is not, and save it in its place"
        ) from error
    if not isinstance(found, kind):
        raise ValueError(f"{path} holds {type(found).__name__}, not the {kind.__name__} that a trainer writes")
    return found


def _mean_gradients(ranks: list[list[list[torch.Tensor | None]]]) -> list[list[torch.Tensor | None]]:
    def mean(gradients: tuple[torch.Tensor | None, ...]) -> torch.Tensor | None:
        known = [g for g in gradients if g is not None]
        return torch.stack(known).sum(0) / len(gradients) if known else None

    return [[mean(parts) for parts in zip(*models, strict=True)] for models in zip(*ranks, strict=True)]


def _json(content: Any, indent: int | None = None) -> bytes:
    # Without an indent it is C that writes.
    return json.dumps(content, indent=indent, default=_jsonable).encode()


def _jsonable(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, (np.generic, np.ndarray)):
        return value.tolist()
    return str(value)
