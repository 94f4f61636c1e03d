"""Sends directories to the nodes of a cluster that others have started, with Ray's runtime environments.

A directory is put into the cluster's own store, once per content, and each node that needs it unpacks it once.
``ray.init(runtime_env=...)`` does the same, but only for the first connection. The internal APIs of Ray that this
needs are used in this file alone: the upload, and the name of what was unpacked.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import searchers
from dray.code.ignore import make_links
from dray.storage.disk import scratch

_INSIDE = "dray-code"
"""The code is in this subdirectory of what Ray puts on a worker's path, so that the worker does not import a model's
``random.py`` in place of Python's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """A directory in a cluster's store."""

    uri: str
    links: tuple[tuple[str, str], ...] = ()  # symbolic links in it, which Ray does not keep, with their targets

    def place(self) -> Path:
        """Where it is on this worker, whose runtime environment contains it."""
        name = PurePosixPath(self.uri).stem
        for entry in map(Path, sys.path):
            if entry.name == name and (place := entry / _INSIDE).is_dir():
                make_links(place, self.links)
                return place
        raise FileNotFoundError(
            f"the package of the trial's code, {name}, is not on this worker's path: {', '.join(sys.path)}"
        )


def package(directory: Path, links: tuple[tuple[str, str], ...]) -> Package:
    """Put a directory, without these links, into the store of the cluster that this process is connected to."""
    return Package(uri=_upload({_INSIDE: directory}, [f"{_INSIDE}/{link}" for link, _ in links]), links=links)


def runtime_env(*packages: Package) -> dict[str, Any]:
    """A runtime environment for actors and tasks: these packages, and dray itself as this process has it.

    Ray merges it with the job's own environment, except for py_modules, so the job's are repeated here.
    """
    import ray

    parts = Path(__file__).parents[1], Path(searchers.__file__).parent
    itself = _upload({part.name: part for part in parts}, [])
    theirs: Sequence[str] = ray.get_runtime_context().runtime_env.get("py_modules") or ()
    # In the order in which modules are searched for.
    return {"py_modules": [itself, *(package.uri for package in packages), *theirs]}


def _upload(directories: Mapping[str, Path], without: Sequence[str]) -> str:
    """Put directories, under these names, into the store as one package. Returns its URI."""
    from ray._private.runtime_env.working_dir import upload_working_dir_if_needed

    # Patterns of .gitignore.
    excludes = ["__pycache__", *("/" + re.sub(r"([\\*?\[\]])", r"\\\1", path) for path in without)]
    with scratch("upload") as place:
        root = place / "root"
        root.mkdir()
        for name, directory in directories.items():
            (root / name).symlink_to(directory.resolve())
        uploaded = upload_working_dir_if_needed(
            {"working_dir": str(root), "excludes": excludes},
            include_gitignore=False,
            scratch_dir=str(place),
            logger=logging.getLogger("dray"),
        )
    return str(uploaded["working_dir"])
