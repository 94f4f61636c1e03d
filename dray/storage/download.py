"""Downloads checkpoints from an object store, and verifies them."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from dray.storage.errors import CheckpointError
from dray.storage.location import Location
from dray.storage.manifest import MANIFEST, check_files, is_determined, never_completed, parse_manifest, verify
from dray.storage.remote import RemoteDirectory
from dray.storage.scratch import scratch

DOWNLOADED = ".opened-"
"""The names of copies begin with this."""


@contextmanager
def opened(checkpoint: str | os.PathLike[str] | Location, *, without_manifest: bool = False) -> Iterator[Path]:
    """The verified local directory of any checkpoint, by path, URI or location, until the block ends.

    Args:
        checkpoint: if it is remote, it is downloaded for the block.
        without_manifest: as in `verify`; only for a local directory.

    Raises:
        FileNotFoundError, CheckpointError, StorageError: as in `CheckpointStore.open`.
    """
    place = Location.of(checkpoint)
    if place.is_local:
        yield verify(place.path, without_manifest=without_manifest)
        return
    with scratch("checkpoint") as copies:
        yield downloaded(RemoteDirectory(place), copies)


def downloaded(remote: RemoteDirectory, to: Path, *, only: Collection[str] = ()) -> Path:
    """A verified copy of a remote checkpoint in the directory `to`; `only` as in `verify`."""
    name = remote.location
    sizes = remote.sizes()
    if not sizes:
        raise FileNotFoundError(f"there is no checkpoint {str(name)!r}: nothing exists there")
    key = hashlib.sha256(str(name).encode())
    if MANIFEST in sizes:
        # The key includes the manifest: another checkpoint may have replaced one of the same name.
        manifest = remote.read(MANIFEST)
        check_files(sizes, parse_manifest(manifest, name), name)
        key.update(manifest)
    elif not is_determined(sizes):
        raise never_completed(name)
    target = to / f"{DOWNLOADED}{key.hexdigest()[:16]}"
    to.mkdir(parents=True, exist_ok=True)
    with (to / f"{DOWNLOADED}lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
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
