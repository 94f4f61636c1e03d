"""Checkpoints of a program with its own training loop: directories of any files that it writes."""

from __future__ import annotations

import contextlib
import enum
import json
import logging
import operator
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from dray.core import shards
from dray.core.train import Reporter
from dray.storage import CheckpointError, Location, writing
from dray.storage.manifest import MANIFEST, Listed
from dray.training.checkpoint.opening import open_together
from dray.training.host import ProgramHost, Report
from dray.training.parallel.distributed import DistributedContext
from dray.training.parallel.exchange import all_or_none

log = logging.getLogger(__name__)

METADATA = "metadata.json"
#: Files in a checkpoint that dray writes.
OURS = (MANIFEST, "report.json")

Selector = Callable[[str], bool]


class DownloadMode(enum.Enum):
    """Which ranks call `download()` and `restore_path()`.

    LocalWorkersShareDownload: all ranks together; those of one machine share the files. NoSharedDownload: any rank, on
    its own.
    """

    LocalWorkersShareDownload = "LOCAL_WORKERS_SHARE_DOWNLOAD"
    NoSharedDownload = "NO_SHARED_DOWNLOAD"


class CheckpointContext:
    """Saves and restores what a program needs to resume.

    A checkpoint is committed as a whole or not at all. In an experiment it goes to the trial's checkpoint storage, and
    `info.latest_checkpoint` is the latest one when the trial is restarted. In a local run it goes to the run's
    directory.
    """

    def __init__(self, host: ProgramHost, peers: DistributedContext, reporter: Reporter) -> None:
        self._host, self._peers, self._reporter = host, peers, reporter

    @property
    def outputs(self) -> Location:
        """Where the trial stores other results than checkpoints. Not deleted with these."""
        return self._host.outputs

    # --------------------------------------------------------------------------------------------------------- save
    def store_path(
        self, metadata: Mapping[str, Any] | None = None, *, shard: bool = False
    ) -> AbstractContextManager[tuple[Path, str]]:
        """Yield a directory to write files to, and the id of the checkpoint that they become when the block ends.

        If the block raises, there is no checkpoint. A later one with the same `steps_completed` replaces the earlier.

        Args:
            metadata: JSON-serialisable; must have `steps_completed`, an int >= 0, as when reporting metrics.
            shard: all ranks call this together, and each writes its files, under unique names, into the directory,
                which the ranks of a machine share; their metadata are merged. By default only the chief (rank 0) calls
                it.

        Raises:
            ValueError: `steps_completed` is missing or invalid; or a file is named `manifest.json` or `report.json`.
            RuntimeError: called on a rank other than the chief without `shard`; or ranks have different metadata of the
                same name, or different machines files of the same name.
            StorageFull: the disk or the storage is full.
        """
        return self._store_sharded(metadata) if shard else self._store(metadata)

    @contextlib.contextmanager
    def _store(self, metadata: Mapping[str, Any] | None) -> Iterator[tuple[Path, str]]:
        self._check_chief("store_path")
        steps = _steps(metadata)
        staging = self._host.new_checkpoint(steps)
        with writing(staging):
            yield staging, self._host.checkpoint_id(steps)
            self._commit(staging, metadata or {}, steps)

    @contextlib.contextmanager
    def _store_sharded(self, metadata: Mapping[str, Any] | None) -> Iterator[tuple[Path, str]]:
        steps = _steps(shards.merged(self._peers.allgather(dict(metadata or {}))))
        # If it is to be uploaded, the first rank of each machine stages its part.
        apart = self._host.is_remote and self._peers.cross_size > 1
        stages = (self._peers.local_rank if apart else self._peers.rank) == 0
        with all_or_none(self._peers, "preparing a sharded checkpoint"):
            mine = self._host.new_checkpoint(steps) if stages else None
        staging = self._peers.broadcast_local(mine) if apart else self._peers.broadcast(mine)
        assert staging is not None
        with writing(staging) if stages else contextlib.nullcontext():
            with all_or_none(self._peers, "writing a sharded checkpoint"):
                yield staging, self._host.checkpoint_id(steps)
            # A rank may have added metadata in the block.
            merged = shards.merged(self._peers.allgather(dict(metadata or {})))
            others = {}
            if apart:
                others = shards.add_parts(self._host, self._peers, staging, _files(staging) if stages else [], steps)
            with all_or_none(self._peers, "committing a checkpoint"):
                if self._peers.rank == 0:
                    self._commit(staging, merged, steps, others)
                elif stages:
                    shutil.rmtree(staging, ignore_errors=True)

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
            ckpt_dir: the directory; not changed. With `shard`, None on a rank without files.
            metadata, shard: as in `store_path`.
            selector: takes a path relative to `ckpt_dir`; returns whether to include the file. By default all are.

        Raises:
            ValueError, StorageFull: as `store_path`.
            RuntimeError: as `store_path`; or no rank gives a directory; or ranks have different files of the same name.
            NotADirectoryError: the directory does not exist.
        """
        source = None if ckpt_dir is None else Path(ckpt_dir)
        if not shard:
            self._check_chief("upload")
            if source is None:
                raise RuntimeError("upload(ckpt_dir=None) without shard=True would save nothing; give a directory")
            names = _files_to_upload(source, selector)
            with self._store(metadata) as (staging, checkpoint):
                _copy(source, staging, names)
            return checkpoint
        if source is None and selector is not None:
            raise RuntimeError(
                "upload(ckpt_dir=None, selector=...): there is nothing to select from; give a directory, or no selector"
            )
        return self._upload_sharded(source, metadata, selector)

    def _upload_sharded(
        self, source: Path | None, metadata: Mapping[str, Any] | None, selector: Selector | None
    ) -> str:
        with all_or_none(self._peers, "listing the files to upload"):
            mine = None if source is None else _files_to_upload(source, selector)
        ranks = self._peers.allgather(mine)
        if all(names is None for names in ranks):
            raise RuntimeError(
                "upload(ckpt_dir=None, shard=True) on all ranks would save nothing; give a directory on at least one"
            )
        shards.check_conflicts(self._peers, source, [names or [] for names in ranks])
        earlier = {name for names in ranks[: self._peers.rank] for name in names or []}
        with self._store_sharded(metadata) as (staging, checkpoint):
            if source is not None:
                _copy(source, staging, [name for name in mine or [] if name not in earlier])
        return checkpoint

    def _commit(
        self, staging: Path, metadata: Mapping[str, Any], steps: int, others: Mapping[str, Listed] | None = None
    ) -> None:
        if taken := [name for name in OURS if (staging / name).exists()]:
            raise ValueError(
                f"a checkpoint can't have a file {taken[0]!r}, a name that dray itself uses; rename the file"
            )
        (staging / METADATA).write_text(json.dumps(dict(metadata), indent=2))
        checkpoint = self._host.commit(staging, Report(batches=steps), {}, others)
        self._reporter.pulse()
        log.debug("checkpoint %s", checkpoint)

    # ------------------------------------------------------------------------------------------------------ restore
    @contextlib.contextmanager
    def restore_path(
        self,
        storage_id: str,
        download_mode: DownloadMode = DownloadMode.LocalWorkersShareDownload,
        *,
        selector: Selector | None = None,
    ) -> Iterator[Path]:
        """Yield the local directory of a checkpoint, to read from; downloaded first if it is in an object store.

        Args:
            storage_id: an id from `store_path` or `upload`, `info.latest_checkpoint`, a directory or a URI.
            download_mode: which ranks call this, see `DownloadMode`.
            selector: has no effect; all files are downloaded.

        Raises:
            FileNotFoundError: the checkpoint does not exist.
            CheckpointError: it is damaged.
        """
        if DownloadMode(download_mode) is DownloadMode.LocalWorkersShareDownload and Location.of(storage_id).is_local:
            directory = open_together(
                self._peers, lambda: self._host.open_checkpoint(storage_id), "reading a checkpoint"
            )
        else:  # a rank may remove its download while another still reads
            with self._in_lockstep(download_mode):
                directory = self._host.open_checkpoint(storage_id)
        yield directory
        self._reporter.pulse()

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
            selector: takes a path relative to the checkpoint; returns whether to copy the file. By default all are.
                Ranks that share the files get what any of them selects.

        Raises:
            FileNotFoundError, CheckpointError: as `restore_path`.
        """
        shared = DownloadMode(download_mode) is DownloadMode.LocalWorkersShareDownload
        with self.restore_path(storage_id, download_mode) as source:
            wanted = set(_files(source, selector))
            if shared:
                wanted = set().union(*self._peers.allgather_local(wanted))
            with self._in_lockstep(download_mode):
                if not shared or self._peers.local_rank == 0:
                    Path(ckpt_dir).mkdir(parents=True, exist_ok=True)
                    _copy(source, Path(ckpt_dir), sorted(wanted - set(OURS)))

    def get_metadata(self, storage_id: str) -> dict[str, Any]:
        """The metadata that a checkpoint was stored with; {} if none.

        Any rank may call this: of the other files only the sizes are checked, the contents when they are restored.

        Raises:
            FileNotFoundError: the checkpoint does not exist.
            CheckpointError: its metadata are damaged, or a file is missing or has another size.
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
        """Delete a checkpoint of this trial, or of this local run. On the chief only.

        Raises:
            ValueError: it does not belong to this trial or run.
        """
        self._host.delete_checkpoint(storage_id)

    # -------------------------------------------------------------------------------------------------------- ranks
    def _in_lockstep(self, mode: DownloadMode) -> contextlib.AbstractContextManager[Any]:
        if DownloadMode(mode) is DownloadMode.NoSharedDownload:
            return contextlib.nullcontext()
        return all_or_none(self._peers, "reading a checkpoint")

    def _check_chief(self, what: str) -> None:
        if self._peers.rank > 0:
            raise RuntimeError(
                f"checkpoint.{what}() was called on rank {self._peers.rank}; without shard=True, call it on rank 0 only"
            )


def _steps(metadata: Mapping[str, Any] | None) -> int:
    given = (metadata or {}).get("steps_completed")
    try:
        steps = operator.index(given)  # type: ignore[arg-type]
    except TypeError:
        steps = -1
    if steps < 0 or isinstance(given, bool):
        raise ValueError(
            "a checkpoint's metadata must have 'steps_completed', an int >= 0, as in reports of metrics: "
            f'{{"steps_completed": batches_trained}}; got {dict(metadata or {})!r}'
        )
    return steps


def _files(directory: Path, selector: Selector | None = None) -> list[str]:
    """The files in a directory, by relative path."""
    names = sorted(path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file())
    return [name for name in names if selector is None or selector(name)]


def _files_to_upload(directory: Path, selector: Selector | None) -> list[str]:
    if not directory.is_dir():
        raise NotADirectoryError(f"upload(): no such directory: {str(directory)!r}")
    return _files(directory, selector)


def _copy(source: Path, target: Path, names: Sequence[str]) -> None:
    for name in names:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / name, target / name)
