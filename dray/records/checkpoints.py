"""Listing, verifying, downloading and exporting checkpoints."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from typing_extensions import TypedDict

from dray.errors import ExperimentError
from dray.records.directory import ExperimentDirectory
from dray.storage import CheckpointError, Location, RemoteDirectory, opened
from dray.storage.manifest import MANIFEST
from dray.text import counted, shown, some

if TYPE_CHECKING:
    from dray.records.trial_record import TrialRecord

Form: TypeAlias = Literal["state-dict", "safetensors"]

LAST = ("last", "latest")
_SHOWN = 8
_FILE = re.compile(r"trial_(\d+)/checkpoint_(\d+)/(.+)")


class CheckpointRow(TypedDict):
    """A checkpoint."""

    trial: int
    batches: int  # trained when it was saved
    size: int  # bytes
    complete: bool
    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredCheckpoint:
    """A checkpoint of an experiment.

    Attributes:
        trial, batches: its trial, and the batches trained when it was saved.
        size: total size of its files, in bytes.
        is_complete: whether it has a manifest; otherwise its writing or deletion is in progress, or was interrupted.
    """

    trial: int
    batches: int
    location: Location
    size: int
    is_complete: bool

    def to_json(self) -> CheckpointRow:
        """What the commands and the API give."""
        return {
            "trial": self.trial,
            "batches": self.batches,
            "size": self.size,
            "complete": self.is_complete,
            "path": self.location.uri,
        }


def list_checkpoints(directory: ExperimentDirectory, only: int | None = None) -> list[StoredCheckpoint]:
    """The checkpoints of an experiment, sorted by trial and batches, not verified."""
    storage = directory.storage
    sizes: dict[tuple[int, int], int] = {}
    complete = set()
    for name, size in _files(storage, only):
        if match := _FILE.fullmatch(name):
            key = int(match.group(1)), int(match.group(2))
            sizes[key] = sizes.get(key, 0) + size
            if match.group(3) == MANIFEST:
                complete.add(key)
    return [
        StoredCheckpoint(
            trial=trial,
            batches=batches,
            location=storage.child(f"trial_{trial}", f"checkpoint_{batches}"),
            size=size,
            is_complete=(trial, batches) in complete,
        )
        for (trial, batches), size in sorted(sizes.items())
    ]


class NoCheckpoint(ExperimentError):
    """The checkpoint that was asked for is missing or damaged; the message says which others there are."""


def choose(directory: ExperimentDirectory, trial: TrialRecord, at: str | int = "best") -> str:
    """The id of a checkpoint of a trial. Another one is never taken instead.

    Args:
        at: "best", that of its best validation, or the last one if it has not validated; "last"; or a number of
            batches.

    Raises:
        NoCheckpoint: the checkpoint is missing, or damaged as far as its files' sizes tell, or ``at`` is none of these.
    """
    store, batches = directory.store(trial.id), trial.best_batches
    if at not in ("best", *LAST) and not str(at).isdigit():
        raise NoCheckpoint(f"the checkpoint must be best, last or a number of batches, got {at}")
    if at in LAST or (at == "best" and batches is None):
        batches = next((each for each, _ in store.listed() if store.is_complete(each)), None)
    elif at != "best":
        batches = int(at)
    if batches is None:
        raise NoCheckpoint(f"trial {trial.id} of {directory.path.name} has no checkpoint")
    if why := store.fault(batches):
        raise missing(directory, trial, batches, why)
    return store.id_of(batches)


def missing(directory: ExperimentDirectory, trial: TrialRecord, batches: int, why: str) -> NoCheckpoint:
    """The error that a trial's checkpoint can't be used, with the others that there are."""
    store, values = directory.store(trial.id), dict(zip(trial.at, trial.values, strict=True))

    def named(batches: int) -> str:
        metric = f" ({trial.objectives.first.name} {shown(values[batches])})" if batches in values else ""
        return f"{counted(batches, 'batch')}{metric}"

    others = [named(each) for each, _ in store.listed()[::-1] if each != batches and store.is_complete(each)]
    instead = "there are no others"
    if others:
        instead = (
            f"there are checkpoints after {some(others, _SHOWN)}; to take another one, say so: --at last or --at "
            "BATCHES, in Python at='last' or at=BATCHES"
        )
    name = f"trial {trial.id} of {directory.path.name}"
    if batches != trial.best_batches and batches not in dict(store.listed()):
        return NoCheckpoint(f"{name} has no checkpoint after {named(batches)}; {instead}")
    best = "best " if batches == trial.best_batches else ""
    return NoCheckpoint(f"the {best}checkpoint of {name}, after {named(batches)}, can't be used: {why}; {instead}")


@contextmanager
def reading(directory: ExperimentDirectory, trial: TrialRecord, checkpoint: str) -> Iterator[None]:
    """Turn damage that is found within the block into a `NoCheckpoint`."""
    try:
        yield
    except (CheckpointError, FileNotFoundError) as error:
        raise missing(directory, trial, directory.store(trial.id).batches_of(checkpoint), str(error)) from None


def damage(checkpoint: Location) -> str | None:
    """The reason why a checkpoint can't be used; None if it is intact. Reads all of it, after a download if remote."""
    try:
        with opened(checkpoint):
            return None
    except CheckpointError as error:
        return str(error)


