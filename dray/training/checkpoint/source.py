"""The source code in a checkpoint, from which its trial can be rebuilt."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path

from dray.masking import hidden

log = logging.getLogger(__name__)

SUFFIXES = frozenset({".py", ".pyi", ".ipynb", ".yaml", ".yml", ".json", ".toml", ".cfg", ".ini", ".txt", ".md", ".sh"})
MAX_FILE_BYTES = 1 << 20
MAX_BYTES = 16 << 20
MAX_ENTRIES = 5_000


def collect(directory: Path, *, leave_out: Path | None = None, secrets: Sequence[str] = ()) -> dict[str, bytes]:
    """Collect the source files in `directory`, by relative path: known suffixes, up to 1 MiB each and 16 MiB in total.

    Hidden directories, caches, virtual environments and `leave_out` (the checkpoints' directory, which may be inside)
    are skipped. If a directory is too large to be a program's (a home directory), collection stops with a warning.
    `secrets` in the files are masked.
    """
    leave_out = leave_out.resolve() if leave_out is not None else None
    files: dict[str, bytes] = {}
    total = entries = 0
    for root, directories, names in os.walk(directory.resolve()):
        here = Path(root)
        directories[:] = sorted(name for name in directories if not _is_foreign(here / name, leave_out))
        entries += len(names) + len(directories)
        for name in sorted(names):
            path = here / name
            if path.suffix not in SUFFIXES or name.startswith("."):
                continue
            try:
                size = path.stat().st_size
                if size > MAX_FILE_BYTES:
                    continue
                total += size
                if total <= MAX_BYTES:
                    files[path.relative_to(directory.resolve()).as_posix()] = hidden(path.read_bytes(), secrets)
            except OSError as error:
                log.warning("leaving %s out of the code in checkpoints: %s", path, error)
        if total > MAX_BYTES or entries > MAX_ENTRIES:
            log.warning(
                "%s holds more than a program's source code: checkpoints get only the first %d files of it; run from "
                "the program's own directory",
                directory,
                len(files),
            )
            break
    return files


def _is_foreign(directory: Path, leave_out: Path | None) -> bool:
    name = directory.name
    return (
        name.startswith(".")
        or name in ("__pycache__", "node_modules", "site-packages")
        or directory == leave_out
        or (directory / "pyvenv.cfg").exists()
    )
