"""Checkpoints of a program with its own training loop: directories of files that the program writes."""

from __future__ import annotations

import contextlib
import enum
import functools
import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from dray.core.train import Program, as_steps
from dray.storage import CheckpointError, Location
from dray.storage.manifest import MANIFEST, sha256_of
from dray.training.checkpoint.joint import JointCheckpoint, open_together
from dray.training.host import Report
from dray.training.parallel.distributed import DistributedContext
from dray.training.parallel.exchange import all_or_none

METADATA = "metadata.json"
#: Files in a checkpoint that dray writes.
OURS = (MANIFEST, "report.json")

Selector = Callable[[str], bool]


class DownloadMode(enum.Enum):
    """Selects the ranks that call `download()` and `restore_path()`.

    Attributes:
        LocalWorkersShareDownload: all ranks together; those of a machine share the files.
        NoSharedDownload: any rank, on its own.
    """

    LocalWorkersShareDownload = "LOCAL_WORKERS_SHARE_DOWNLOAD"
    NoSharedDownload = "NO_SHARED_DOWNLOAD"


class CheckpointContext:
    """Saves and restores a program's checkpoints.

    A checkpoint is committed as a whole or not at all. In an experiment it goes to the trial's checkpoint storage, and
    a restarted trial finds its latest one in `info.latest_checkpoint`. In a local run it goes to the run's directory.
    """

    def __init__(self, program: Program) -> None:
        self._program, self._host, self._peers = program, program.host, program.peers

    @property
    def outputs(self) -> Location:
        """The location for results other than checkpoints, which are kept when checkpoints are deleted."""
        return self._host.outputs

    # --------------------------------------------------------------------------------------------------------- save
    def store_path(
        self, metadata: Mapping[str, Any] | None = None, *, shard: bool = False
    ) -> AbstractContextManager[tuple[Path, str]]:
        """Yield a directory to write files to, and the id of the checkpoint that they become when the block ends.

        If the block raises, no checkpoint is made. A checkpoint with the same `steps_completed` is replaced.

        Args:
            metadata: JSON-serialisable; must have `steps_completed`, an int >= 0, as when reporting metrics.
            shard: all ranks call this together, and each writes files with unique names into the directory, which the
                ranks of a machine share. Their metadata are merged. By default only the chief (rank 0) calls it.

        Raises:
            ValueError: `steps_completed` is missing or invalid; or a file is named `manifest.json` or `report.json`.
            RuntimeError: called without `shard` on a rank other than the chief; or ranks give different values for the
                same metadata key; or two machines wrote a file of the same name.
            StorageFull: the disk or the storage is full.
        """
        return self._store(metadata, self._ranks("store_path", shard))

    @contextlib.contextmanager
    def _store(self, metadata: Mapping[str, Any] | None, peers: DistributedContext) -> Iterator[tuple[Path, str]]:
        steps = _steps(_merged(peers.allgather(dict(metadata or {}))))
        joint = JointCheckpoint.begin(peers, self._host, Report(batches=steps))
        with joint.writing():
            with all_or_none(peers, "writing a sharded checkpoint"):
                yield joint.staging, self._host.checkpoint_id(steps)
            # A rank may have added metadata in the block.
            parts = peers.allgather((dict(metadata or {}), _files(joint.staging) if joint.owns_staging else []))
            merged = _merged([metadata for metadata, _ in parts])
            if duplicates := _repeated([names for _, names in parts]):
                raise RuntimeError(
                    f"store_path(shard=True): several machines wrote a file named {duplicates[0]!r}; put the rank into "
                    "the names"
                )
            joint.commit({}, lambda staging: _complete(staging, merged))
        if peers.rank == 0:
            self._program.pulse()

    def upload(
        self,
        ckpt_dir: str | os.PathLike[str] | None,
        metadata: Mapping[str, Any] | None = None,
        *,
        shard: bool = False,
        selector: Selector | None = None,
    ) -> str:
        """Make a checkpoint of the files in a directory, and return its id.

        Args:
            ckpt_dir: the directory, which is left unchanged. With `shard`, None on a rank without files.
            metadata, shard: as in `store_path`.
            selector: takes a path relative to `ckpt_dir`, and returns whether to include the file. Default: all files.

        Raises:
            ValueError, StorageFull: as in `store_path`.
            RuntimeError: as in `store_path`; or no rank gives a directory; or ranks have different files of the same
                name.
            NotADirectoryError: the directory does not exist.
        """
        peers = self._ranks("upload", shard)
        source = None if ckpt_dir is None else Path(ckpt_dir)
        with all_or_none(peers, "listing the files to upload"):
            if source is not None and not source.is_dir():
                raise NotADirectoryError(f"upload(): no such directory: {str(source)!r}")
            names = None if source is None else _files(source, selector)
        names_by_rank = peers.allgather(names)
        if all(names is None for names in names_by_rank):
            raise RuntimeError(
                "upload(ckpt_dir=None) would save nothing; give a directory, with shard=True on at least one rank"
            )
        ranks = [names or [] for names in names_by_rank]
        if shared := _repeated(ranks):
            digests = {name: sha256_of(source / name) for name in shared if name in ranks[peers.rank]} if source else {}
            all_digests = peers.allgather(digests)
            different = [name for name in shared if len({each[name] for each in all_digests if name in each}) > 1]
            if different:
                raise RuntimeError(
                    f"upload(shard=True): ranks have different files of the same name: {', '.join(different)}; put "
                    "the rank into the names, or give each rank a selector"
                )
        earlier = {name for names in ranks[: peers.rank] for name in names}
        with self._store(metadata, peers) as (staging, checkpoint):
            if source is not None:
                _copy(source, staging, [name for name in ranks[peers.rank] if name not in earlier])
        return checkpoint

    # ------------------------------------------------------------------------------------------------------ restore
    @contextlib.contextmanager
    def restore_path(
        self,
        storage_id: str,
        download_mode: DownloadMode = DownloadMode.LocalWorkersShareDownload,
        *,
        selector: Selector | None = None,
    ) -> Iterator[Path]:
        """Yield a local directory to read a checkpoint from. One in an object store is downloaded first.

        Args:
            storage_id: an id from `store_path` or `upload`, `info.latest_checkpoint`, a directory or a URI.
            download_mode: which ranks call this, see `DownloadMode`.
            selector: has no effect: all files are downloaded.

        Raises:
            FileNotFoundError: the checkpoint does not exist.
            CheckpointError: the checkpoint is damaged.
        """
        shared = DownloadMode(download_mode) is DownloadMode.LocalWorkersShareDownload
        read = functools.partial(self._host.open_checkpoint, storage_id)
        if shared and Location.of(storage_id).is_local:
            directory = open_together(self._peers, read, "reading a checkpoint")
        else:  # a rank may remove its download while another still reads
            with self._together(shared):
                directory = read()
        yield directory
        self._program.pulse()

    def download(
        self,
        storage_id: str,
        ckpt_dir: str | os.PathLike[str],
        download_mode: DownloadMode = DownloadMode.LocalWorkersShareDownload,
        *,
        selector: Selector | None = None,
    ) -> None:
        """Copy the files of a checkpoint to a directory, which is created if it does not exist.

        Args:
            storage_id, download_mode: as in `restore_path`.
            ckpt_dir: the directory to copy to.
            selector: takes a path relative to the checkpoint, and returns whether to copy the file. Default: all files.
                Ranks that share a download get every file that one of them selects.

        Raises:
            FileNotFoundError, CheckpointError: as in `restore_path`.
        """
        shared = DownloadMode(download_mode) is DownloadMode.LocalWorkersShareDownload
        with self.restore_path(storage_id, download_mode) as source:
            selected = set(_files(source, selector))
            if shared:
                selected = set().union(*self._peers.allgather_local(selected))
            with self._together(shared):
                if not shared or self._peers.local_rank == 0:
                    Path(ckpt_dir).mkdir(parents=True, exist_ok=True)
                    _copy(source, Path(ckpt_dir), sorted(selected - set(OURS)))

    def get_metadata(self, storage_id: str) -> dict[str, Any]:
        """Return the metadata that a checkpoint was stored with, {} if there are none. Any rank may call this.

        Raises:
            FileNotFoundError: the checkpoint does not exist.
            CheckpointError: its metadata are damaged, or a file is missing or has the wrong size. The contents of other
                files are checked when they are restored.
        """
        path = self._host.open_checkpoint(storage_id, only=[METADATA]) / METADATA
        try:
            return dict(json.loads(path.read_text()))
        except FileNotFoundError:
            return {}
        except ValueError as error:
            raise CheckpointError(
                f"{storage_id} is damaged: its {METADATA} is not valid JSON ({error}); use an earlier checkpoint"
            ) from None

    def delete(self, storage_id: str) -> None:
        """Delete a checkpoint of this trial or local run. On the chief only.

        Raises:
            ValueError: the checkpoint belongs to another trial or run.
        """
        self._host.delete_checkpoint(storage_id)

    def _together(self, shared: bool) -> AbstractContextManager[Any]:
        return all_or_none(self._peers, "reading a checkpoint") if shared else contextlib.nullcontext()

    def _ranks(self, call: str, shard: bool) -> DistributedContext:
        if shard:
            return self._peers
        self._program.check_chief(f"checkpoint.{call}", "without shard=True, ")
        return DistributedContext()


