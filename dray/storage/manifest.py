"""`manifest.json`, which completes a checkpoint: the size and checksum of each of its files."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dray.storage.disk import files_in
from dray.storage.errors import CheckpointError

log = logging.getLogger(__name__)

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
DETERMINED_STATE = "state_dict.pth"  # Determined's file for a trial's state; dray's has another name
_PROGRESS = "progress.json"


@dataclass(frozen=True, slots=True)
class Listed:
    """A file's entry in the manifest: its size in bytes, and its SHA-256."""

    size: int
    sha256: str


def write_manifest(directory: Path, known: Mapping[str, Listed]) -> None:
    """Write a checkpoint's manifest. `known` has the entries of files whose checksums are known, including those that
    other machines have uploaded; all other files are read."""
    listed = sorted((listed_in(directory, known) | dict(known)).items())
    files = {name: {"size": each.size, "sha256": each.sha256} for name, each in listed}
    # Renamed when complete: some file systems rename a directory by copying it, and could copy half a manifest.
    partial = directory / (MANIFEST + ".tmp")
    partial.write_text(json.dumps({"format_version": FORMAT_VERSION, "files": files}, indent=1))
    partial.rename(directory / MANIFEST)


def listed_in(directory: Path, known: Mapping[str, Listed]) -> dict[str, Listed]:
    """The manifest's entries for a directory, by file name; `known` as in `write_manifest`."""
    return {
        name: known.get(name) or Listed(os.stat(f"{directory}/{name}").st_size, sha256_of(directory / name))
        for name in files_in(directory)
    }


def parse_manifest(content: bytes, checkpoint: object) -> dict[str, Listed]:
    """The entries in the content of a manifest file, by file name; errors name the `checkpoint`."""
    try:
        manifest = json.loads(content)
        version = manifest["format_version"]
        if version == FORMAT_VERSION:
            return {
                str(name): Listed(size=_typed(int, listed["size"]), sha256=_typed(str, listed["sha256"]))
                for name, listed in _typed(dict, manifest["files"]).items()
            }
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise _damaged(checkpoint, f"its {MANIFEST} can't be read ({error!r})") from error
    cure = "upgrade dray" if isinstance(version, int) and version > FORMAT_VERSION else "use an earlier version of dray"
    fault = f"has format version {version}, but this version of dray reads {FORMAT_VERSION}"
    raise CheckpointError(f"{checkpoint} {fault}; {cure}")


def check_files(sizes: dict[str, int], listed: dict[str, Listed], checkpoint: object) -> None:
    """Check that a checkpoint's files, by their sizes in bytes, are exactly those that its manifest lists."""
    for name, expected in listed.items():
        if name not in sizes:
            raise _damaged(checkpoint, f"{name} is missing")
        if sizes[name] != expected.size:
            raise _damaged(checkpoint, f"{name} has {sizes[name]} bytes, but its manifest says {expected.size}")
    if extra := next((name for name in sorted(sizes.keys() - listed.keys()) if not _is_harmless(name)), None):
        raise _damaged(checkpoint, f"{extra} is not in its manifest")


def _damaged(checkpoint: object, fault: str) -> CheckpointError:
    return CheckpointError(f"{checkpoint} is damaged: {fault}; use an earlier checkpoint")


def verify(
    checkpoint: Path, name: object = None, *, without_manifest: bool = False, only: Collection[str] = ()
) -> Path:
    """Return `checkpoint`, a local directory, if it is valid. Determined's have no checksums, and pass.

    Args:
        name: the name in errors. Default: the path.
        without_manifest: accept, with a warning, a checkpoint of dray without a manifest. For a path from the user: it
            may be a copy made in `on_checkpoint_write_end`, before the manifest was written.
        only: if not empty, read only these files, and compare just the sizes of the others.

    Raises:
        FileNotFoundError: there is no such directory.
        CheckpointError: it is not a checkpoint, or it is damaged.
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
    files = [file for file in files_in(checkpoint) if (checkpoint / file).is_file()]  # no pipes or links to nowhere
    check_files({file: (checkpoint / file).stat().st_size for file in files}, listed, name)
    for file, expected in listed.items():
        if (not only or file in only) and sha256_of(checkpoint / file) != expected.sha256:
            raise _damaged(name, f"{file} does not match its checksum")
    return checkpoint


def never_completed(checkpoint: object) -> CheckpointError:
    return CheckpointError(f"{checkpoint} is not a checkpoint: it has no {MANIFEST}, so it was never completed")


def holds_a_trial(directory: Path) -> bool:
    """Whether a directory has a trial's state, dray's or Determined's, complete or not."""
    return (directory / _PROGRESS).is_file() or determined_state(directory) is not None


def determined_state(checkpoint: Path) -> Path | None:
    """The state file of a checkpoint that Determined wrote; None if it is not one of Determined's."""
    names = [name for name in (MANIFEST, _PROGRESS, DETERMINED_STATE) if (checkpoint / name).exists()]
    return checkpoint / DETERMINED_STATE if is_determined(names) else None


def is_determined(names: Collection[str]) -> bool:
    # A part of dray's checkpoint may also have a file of that name, from a callback.
    return DETERMINED_STATE in names and MANIFEST not in names and _PROGRESS not in names


def _is_harmless(name: str) -> bool:
    """Whether a file need not be listed: Ray's `.metadata.json`, hidden files of a file system, and bytecode in code/,
    which Python checks against its source."""
    parts = name.split("/")
    return name == MANIFEST or parts[-1].startswith(".") or "__pycache__" in parts


def _typed(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise TypeError(f"expected {kind.__name__}, got {value!r}")
    return value


def sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
