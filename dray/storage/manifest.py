"""`manifest.json`, which makes a directory a checkpoint: the size and checksum of each of its files."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dray.storage.errors import CheckpointError

log = logging.getLogger(__name__)

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
DETERMINED_STATE = "state_dict.pth"
"""Where Determined keeps a trial's state; dray's has another name."""
_PROGRESS = "progress.json"


@dataclass(frozen=True, slots=True)
class Listed:
    """A file in the manifest: its size in bytes, and its SHA-256."""

    size: int
    sha256: str


def write_manifest(
    directory: Path, digests: Mapping[str, str] | None = None, others: Mapping[str, Listed] | None = None
) -> None:
    """Complete a directory: the files that are in it now are the checkpoint.

    Args:
        directory: of the files.
        digests: the SHA-256 of files by name, as far as known; other files are read.
        others: files of the checkpoint that are uploaded already.
    """
    listed = sorted((listed_in(directory, digests) | dict(others or {})).items())
    files = {name: {"size": each.size, "sha256": each.sha256} for name, each in listed}
    # Under another name first, so that the manifest is whole even where renaming the directory copies it.
    unnamed = directory / (MANIFEST + ".tmp")
    unnamed.write_text(json.dumps({"format_version": FORMAT_VERSION, "files": files}, indent=1))
    unnamed.rename(directory / MANIFEST)


def listed_in(directory: Path, digests: Mapping[str, str] | None = None) -> dict[str, Listed]:
    """The files in a directory, by name; `digests` as for `write_manifest`."""
    known = digests or {}
    return {
        name: Listed(os.stat(f"{directory}/{name}").st_size, known.get(name) or _sha256(directory / name))
        for name in _files(directory)
    }


def parse_manifest(content: bytes, checkpoint: object) -> dict[str, Listed]:
    """The files that a manifest lists, by name.

    Args:
        content: the manifest's.
        checkpoint: its name in errors.

    Raises:
        CheckpointError: it is not a manifest, or one of another version.
    """
    try:
        manifest = json.loads(content)
        version = manifest["format_version"]
        if version == FORMAT_VERSION:
            return {
                str(name): Listed(size=_of(int, listed["size"]), sha256=_of(str, listed["sha256"]))
                for name, listed in _of(dict, manifest["files"]).items()
            }
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(
            f"{checkpoint} is damaged: its {MANIFEST} can't be read ({error!r}); use an earlier checkpoint"
        ) from error
    newer = isinstance(version, int) and version > FORMAT_VERSION
    raise CheckpointError(
        f"{checkpoint} has format version {version}, but this version of dray reads {FORMAT_VERSION}; "
        f"{'upgrade dray' if newer else 'use an earlier version of dray'}"
    )


def check_files(sizes: dict[str, int], listed: dict[str, Listed], checkpoint: object) -> None:
    """Check that a checkpoint has the files that its manifest lists, of these sizes in bytes, and no others.

    Raises:
        CheckpointError: it has not.
    """

    def damaged(what: str) -> CheckpointError:
        return CheckpointError(f"{checkpoint} is damaged: {what}; use an earlier checkpoint")

    for name, expected in listed.items():
        if name not in sizes:
            raise damaged(f"{name} is missing")
        if sizes[name] != expected.size:
            raise damaged(f"{name} has {sizes[name]} bytes, but its manifest says {expected.size}")
    if more := next((name for name in sorted(sizes.keys() - listed.keys()) if not _is_aside(name)), None):
        raise damaged(f"{more} is not in its manifest")


def verify(checkpoint: Path, name: object = None, *, without_manifest: bool = False) -> Path:
    """Return `checkpoint` if it is valid. One that Determined wrote can't be checked, and passes.

    Args:
        checkpoint: a local directory.
        name: its name in errors; by default its path.
        without_manifest: also accept, with a warning, one of dray's that lacks its manifest. For a path that a user
            gave: it may be a copy that was made in `on_checkpoint_write_end`, before the manifest was written.

    Raises:
        FileNotFoundError: there is no such directory.
        CheckpointError: it has no manifest, one of another version, or files that are missing, changed or too many.
    """
    name = checkpoint if name is None else name
    if not checkpoint.is_dir():
        raise FileNotFoundError(f"there is no checkpoint {str(name)!r}: no such directory")
    if not (checkpoint / MANIFEST).is_file():
        if determined_state(checkpoint) is not None:
            return checkpoint
        if without_manifest and holds_a_trial(checkpoint):
            log.warning("%s has no %s, so it can't be verified: a file may be damaged or missing", name, MANIFEST)
            return checkpoint
        raise never_completed(name)
    listed = parse_manifest((checkpoint / MANIFEST).read_bytes(), name)
    check_files({file: (checkpoint / file).stat().st_size for file in _files(checkpoint)}, listed, name)
    for file, expected in listed.items():
        if _sha256(checkpoint / file) != expected.sha256:
            raise CheckpointError(f"{name} is damaged: {file} is not what was written; use an earlier checkpoint")
    return checkpoint


def never_completed(checkpoint: object) -> CheckpointError:
    """The error of a directory without a manifest."""
    return CheckpointError(f"{checkpoint} is not a checkpoint: it has no {MANIFEST}, so it was never completed")


def holds_a_trial(directory: Path) -> bool:
    """Whether a directory has a trial's state, dray's or Determined's; it may be incomplete."""
    return (directory / _PROGRESS).is_file() or determined_state(directory) is not None


def determined_state(checkpoint: Path) -> Path | None:
    """The state file of a checkpoint that Determined wrote; None if it is not one of Determined's."""
    names = [name for name in (MANIFEST, _PROGRESS, DETERMINED_STATE) if (checkpoint / name).exists()]
    return checkpoint / DETERMINED_STATE if is_determined(names) else None


def is_determined(names: Collection[str]) -> bool:
    """Whether a directory with files of these names is a checkpoint that Determined wrote."""
    # A part of a checkpoint of dray's may have a file of such a name too, from a callback.
    return DETERMINED_STATE in names and MANIFEST not in names and _PROGRESS not in names


def _is_aside(name: str) -> bool:
    """Whether a file that the manifest does not list is harmless: Ray's `.metadata.json`, a file system's own, and
    bytecode of code/, which Python checks against the source."""
    parts = name.split("/")
    return name == MANIFEST or parts[-1].startswith(".") or "__pycache__" in parts


def _of(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise TypeError(f"expected {kind.__name__}, got {value!r}")
    return value


def _files(directory: Path) -> list[str]:
    # Plain strings: pathlib takes longer than the disk.
    start = len(os.path.join(directory, ""))
    return [
        os.path.join(root, name)[start:].replace(os.sep, "/") for root, _, names in os.walk(directory) for name in names
    ]


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
