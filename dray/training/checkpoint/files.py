"""The files of a checkpoint.

state-dict.pth   models_state_dict, optimizers_state_dict, lr_schedulers_state_dict (lists), callbacks (dict), and
                 scaler_state_dict with AMP; plain tensors, without DDP's `module.` prefix; for pretrained weights that
                 the trial has not trained, just names and SHA-256 (pretrained_sha256)
progress.json    the position in training, the number of processes and of those that share data, batches per epoch and
                 in total, and the division of the data when the trial started
sharded/rank_N.safetensors   rank N's shards of the tensors that have no data in state-dict.pth (see `sharded`)
rng/rank_N.pth   the RNG state of every rank
data/rank_N.pth  the position of every rank's training loader, if the loader keeps it: see `dray.pytorch.streams`
gradients/rank_N.pth   gradients to which the next batch adds: in the middle of an aggregation, or kept by the trial
code/, experiment.yaml, hparams.json, metadata.json   for rebuilding the trial
manifest.json    size and SHA-256 of each file, written last: see `dray.storage.manifest`
report.json      in an experiment: the report published with the checkpoint, see `dray.worker.host`
metrics.jsonl    in a local run: reports since the previous checkpoint, see `dray.hosts.local`

All state loads with `torch.load(weights_only=True)` (NumPy arrays and scalars allowed by name): it is data, and can't
run code. State that would not load this way is rejected when it is saved. `determined` reads Determined's checkpoints.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
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

PIECE_BYTES = 1 << 20  # files are written in pieces of this size, which fit the processor's cache
AHEAD = 16  # calls to write or hash a piece of memory that may be pending; they hold copies of small tensors
FLUSH_BYTES = 8 << 20  # the limit on the page cache for a file that is not read soon


@dataclass(frozen=True, slots=True, kw_only=True)
class RankState:
    """Each rank's own state in a checkpoint."""

    rng: dict[str, Any]
    gradients: list[list[torch.Tensor | None]] | None = None
    data: dict[str, Any] | None = None  # the position of a training loader that keeps its own


@dataclass(frozen=True, kw_only=True)
class Description:
    """The description of a trial, which is the same in all its checkpoints."""

    metadata: Mapping[str, Any]  # content of `metadata.json`: the trial's class, versions
    hparams: Mapping[str, Any] | None = None
    experiment: Mapping[str, Any] | None = None
    code: Mapping[str, bytes] = field(default_factory=dict)  # by relative path
    division: Division | None = None  # of the data among processes; None with a loader of the user's own
    epoch_length: int | None = None  # in batches; None for one endless epoch
    total_batches: int | None = None  # to train; None if unknown
    sharing: int = 1  # number of neighbouring ranks with the same data

    @cached_property
    def texts(self) -> Mapping[str, bytes]:
        """The contents of files that are the same in each checkpoint, by name."""
        # JSON is valid YAML, and 20 times faster to write.
        documents = {HPARAMS: self.hparams, EXPERIMENT: self.experiment}
        texts = {name: _json(document, indent=1) for name, document in documents.items() if document is not None}
        return texts | {f"code/{name}": content for name, content in self.code.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """A rank's part of one checkpoint, by file name. Tensors may be the live ones."""

    objects: Mapping[str, Any] = field(default_factory=dict)  # saved by `torch.save`
    texts: Mapping[str, bytes] = field(default_factory=dict)
    nbytes: int = 0  # size of the tensors in the state
    shards: Mapping[str, Mapping[str, TensorPiece]] = field(default_factory=dict)  # this rank's, by name in the file


def contents(
    *, state: dict[str, Any], progress: Progress, ranks: Sequence[RankState], description: Description
) -> Contents:
    """Assemble the contents of a checkpoint.

    Raises:
        UnsavableState: `torch.load(weights_only=True)` would refuse the state.
    """
    nbytes = check_savable(state)
    objects: dict[str, Any] = {STATE: state}
    for rank, part in enumerate(ranks):
        objects[f"rng/rank_{rank}.pth"] = part.rng
        if part.gradients is not None:
            objects[f"gradients/rank_{rank}.pth"] = part.gradients
        if part.data is not None:
            check_savable({f"state_dict() of rank {rank}'s training loader": part.data["loader"]})
            objects[f"data/rank_{rank}.pth"] = part.data
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
    """A file for `torch.save`, which one thread writes and another hashes while torch computes CRC-32s in its own.

    `write` returns at once if `lasting` has the address of the data, in memory that does not change until the end of
    the block. torch may reuse other memory, so `write` waits until that is written and hashed. Small writes, of which
    torch makes seven for each tensor, are collected. Python's buffered files won't do for that: a process forked
    meanwhile (a DataLoader worker) could write its copy of the buffer too.

    Write errors are raised at the end of the block, because torch would replace an error from `write` with its own.
    """

    def __init__(self, path: str, read_soon: bool, lasting: Collection[int] = ()) -> None:
        super().__init__(path, "wb")
        self._read_soon = read_soon
        self._lasting = lasting
        self._size = self._flushed = 0
        self._digest = hashlib.sha256()
        self._small = bytearray()
        self._error: OSError | None = None
        self._threads = ThreadPoolExecutor(1, "dray-hash"), ThreadPoolExecutor(1, "dray-write")
        self._pending: deque[Future[None]] = deque()

    @property
    def listed(self) -> Listed:
        return Listed(self._size, self._digest.hexdigest())

    def __exit__(self, *_: object) -> None:
        for thread in self._threads:
            thread.shutdown()
        # In this thread: most files are small, and need no others.
        self._digest.update(self._small)
        self._write(memoryview(self._small))
        self.close()
        if self._error is not None:
            raise self._error

    def write(self, data: Buffer) -> int:
        view = memoryview(data).cast("B")
        if len(self._small) + len(view) <= PIECE_BYTES:
            self._small += view
        else:
            small, self._small = self._small, bytearray()
            self._begin(memoryview(small))
            self._begin(view)
            ahead = AHEAD if address_of(view) in self._lasting else 0
            while len(self._pending) > ahead:
                self._pending.popleft().result()
        return len(view)

    def _begin(self, view: memoryview) -> None:
        for thread, work in zip(self._threads, (self._digest.update, self._write), strict=True):
            self._pending.append(thread.submit(work, view))

    def _write(self, view: memoryview) -> None:
        done = 0
        while self._error is None and done < len(view):
            try:
                written = super().write(view[done : done + PIECE_BYTES])
            except OSError as error:
                self._error = error
            else:
                done += written
                self._size += written
                if self._size >= self._flushed + FLUSH_BYTES and not self._read_soon:
                    begin_writing(self.fileno())
                    self._flushed = self._size


def address_of(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).__array_interface__["data"][0])


