"""The checkpoints of one trial, each a directory `checkpoint_<batches>` in the trial's directory.

A checkpoint is written into a staging directory, its `manifest.json` (format version, sizes, checksums) last, and then
renamed into place or uploaded, again with the manifest last. A directory without a valid manifest is not a checkpoint:
readers fall back to the one before.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import re
import shutil
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from dray.storage.disk import force_to_disk, scratch
from dray.storage.errors import CheckpointError
from dray.storage.location import Location
from dray.storage.manifest import (
    MANIFEST,
    Listed,
    check_files,
    is_determined,
    listed_in,
    never_completed,
    parse_manifest,
    verify,
    write_manifest,
)
from dray.storage.remote import PATIENCE_S, RemoteDirectory

log = logging.getLogger(__name__)

_NAME = re.compile(r"checkpoint_(\d+)")
_STAGING, _REPLACED, _DOWNLOADED, _KEPT = ".staging-", ".replaced-", ".opened-", ".kept-"

_warned: set[str] = set()
_kept: Path | None = None  # this process's copy of a checkpoint that it has uploaded, from which it may soon resume


def _warn(checkpoint: str, why: str) -> None:
    """Warn once per process, since a damaged checkpoint is found at every read."""
    if why not in _warned:
        _warned.add(why)
        log.warning("skipping a checkpoint: %s", why)


class CheckpointStore:
    """The checkpoints of one trial in a local directory, which need not exist yet. A checkpoint's id is its path.

    The store can be pickled. `commit` may be called from any thread, but not concurrently.
    """

    is_remote = False  # whether a commit goes over a network
    transferred = 0  # in this process: grows with each commit, and each attempt and chunk of an upload or download
    warn: Callable[[str], object] = staticmethod(log.warning)  # called when a transfer is retried

    def __init__(self, trial_dir: Path) -> None:
        self.trial_dir = trial_dir
        self._patience_s = PATIENCE_S
        self._opened: tuple[str, Path] | None = None  # verified by open_latest(); the next open() need not verify it

    @property
    def outputs(self) -> Location:
        """The location for a trial's other files, which are kept when checkpoints are deleted."""
        return Location.of(self.trial_dir).child("outputs")

    def id_of(self, batches: int) -> str:
        return str(self.trial_dir / f"checkpoint_{batches}")

    def batches_of(self, checkpoint: str) -> int:
        match = _NAME.fullmatch(Location.of(checkpoint).name)
        assert match is not None, f"{checkpoint} is not the id of a checkpoint of this trial"
        return int(match[1])

    def stage(self, batches: int) -> Path:
        """Make an empty local directory for the files of the next checkpoint."""
        staging = self.trial_dir / f"{_STAGING}{batches}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        staging.mkdir(parents=True)
        self._opened = None  # it may be replaced
        return staging

    def commit(
        self,
        staging: Path,
        batches: int,
        known: Mapping[str, Listed] | None = None,
        *,
        confirm: Callable[[], object] = lambda: None,
        keep: bool = False,
    ) -> str:
        """Turn a directory from `stage` into the checkpoint at this number of batches, atomically, and return its id.
        An earlier one is replaced.

        Args:
            known: as in `write_manifest`.
            confirm: called before anything is replaced, and again after a long upload; may raise an error.
            keep: keep the local copy of an upload until the next one that is kept: this process may soon open it.

        Raises:
            OSError: the disk is full or fails; with a remote store also `StorageError`, after minutes of retries.
        """
        write_manifest(staging, known or {})
        confirm()
        self._put(staging, batches, known or {}, confirm, keep)
        self._progressed()
        return self.id_of(batches)

    def _put(
        self, staging: Path, batches: int, known: Collection[str], confirm: Callable[[], object], keep: bool
    ) -> None:
        target = Path(self.id_of(batches))
        if target.exists():
            force_to_disk(staging)
            replaced = target.with_name(f"{_REPLACED}{target.name}-{uuid.uuid4().hex[:8]}")
            target.rename(replaced)
            staging.rename(target)
            shutil.rmtree(replaced, ignore_errors=True)
        else:
            staging.rename(target)

    def add(self, staging: Path, batches: int, known: Mapping[str, Listed]) -> dict[str, Listed]:
        """Upload this machine's part of a checkpoint that another machine will commit, and return the entries of its
        files; `known` as in `write_manifest`. Remote stores only."""
        raise AssertionError("parts of a checkpoint in a directory are staged together")

    def force_to_disk(self, batches: int) -> None:
        """Make a checkpoint survive a power failure, which a commit does not wait for. Call this before deleting the
        checkpoint that it replaces."""
        force_to_disk(Path(self.id_of(batches)))

    def listed(self) -> list[tuple[int, str]]:
        """(batches, id) of each directory named like a checkpoint, latest first; not verified."""
        numbers = [int(match[1]) for name in self._names() if (match := _NAME.fullmatch(name))]
        return [(batches, self.id_of(batches)) for batches in sorted(numbers, reverse=True)]

    def find(self, batches: int) -> str | None:
        """The id of the checkpoint at this number of batches; None if there is none or it is damaged. In a remote store
        only the names and sizes of files are checked."""
        try:
            self._check(self.id_of(batches))
        except (CheckpointError, FileNotFoundError):
            return None
        return self.id_of(batches)

    def verify(self, checkpoint: str) -> None:
        """Verify a checkpoint; in a remote store only the names and sizes of its files. Raises as `open`."""
        self._check(checkpoint)

    def fault(self, batches: int) -> str:
        """Why the checkpoint at this number of batches can't be used, by the names and sizes of its files; "" if it
        can."""
        try:
            self._check_sizes(self.id_of(batches))
        except FileNotFoundError:
            kept = "it was deleted, or not kept (checkpoint_policy, save_trial_best)"
            return f"{self.id_of(batches)} does not exist: {kept}"
        except CheckpointError as error:
            return str(error)
        return ""

    def is_complete(self, batches: int) -> bool:
        """Whether the checkpoint has a manifest; otherwise it is being written or deleted."""
        try:
            self.read(batches, MANIFEST)
        except FileNotFoundError:
            return False
        return True

    def read(self, batches: int, name: str) -> bytes:
        """The content of a small file of the checkpoint; not verified."""
        return (Path(self.id_of(batches)) / name).read_bytes()

    def latest(self) -> str | None:
        """The id of the latest valid checkpoint. Damaged ones are skipped, each with one warning."""
        opened = self.open_latest()
        return None if opened is None else opened[0]

    def open_latest(self, on_damage: Callable[[str, str], None] = _warn) -> tuple[str, Path] | None:
        """The id of the latest valid checkpoint, and its local directory from `open`.

        `on_damage` is called with the id of each damaged checkpoint and the reason. Default: warn once.
        """
        for _, checkpoint in self.listed():
            try:
                self._opened = checkpoint, self.open(checkpoint)
            except (CheckpointError, FileNotFoundError) as error:
                on_damage(checkpoint, str(error))
            else:
                return self._opened
        return None

    def open(self, checkpoint: str, *, only: Collection[str] = ()) -> Path:
        """Verify a checkpoint of this trial by its id, or any other by path or URI, and return its local directory.

        One of the machine's processes downloads a remote checkpoint; the copy is kept until `close`. `only` as in
        `verify`.

        Raises:
            FileNotFoundError: there is no such checkpoint.
            CheckpointError: the checkpoint is damaged.
            StorageError: the store can't be reached.
        """
        opened = self._opened
        if not only:
            self._opened = None
        if opened is not None and opened[0] == checkpoint:
            return opened[1]
        location = self._location(checkpoint)
        if location.is_local:
            # A checkpoint of this trial may be half written or half deleted; any other path is the user's.
            return verify(location.path, without_manifest=location.path.parent != self.trial_dir, only=only)
        return _downloaded(self._remote(location), self.trial_dir, only=only)

    def filesystem_of(self, checkpoint: str) -> tuple[Any, str]:
        return self._location(checkpoint).filesystem()

    def close(self) -> None:
        """Remove the copies that `open` downloaded."""
        self._opened = None
        _remove(self.trial_dir, _DOWNLOADED)

    def delete(self, batches: int) -> None:
        """Remove a checkpoint if it exists, its manifest first, so that a half-deleted one is invalid."""
        path = Path(self.id_of(batches))
        if path.is_symlink():  # the trial has made it, and nothing beyond it is ours
            path.unlink()
            return
        (path / MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(path, ignore_errors=True)

    def sweep(self) -> None:
        """Remove the temporary files of a killed writer. Called by the trial's only writer before it writes."""
        _remove(self.trial_dir, _STAGING, _REPLACED, _DOWNLOADED, _KEPT)

    def _remote(self, location: Location) -> RemoteDirectory:
        return RemoteDirectory(
            location, patience_s=self._patience_s, progressed=self._progressed, warn=lambda line: self.warn(line)
        )

    def _progressed(self) -> None:
        CheckpointStore.transferred += 1

    def _names(self) -> set[str]:
        return set(os.listdir(self.trial_dir)) if self.trial_dir.is_dir() else set()

    def _location(self, checkpoint: str) -> Location:
        return Location.of(checkpoint)

    def _check(self, checkpoint: str) -> None:
        verify(Path(checkpoint))

    def _check_sizes(self, checkpoint: str) -> None:
        verify(Path(checkpoint), only=(MANIFEST,))


class RemoteStore(CheckpointStore):
    """The checkpoints of one trial in an object store. Their ids are URIs; they are staged and opened in the local
    directory `scratch`."""

    is_remote = True

    def __init__(self, root: Location, scratch: Path, *, patience_s: float = PATIENCE_S) -> None:
        super().__init__(scratch)
        self.root = root
        self._patience_s = patience_s

    @property
    def outputs(self) -> Location:
        return self.root.child("outputs")

    def id_of(self, batches: int) -> str:
        return self._at(batches).uri

    def _put(
        self, staging: Path, batches: int, known: Collection[str], confirm: Callable[[], object], keep: bool
    ) -> None:
        global _kept
        remote = self._remote(self._at(batches))
        remote.upload(staging, last=MANIFEST, keep=known, confirm=confirm)
        if keep and all((staging / name).exists() for name in known):  # none is on another machine only
            forget_copy()
            _kept = staging.rename(self.trial_dir / _key(_KEPT, remote, (staging / MANIFEST).read_bytes()))
        else:
            shutil.rmtree(staging, ignore_errors=True)

    def add(self, staging: Path, batches: int, known: Mapping[str, Listed]) -> dict[str, Listed]:
        self._remote(self._at(batches)).add(staging, without=MANIFEST)
        return listed_in(staging, known)

    def force_to_disk(self, batches: int) -> None:
        """No-op: an acknowledged upload is durable."""

    def read(self, batches: int, name: str) -> bytes:
        return self._remote(self._at(batches)).read(name)

    def delete(self, batches: int) -> None:
        self._remote(self._at(batches)).delete(first=MANIFEST)

    def _at(self, batches: int) -> Location:
        return self.root.child(f"checkpoint_{batches}")

    def _names(self) -> set[str]:
        return {name.partition("/")[0] for name in self._remote(self.root).sizes() if "/" in name}

    def _location(self, checkpoint: str) -> Location:
        return Location.of(checkpoint).with_secrets_of(self.root)

    def _check(self, checkpoint: str) -> None:
        directory = self._remote(self._location(checkpoint))
        check_files(directory.sizes(), parse_manifest(directory.read(MANIFEST), checkpoint), checkpoint)

    _check_sizes = _check


def store_at(location: Location, scratch: Path) -> CheckpointStore:
    return CheckpointStore(location.path) if location.is_local else RemoteStore(location, scratch)


@contextlib.contextmanager
def opened(checkpoint: str | os.PathLike[str] | Location, *, without_manifest: bool = False) -> Iterator[Path]:
    """Verify any checkpoint, by path, URI or location, and yield its local directory; a download is removed at the end
    of the block. `without_manifest` as in `verify`, for local directories."""
    place = Location.of(checkpoint)
    if place.is_local:
        yield verify(place.path, without_manifest=without_manifest)
        return
    with scratch("checkpoint") as copies:
        yield _downloaded(RemoteDirectory(place), copies)


def _downloaded(remote: RemoteDirectory, to: Path, *, only: Collection[str] = ()) -> Path:
    """Download a remote checkpoint into the directory `to`, and verify it; `only` as in `verify`."""
    name = remote.location
    sizes = remote.sizes()
    if not sizes:
        raise FileNotFoundError(f"there is no checkpoint {str(name)!r}: nothing exists there")
    manifest = b""
    if MANIFEST in sizes:
        manifest = remote.read(MANIFEST)
        check_files(sizes, parse_manifest(manifest, name), name)
    elif not is_determined(sizes):
        raise never_completed(name)
    target = to / _key(_DOWNLOADED, remote, manifest)
    to.mkdir(parents=True, exist_ok=True)
    with (to / f"{_DOWNLOADED}lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if _kept == (kept := to / _key(_KEPT, remote, manifest)) and kept.exists():
            kept.rename(target)
        if not target.exists():
            partial = target.with_name(f"{target.name}-partial")
            shutil.rmtree(partial, ignore_errors=True)
            remote.download(partial, sizes)
            partial.rename(target)
    try:
        return verify(target, name, only=only)
    except CheckpointError:
        shutil.rmtree(target, ignore_errors=True)
        raise


def _key(prefix: str, remote: RemoteDirectory, manifest: bytes) -> str:
    """The name of a local copy. It depends on the manifest: another checkpoint may replace one of the same name."""
    return prefix + hashlib.sha256(str(remote.location).encode() + manifest).hexdigest()[:16]


def forget_copy() -> None:
    """Remove this process's copy of a checkpoint that it has uploaded."""
    if _kept is not None:
        shutil.rmtree(_kept, ignore_errors=True)


def _remove(directory: Path, *prefixes: str) -> None:
    if directory.is_dir():
        for path in directory.iterdir():
            if path.name.startswith(prefixes) and path != _kept:
                if path.is_dir():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink(missing_ok=True)
