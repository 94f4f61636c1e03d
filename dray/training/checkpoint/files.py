"""The files of a checkpoint.

state-dict.pth   models_state_dict, optimizers_state_dict, lr_schedulers_state_dict (lists), callbacks (dict), and
                 scaler_state_dict with AMP; plain tensors, without DDP's `module.` prefix; of pretrained weights that
                 the trial has not trained only their names and SHA-256 (pretrained_sha256)
progress.json    the position in training, the number of processes and how many of them share their data, batches per
                 epoch and in all, and how the trial divided its data when it started
sharded/rank_N.safetensors   rank N's shards of the tensors that state-dict.pth has without data (see `sharded`)
rng/rank_N.pth   the RNG state of every rank
gradients/rank_N.pth   gradients that the next batch adds to: in the middle of an aggregation, or kept by the trial
code/, experiment.yaml, hparams.json, metadata.json   to build the trial again
manifest.json    size and SHA-256 of each file, written last: see `dray.storage.manifest`
report.json      in an experiment: the report that goes with it, see `dray.worker.host`
metrics.jsonl    in a local run: its reports since the checkpoint before, see `dray.hosts.local`

All state loads with `torch.load(weights_only=True)` (NumPy arrays and scalars allowed by name): it is data, and can't
run code. State that would not load this way is rejected when it is saved. `determined` reads Determined's checkpoints.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from typing_extensions import Buffer

from dray.storage import determined_state
from dray.storage.disk import begin_writing
from dray.storage.manifest import Listed
from dray.training.checkpoint import determined, shard_file
from dray.training.checkpoint.plain_state import check_savable, load_as, read_json
from dray.training.checkpoint.portable import portable
from dray.training.checkpoint.shard_file import TensorPiece
from dray.training.parallel.mesh import Division
from dray.training.progress import Progress

STATE = "state-dict.pth"
PROGRESS = "progress.json"
METADATA = "metadata.json"
HPARAMS = "hparams.json"
EXPERIMENT = "experiment.yaml"

PIECE_BYTES = 1 << 20  # files are written and hashed in pieces of this size, which fit the processor's cache
FLUSH_BYTES = 8 << 20  # how much of a file that is not read soon may be in the page cache


@dataclass(frozen=True, slots=True, kw_only=True)
class RankState:
    """What each rank adds to a checkpoint."""

    rng: dict[str, Any]
    gradients: list[list[torch.Tensor | None]] | None = None


@dataclass(frozen=True, kw_only=True)
class Description:
    """What checkpoints say about the trial, the same in all of them."""

    metadata: Mapping[str, Any]  # content of `metadata.json`: the trial's class, versions
    hparams: Mapping[str, Any] | None = None
    experiment: Mapping[str, Any] | None = None
    code: Mapping[str, bytes] = field(default_factory=dict)  # by relative path
    division: Division | None = None  # of the data among processes; None with a loader of the user's own
    epoch_length: int | None = None  # in batches; None for one endless epoch
    total_batches: int | None = None  # to train; None if unknown
    sharing: int = 1  # how many ranks share each share of the data (those of a tensor-parallel group)

    @cached_property
    def texts(self) -> Mapping[str, bytes]:
        """The files that are the same in each checkpoint, by name."""
        # JSON is valid YAML, and 20 times faster to write.
        documents = {HPARAMS: self.hparams, EXPERIMENT: self.experiment}
        texts = {name: _json(found, indent=1) for name, found in documents.items() if found is not None}
        return texts | {f"code/{name}": content for name, content in self.code.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """What a rank writes of one checkpoint, by file name. Its tensors may be those that are being trained."""

    objects: Mapping[str, Any] = field(default_factory=dict)  # saved by `torch.save`
    texts: Mapping[str, bytes] = field(default_factory=dict)
    nbytes: int = 0  # size of the tensors in the state
    shards: Mapping[str, Mapping[str, TensorPiece]] = field(default_factory=dict)  # this rank's, by name in the file


def contents(
    *, state: dict[str, Any], progress: Progress, ranks: Sequence[RankState], description: Description
) -> Contents:
    """The content of a checkpoint; an `UnsavableState` if `torch.load(weights_only=True)` would refuse its state."""
    nbytes = check_savable(state)
    objects: dict[str, Any] = {STATE: state}
    for rank, part in enumerate(ranks):
        objects[f"rng/rank_{rank}.pth"] = part.rng
        if part.gradients is not None:
            objects[f"gradients/rank_{rank}.pth"] = part.gradients
    division = None if description.division is None else asdict(description.division)
    texts = {
        PROGRESS: _json(
            {
                **asdict(progress),
                "size": len(ranks),
                "sharing": description.sharing,
                "division": division,
                "epoch_length": description.epoch_length,
                "total_batches": description.total_batches,
            }
        ),
        METADATA: _json({**description.metadata, "steps_completed": progress.batches}),
        **description.texts,
    }
    return Contents(objects=objects, texts=texts, nbytes=nbytes)


class ChecksumWriter(io.FileIO):
    """A file for `torch.save` that computes its SHA-256 while it is written.

    A write error is raised when the block ends: raised in `write`, torch would replace it with its own. torch writes a
    small tensor in seven pieces, which are collected here. Python's buffered files are no alternative: a process forked
    meanwhile (a DataLoader worker) could write its copy of the buffer too.
    """

    def __init__(self, path: str, read_soon: bool) -> None:
        super().__init__(path, "wb")
        self._read_soon = read_soon
        self._size = self._flushed = 0
        self._digest = hashlib.sha256()
        self._small = bytearray()
        self._error: OSError | None = None

    @property
    def listed(self) -> Listed:
        return Listed(self._size, self._digest.hexdigest())

    def __exit__(self, *_: object) -> None:
        self._write_through(memoryview(self._small))
        self.close()
        if self._error is not None:
            raise self._error

    def write(self, data: Buffer) -> int:
        view = memoryview(data).cast("B")
        if len(self._small) + len(view) <= PIECE_BYTES:
            self._small += view
        else:
            small, self._small = self._small, bytearray()
            self._write_through(memoryview(small))
            self._write_through(view)
        return len(view)

    def _write_through(self, view: memoryview) -> None:
        done = 0
        while self._error is None and done < len(view):
            piece = view[done : done + PIECE_BYTES]
            try:
                written = super().write(piece)
            except OSError as error:
                self._error = error
            else:
                self._digest.update(piece[:written])
                done += written
                self._size += written
                if self._size >= self._flushed + FLUSH_BYTES and not self._read_soon:
                    begin_writing(self.fileno())
                    self._flushed = self._size


def write(directory: Path, contents: Contents, *, read_soon: bool = True) -> dict[str, Listed]:
    """Write files of a checkpoint to its staging directory; returns their entries in the manifest, by name.

    What is `read_soon` stays in the page cache. Otherwise it is flushed at once and reuses a few megabytes of cache: on
    a machine that is short of memory, this takes a fifth of the time.
    """
    written: dict[str, Listed] = {}
    # Strings: pathlib takes as long as writing the files.
    for parent in {name.rpartition("/")[0] for name in (*contents.texts, *contents.objects, *contents.shards)}:
        os.makedirs(f"{directory}/{parent}", exist_ok=True)
    for name, content in contents.texts.items():
        with open(f"{directory}/{name}", "wb") as file:
            file.write(content)
        written[name] = Listed(len(content), hashlib.sha256(content).hexdigest())
    for name, value in contents.objects.items():
        with ChecksumWriter(f"{directory}/{name}", read_soon) as output, portable():
            torch.save(value, output)
        written[name] = output.listed
    for name, shards in contents.shards.items():
        with ChecksumWriter(f"{directory}/{name}", read_soon) as output:
            shard_file.write(output, shards)
        written[name] = output.listed
    return written


def read_progress(directory: Path) -> Progress:
    if determined_state(directory) is not None:
        return determined.read_progress(directory)
    return Progress.from_dict(json.loads((directory / PROGRESS).read_text()))


def read_length(directory: Path, name: Literal["epoch_length", "total_batches"]) -> int | None:
    """A length of the run that wrote a checkpoint, as `Description` has it; None if unknown."""
    found = (read_json(directory / PROGRESS) or {}).get(name)
    return found if isinstance(found, int) else None


def read_division(directory: Path) -> Division | None:
    if determined_state(directory) is not None:
        return determined.read_division(directory)
    division = (read_json(directory / PROGRESS) or {}).get("division")
    return None if division is None else Division(**division)


def read_trial_seed(directory: Path) -> int | None:
    seed = (read_json(directory / METADATA) or {}).get("trial_seed")
    return seed if isinstance(seed, int) else None


def describe(directory: Path) -> dict[str, Any]:
    """About the trial: `trial_cls_spec` (module:Class), `hparams`, `experiment_config`; None for what is unknown."""
    if determined_state(directory) is not None:
        return determined.describe(directory)
    metadata = read_json(directory / METADATA) or {}
    return {key: metadata.get(key) for key in ("trial_cls_spec", "hparams", "experiment_config")}


def read_state(directory: Path, models: Sequence[torch.nn.Module], **torch_load_kwargs: Any) -> dict[str, Any]:
    """`state-dict.pth`, on the CPU unless `torch_load_kwargs` say otherwise; without running code. `models` are the
    trial's, unwrapped: in a Determined checkpoint the parameters' names depend on how it ran."""
    old = determined_state(directory)
    path = directory / STATE if old is None else old
    if not path.exists():
        raise ValueError(
            f"{directory} has no {STATE}: a program saved it with the core API, and only that program knows what is in "
            "it; copy its files with `dray checkpoint download`"
        )
    found: dict[str, Any] = load_as(dict, path, **torch_load_kwargs)
    return found if old is None else determined.adapt(found, models)


def read_rank(directory: Path, state: Mapping[str, Any], rank: int, size: int, sharing: int = 1) -> RankState | None:
    """What rank `rank` of `size` restores besides `state`; None if fewer processes wrote the checkpoint.

    With another `sharing` (see `Description`) a rank gets the RNG state of the first one that had its share of the
    data: ranks that share data draw the same random numbers. Gradients are this rank's own if as many processes wrote
    them, else the mean over those processes, as DDP would have averaged them.
    """
    if determined_state(directory) is not None:
        # All its processes resume with the chief's RNG state.
        shared = determined.rng_of(state)
        return None if shared is None else RankState(rng=shared)
    before = (read_json(directory / PROGRESS) or {}).get("sharing", 1)
    path = directory / "rng" / f"rank_{rank if before == sharing else rank // sharing * before}.pth"
    gradients = None
    if (files := _gradient_files(directory)) and len(files) == size:
        gradients = load_as(list, files[rank])
    elif files:
        gradients = read_mean_gradients(directory)
    if not path.exists() and gradients is None:
        return None
    return RankState(rng=load_as(dict, path) if path.exists() else {}, gradients=gradients)


def read_mean_gradients(directory: Path) -> list[list[torch.Tensor | None]]:
    """The mean of the gradients of all processes that wrote a checkpoint in the middle of an aggregation."""
    ranks: list[list[list[torch.Tensor | None]]] = [load_as(list, file) for file in _gradient_files(directory)]

    def mean(gradients: tuple[torch.Tensor | None, ...]) -> torch.Tensor | None:
        known = [g for g in gradients if g is not None]
        return torch.stack(known).sum(0) / len(gradients) if known else None

    return [[mean(parts) for parts in zip(*models, strict=True)] for models in zip(*ranks, strict=True)]


def _gradient_files(directory: Path) -> list[Path]:
    files = (directory / "gradients").glob("rank_*.pth")
    return sorted(files, key=lambda file: int(file.stem.removeprefix("rank_")))


def _json(content: Any, indent: int | None = None) -> bytes:
    return json.dumps(content, indent=indent, default=_jsonable).encode()  # the C encoder takes no indent


def _jsonable(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, (np.generic, np.ndarray)):
        return value.tolist()
    return str(value)