def write(directory: Path, contents: Contents, *, read_soon: bool = True) -> dict[str, Listed]:
    """Write a checkpoint's files to its staging directory, and return their entries in the manifest, by name.

    `read_soon` keeps files in the page cache. Otherwise they are flushed at once and use only a few megabytes of it,
    which takes a fifth of the time on a machine that is short of memory.
    """
    written: dict[str, Listed] = {}
    # Strings, because pathlib takes as long as writing the files.
    for parent in {name.rpartition("/")[0] for name in (*contents.texts, *contents.objects, *contents.shards)}:
        os.makedirs(f"{directory}/{parent}", exist_ok=True)
    for name, content in contents.texts.items():
        with open(f"{directory}/{name}", "wb") as file:
            file.write(content)
        written[name] = Listed(len(content), hashlib.sha256(content).hexdigest())
    for name, value in contents.objects.items():
        with portable() as storages, ChecksumWriter(f"{directory}/{name}", read_soon, storages) as output:
            torch.save(value, output)
        written[name] = output.listed
    for name, shards in contents.shards.items():
        lasting = {shard.tensor.data_ptr() for shard in shards.values()}
        with ChecksumWriter(f"{directory}/{name}", read_soon, lasting) as output:
            shard_file.write(output, shards)
        written[name] = output.listed
    return written


def read_progress(directory: Path) -> Progress:
    if determined_state(directory) is not None:
        return determined.read_progress(directory)
    return Progress.from_dict(json.loads((directory / PROGRESS).read_text()))


def read_length(directory: Path, name: Literal["epoch_length", "total_batches"]) -> int | None:
    """A length of the run that wrote a checkpoint, see `Description`; None if unknown."""
    length = (read_json(directory / PROGRESS) or {}).get(name)
    return length if isinstance(length, int) else None


def read_division(directory: Path) -> Division | None:
    if determined_state(directory) is not None:
        return determined.read_division(directory)
    division = (read_json(directory / PROGRESS) or {}).get("division")
    return None if division is None else Division(**division)


def read_trial_seed(directory: Path) -> int | None:
    seed = (read_json(directory / METADATA) or {}).get("trial_seed")
    return seed if isinstance(seed, int) else None


def describe(directory: Path) -> dict[str, Any]:
    """The trial's `trial_cls_spec` (module:Class), `hparams` and `experiment_config`, each None if unknown."""
    if determined_state(directory) is not None:
        return determined.describe(directory)
    metadata = read_json(directory / METADATA) or {}
    return {key: metadata.get(key) for key in ("trial_cls_spec", "hparams", "experiment_config")}


def read_state(directory: Path, models: Sequence[torch.nn.Module], **torch_load_kwargs: Any) -> dict[str, Any]:
    """Map `state-dict.pth` into memory without running code, on the CPU, unless `torch_load_kwargs` say otherwise. What
    keeps its tensors must copy them: see `mapped`.

    `models` are the trial's unwrapped models: parameter names in a Determined checkpoint may have a prefix.
    """
    old = determined_state(directory)
    path = directory / STATE if old is None else old
    if not path.exists():
        raise ValueError(
            f"{directory} has no {STATE}: a program saved it with the core API, and only that program can read it; "
            "copy its files with `dray checkpoint download`"
        )
    state: dict[str, Any] = load_as(dict, path, **{"mmap": True, **torch_load_kwargs})
    return state if old is None else determined.adapt(state, models)


def read_rank(directory: Path, state: Mapping[str, Any], rank: int, size: int, sharing: int = 1) -> RankState | None:
    """The state that rank `rank` of `size` restores besides `state`; None if fewer processes wrote the checkpoint.

    If `sharing` (see `Description`) has changed, a rank gets the RNG state of the first rank that had its share of the
    data, since ranks that share data draw the same random numbers. Gradients are the rank's own if the same number of
    processes wrote them, and otherwise the mean over those processes, as in DDP.
    """
    if determined_state(directory) is not None:
        # Determined saves only the chief's RNG state, with which all processes resume.
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


def read_data_position(directory: Path, replica: int) -> tuple[dict[str, Any] | None, int]:
    """The position of a replica's training loader, and the number of replicas that the checkpoint has. It is the first
    one's if there were fewer replicas, and None if none was saved."""
    progress = read_json(directory / PROGRESS) or {}
    sharing = progress.get("sharing", 1)
    replicas = progress.get("size", 1) // sharing
    path = directory / "data" / f"rank_{replica * sharing if replica < replicas else 0}.pth"
    return (load_as(dict, path) if path.exists() else None), replicas


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