def download(checkpoint: Location, target: Path) -> None:
    """Verify a checkpoint and copy it into a new directory; raises as ``dray.storage.opened``."""
    with opened(checkpoint) as found, new_directory(target) as partial:
        shutil.copytree(found, partial, dirs_exist_ok=True)


def export(checkpoint: Location, target: Path, form: Form = "state-dict") -> list[Path]:
    """Write weights and hyperparameters for use without dray into a new directory, and return the files.

    ``model.pt`` is the model's ``state_dict``, for ``torch.load(weights_only=True)``; with ``form="safetensors"`` it is
    ``model.safetensors``. With several models there are ``model_0.pt``, ``model_1.pt``, in the order of wrapping.
    ``hparams.json`` has the hyperparameters, ``checkpoint.json`` the origin. A model need not fit in memory.

    Raises:
        FileNotFoundError, CheckpointError, StorageError: see ``dray.storage.opened``.
        ValueError: the checkpoint contains objects that can't be loaded as data, or that safetensors can't store.
    """
    import torch

    from dray.training.checkpoint import files as contents
    from dray.training.checkpoint.export import whole_models, write_safetensors

    with opened(checkpoint, without_manifest=True) as found, new_directory(target) as partial:
        about = contents.describe(found)
        suffix, write = ("pt", torch.save) if form == "state-dict" else ("safetensors", write_safetensors)
        with tempfile.TemporaryDirectory(dir=partial) as scratch:
            models = whole_models(found, Path(scratch))
            several = len(models) > 1
            names = [f"model_{number}.{suffix}" if several else f"model.{suffix}" for number in range(len(models))]
            for model, name in zip(models, names, strict=True):
                write(model, partial / name)
        _write_json(partial / "hparams.json", about["hparams"] or {})
        origin = {
            "checkpoint": str(checkpoint),
            "batches": contents.read_progress(found).batches,
            "trial_class": about["trial_cls_spec"],
            "models": names,
        }
        _write_json(partial / "checkpoint.json", origin)
    return [target / name for name in (*names, "hparams.json", "checkpoint.json")]


@contextmanager
def new_directory(target: Path) -> Iterator[Path]:
    """A new directory to fill. It is renamed to ``target`` after the block, or removed if the block raises."""
    target = target.absolute()
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}-{uuid.uuid4().hex[:8]}")
    partial.mkdir()
    try:
        yield partial
        if target.is_dir():
            target.rmdir()  # an empty one
        partial.rename(target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _files(storage: Location, only: int | None) -> Iterator[tuple[str, int]]:
    if not storage.is_local:
        prefix = "" if only is None else f"trial_{only}/"
        place = storage if only is None else storage.child(f"trial_{only}")
        yield from ((prefix + name, size) for name, size in RemoteDirectory(place).sizes().items())
        return
    for trial in storage.path.glob("trial_*" if only is None else f"trial_{only}"):
        for path in trial.glob("checkpoint_*/**/*"):
            try:
                if path.is_file():
                    yield path.relative_to(storage.path).as_posix(), path.stat().st_size
            except FileNotFoundError:  # deleted meanwhile
                continue


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n")
