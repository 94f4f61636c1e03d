"""Checkpoints of one trial, each a directory `checkpoint_<batches>` below the trial's own.

A checkpoint is written aside, gets its `manifest.json` (format version, sizes, checksums) last, and is then renamed
into place. A directory without a valid manifest is no checkpoint: readers fall back to the one before.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import uuid
from pathlib import Path

log = logging.getLogger(__name__)

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
_NAME = re.compile(r"checkpoint_(\d+)")
DETERMINED_STATES = ("state_dict.pth", "determined/state_dict.pth", "pedl/state_dict.pth", "checkpoint.pt")
"""Where Determined's versions kept a trial's state, the newest first; ours has another name."""


class CheckpointError(ValueError):
    """A directory that was to be a checkpoint is none, or is damaged."""


def stage(trial_dir: Path, batches: int) -> Path:
    """An empty directory beside the trial's checkpoints, to write the next one into."""
    staging = trial_dir / f".staging-{batches}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    staging.mkdir(parents=True)
    return staging


def commit(staging: Path, target: Path) -> Path:
    """Turn a staged directory into the checkpoint `target`, all or nothing, and return `target`.

    A checkpoint already there is replaced.
    """
    files = {}
    for path in sorted(_files(staging)):
        name = path.relative_to(staging).as_posix()
        files[name] = {"size": path.stat().st_size, "sha256": _sha256(path)}
    manifest = {"format_version": FORMAT_VERSION, "files": files}
    # Under another name first: a manifest is there whole or not at all, also where a rename of the directory is a copy.
    unnamed = staging / (MANIFEST + ".tmp")
    unnamed.write_text(json.dumps(manifest, indent=1))
    unnamed.rename(staging / MANIFEST)
    if target.exists():
        replaced = target.with_name(f".replaced-{target.name}-{uuid.uuid4().hex[:8]}")
        target.rename(replaced)
        staging.rename(target)
        shutil.rmtree(replaced, ignore_errors=True)
    else:
        staging.rename(target)
    return target


def verify(checkpoint: Path) -> Path:
    """Return `checkpoint` if it is whole. One that Determined wrote has nothing to tell that by, and passes.

    Raises:
        FileNotFoundError: there is no such directory.
        CheckpointError: it has no manifest, one of another version, or files that are missing or changed.
    """
    if not checkpoint.is_dir():
        raise FileNotFoundError(f"there is no checkpoint {str(checkpoint)!r}: no such directory")
    path = checkpoint / MANIFEST
    if not path.exists():
        if determined_state(checkpoint) is not None:
            return checkpoint
        raise CheckpointError(f"{checkpoint} is not a checkpoint: it has no {MANIFEST}, so it was never completed")
    try:
        manifest = json.loads(path.read_text())
        version, files = manifest["format_version"], manifest["files"]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is damaged: {error!r}; use an earlier checkpoint") from error
    if version != FORMAT_VERSION:
        raise CheckpointError(
            f"{checkpoint} has format version {version}, this dray reads {FORMAT_VERSION}; "
            f"{'upgrade dray' if isinstance(version, int) and version > FORMAT_VERSION else 'use an earlier dray'}"
        )
    for name, expected in files.items():
        file = checkpoint / name
        if not file.is_file():
            raise CheckpointError(f"{checkpoint} is damaged: {name} is missing; use an earlier checkpoint")
        if file.stat().st_size != expected["size"]:
            raise CheckpointError(
                f"{checkpoint} is damaged: {name} has {file.stat().st_size} bytes, its manifest says "
                f"{expected['size']}; use an earlier checkpoint"
            )
        if _sha256(file) != expected["sha256"]:
            raise CheckpointError(f"{checkpoint} is damaged: {name} is not what was written; use an earlier checkpoint")
    return checkpoint


def determined_state(checkpoint: Path) -> Path | None:
    """The state file of a checkpoint that Determined wrote, None if it is not one of Determined's."""
    # A part of one of ours may have such a file too, from a callback.
    if (checkpoint / MANIFEST).exists() or (checkpoint / "progress.json").exists():
        return None
    return next((checkpoint / name for name in DETERMINED_STATES if (checkpoint / name).is_file()), None)


def list_checkpoints(trial_dir: Path) -> list[tuple[int, Path]]:
    """(batches, directory) of everything named as a checkpoint, the latest first; not verified."""
    if not trial_dir.is_dir():
        return []
    found = [(_NAME.fullmatch(path.name), path) for path in trial_dir.iterdir()]
    return sorted(((int(match.group(1)), path) for match, path in found if match), reverse=True)


def latest_checkpoint(trial_dir: Path) -> Path | None:
    """The latest whole checkpoint of a trial; damaged ones are passed over with a warning."""
    for _, path in list_checkpoints(trial_dir):
        try:
            return verify(path)
        except (CheckpointError, FileNotFoundError) as error:
            log.warning("passing over a checkpoint: %s", error)
    return None


class CheckpointStore:
    """The checkpoints of one trial in a local directory.

    Args:
        trial_dir: need not exist yet.
    """

    def __init__(self, trial_dir: Path) -> None:
        self.trial_dir = trial_dir

    def path(self, batches: int) -> Path:
        return self.trial_dir / f"checkpoint_{batches}"

    def stage(self, batches: int) -> Path:
        return stage(self.trial_dir, batches)

    def commit(self, staging: Path, batches: int) -> Path:
        return commit(staging, self.path(batches))

    def latest(self) -> Path | None:
        return latest_checkpoint(self.trial_dir)

    def sweep(self) -> None:
        """Remove what a killed writer left behind. For the only writer, before it writes."""
        if self.trial_dir.is_dir():
            for path in self.trial_dir.iterdir():
                if path.name.startswith((".staging-", ".replaced-")):
                    shutil.rmtree(path, ignore_errors=True)


def _files(directory: Path) -> list[Path]:
    return [Path(root) / name for root, _, names in os.walk(directory) for name in names]


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