def _steps(metadata: Mapping[str, Any]) -> int:
    try:
        return as_steps(metadata.get("steps_completed"), "")
    except (TypeError, ValueError):
        raise ValueError(
            "a checkpoint's metadata must have 'steps_completed', an int >= 0, as in reports of metrics: "
            f'{{"steps_completed": batches_trained}}; got {metadata!r}'
        ) from None


def _merged(ranks: Sequence[Mapping[str, Any]], where: str = "") -> dict[str, Any]:
    """Merge the metadata of all ranks, nested dicts included; a RuntimeError if the values of a key differ."""
    merged: dict[str, Any] = {}
    for metadata in ranks:
        for key, value in metadata.items():
            before = merged.get(key, value)
            if isinstance(value, dict) and isinstance(before, dict):
                merged[key] = _merged([before, value], f"{where}{key}.")
            elif before != value:
                raise RuntimeError(
                    f"the ranks' metadata of a sharded checkpoint differ: {where}{key} is {before!r} on one and "
                    f"{value!r} on another; use different names"
                )
            else:
                merged[key] = value
    return merged


def _complete(staging: Path, metadata: Mapping[str, Any]) -> None:
    if taken := [name for name in OURS if (staging / name).exists()]:
        raise ValueError(f"a checkpoint can't have a file {taken[0]!r}, a name that dray itself uses; rename the file")
    (staging / METADATA).write_text(json.dumps(metadata, indent=2))


def _repeated(ranks: Sequence[Sequence[str]]) -> list[str]:
    """Names found on several ranks, sorted."""
    counts = Counter(name for names in ranks for name in names)
    return sorted(name for name, count in counts.items() if count > 1)


def _files(directory: Path, selector: Selector | None = None) -> list[str]:
    names = sorted(path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file())
    return [name for name in names if selector is None or selector(name)]


def _copy(source: Path, target: Path, names: Sequence[str]) -> None:
    for name in names:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / name, target / name)
