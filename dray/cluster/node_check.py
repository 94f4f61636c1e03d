"""Checks that trials can run on a node: versions, disk space, access to the storage.

On a cluster that others have started, each worker checks its own node when it starts, before the long imports: the
versions must be the driver's, the disks must have room, and the experiment's storage must be reachable. If the storage
is a directory, the driver has all nodes check it before anything trains: otherwise only the first checkpoint on a
second node would show that the directory is not shared. ``dray cluster check`` (``dray.checks.cluster``) checks
more.

Only the standard library is imported at the top, because this runs on nodes on which nothing else may work.
"""

from __future__ import annotations

import contextlib
import errno
import os
import platform
import secrets
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from dray.environment import versions

if TYPE_CHECKING:
    from dray.storage import Location

MIN_FREE_BYTES = 64 << 20  # a disk with less than this counts as full: code, logs and checkpoints are still to come
WRITTEN_BYTES = 64 << 10
ANSWER_TIMEOUT_S = 30.0  # how long nodes may take to look for a directory; a slower node is checked by its first worker
STORE_S = 10.0  # how long a worker that starts tries an object store that does not answer
_FULL = (errno.ENOSPC, errno.EDQUOT)


class Trouble(NamedTuple):
    """A fault of a node: other versions, a full disk, storage that it does not see or may not write to, or no
    sandboxes."""

    kind: Literal["versions", "full", "unseen", "refused", "sandbox"]
    what: str  # the predicate of a sentence whose subject is the node


class UnfitNode(RuntimeError):
    """No trial can run on this node; the message names it."""

    def __init__(self, node: str, trouble: Trouble) -> None:
        super().__init__(node, trouble)
        self.node, self.trouble = node, trouble

    def __str__(self) -> str:
        return f"node {self.node} {self.trouble.what}; {REMEDIES[self.trouble.kind]}"


REMEDIES = {
    "versions": "install the driver's versions there, or remove the node from the cluster",
    "full": "free some space, or remove the node from the cluster",
    "unseen": "put the experiment on a file system that all nodes mount (--path, or checkpoint_storage: "
    "{type: shared_fs, host_path: /mnt/shared}), or in an object store (checkpoint_storage: {type: s3, bucket: ...})",
    "sandbox": "install bubblewrap there (apt-get install bubblewrap), allow user namespaces, or set isolation: none",
    "refused": "set that node up like the others, such as the mount's options, the user, or the instance profile",
}
"""The remedy for each kind of trouble."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    versions: Mapping[str, str]  # the driver's
    directory: str  # the experiment's; if it is not shared, checkpoints for an object store are staged there
    sign: str | None  # the content of the file that `write_sign` wrote there; None: checkpoints are in an object store
    store: Location | None

    def check_this_node(self, run: str) -> None:
        """Check the node that this process is on; `UnfitNode` if no trial can run here.

        This takes a few milliseconds. The first process of a run on a node also tries the object store.
        """
        trouble = (
            other_versions(self.versions, versions())
            or full_disk(disks())
            or directory_trouble(self.directory, self.sign)
        )
        # This file exists once a process of this run has reached the object store from this node.
        mark = Path(tempfile.gettempdir()) / f"dray-nodes-{os.getuid()}" / run
        if trouble is None and self.store is not None and not mark.exists():
            from dray.storage import RemoteDirectory, StorageError

            try:
                RemoteDirectory(self.store, patience_s=STORE_S).probe()
            except (StorageError, OSError) as error:
                trouble = Trouble("refused", f"can't use the experiment's storage: {error}")
            else:
                with contextlib.suppress(OSError):
                    mark.parent.mkdir(mode=0o700, exist_ok=True)
                    mark.touch()
        if trouble is not None:
            raise UnfitNode(name_of_this_node(), trouble)


def name_of_this_node() -> str:
    """The address and host name of this node: ``10.0.0.7 (gpu-1)``."""
    import ray

    return f"{ray.util.get_node_ip_address()} ({platform.node()})"


def other_versions(drivers: Mapping[str, str], here: Mapping[str, str]) -> Trouble | None:
    """The trouble with versions that differ, or None.

    Python is compared by its minor version, torch without ``+cpu`` or ``+cu126``, and CUDA, which a head may lack, not.
    """
    differ = [name for name in drivers if _compared_part(name, drivers[name]) != _compared_part(name, here[name])]
    if not differ:
        return None
    theirs, ours = (", ".join(f"{name} {found[name] or 'none'}" for name in differ) for found in (here, drivers))
    return Trouble("versions", f"has {theirs}, but the driver has {ours}")


def _compared_part(name: str, version: str) -> str:
    if name == "cuda":
        return ""
    return version.rpartition(".")[0] if name == "python" else version.partition("+")[0]


def disks() -> list[str]:
    """Directories on the disks that a node needs, for temporary files and for the code that Ray unpacks."""
    return [tempfile.gettempdir(), str(Path(__file__).parent)]


def full_disk(places: list[str]) -> Trouble | None:
    """The trouble with the first of these directories whose disk is full; None if there is none."""
    for place in places:
        free = shutil.disk_usage(place).free
        if free < MIN_FREE_BYTES:
            return Trouble("full", f"has a full disk: {free >> 20} MiB are free on {mounted(place)}")
    return None


def mounted(place: str) -> str:
    path = Path(place).resolve()
    return str(next(each for each in (path, *path.parents) if each.is_mount()))


def write_sign(directory: Path, sign: str) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    _sign_in(directory).write_text(sign)


def _sign_in(directory: Path) -> Path:
    return directory / ".seen-by-all"


def directory_trouble(directory: str, sign: str | None) -> Trouble | None:
    """The reason why this process can't use a directory; None if it can write there and sees the driver's sign.

    Without a sign, the directory need not be the driver's, and is created.
    """
    where = Path(directory)
    try:
        if sign is None:
            where.mkdir(parents=True, exist_ok=True)
        elif _sign_in(where).read_text() != sign:
            return Trouble("unseen", f"has a different directory {directory} than the driver")
    except FileNotFoundError:
        return Trouble("unseen", f"does not see {directory}, the driver's directory for checkpoints")
    except OSError as error:
        return _trouble_of(error, directory)
    # A name that nobody else uses, or has looked for: network file systems cache that a file does not exist.
    mine = where / f".written-by-{platform.node()}-{secrets.token_hex(8)}"
    try:
        try:
            mine.write_bytes(secrets.token_bytes(WRITTEN_BYTES))
        finally:
            mine.unlink(missing_ok=True)
    except OSError as error:
        return _trouble_of(error, directory)
    return full_disk([directory])


def _trouble_of(error: OSError, directory: str) -> Trouble:
    if error.errno in _FULL:
        return Trouble("full", f"has a full disk at {directory}: {error.strerror}")
    return Trouble("refused", f"can't write to {directory}: {error.strerror}")


def nodes_without(directory: str, sign: str, resource: str) -> dict[str, Trouble]:
    """Troubles of the cluster's other nodes with a directory of this one, by node.

    Nodes that don't answer are left out: a worker that starts there will check.

    Args:
        resource: "CPU" or "GPU"; only nodes that have some are asked.
    """
    import ray
    from ray.exceptions import RayError

    from dray.cluster.nodes import nodes, on_node
    from dray.cluster.packages import runtime_env

    here = ray.get_runtime_context().get_node_id()
    others = [node.id for node in nodes() if node.id != here and node.resources.get(resource, 0) > 0]
    sent = runtime_env()
    asked = [on_node(_look, node, runtime_env=sent).remote(directory, sign) for node in others]
    ready, _ = ray.wait(asked, num_returns=len(asked), timeout=ANSWER_TIMEOUT_S) if asked else ([], [])
    found: dict[str, Trouble] = {}
    for reference in ready:
        with contextlib.suppress(RayError):  # the node is gone
            name, trouble = ray.get(reference)
            if trouble is not None:
                found[name] = trouble
    return found


def _look(directory: str, sign: str) -> tuple[str, Trouble | None]:
    return name_of_this_node(), directory_trouble(directory, sign)


def kills_of_kernel() -> int:
    """The number of OOM kills so far, in this container or on the machine."""
    for place in ("/sys/fs/cgroup/memory.events", "/proc/vmstat"):
        with contextlib.suppress(OSError, StopIteration, ValueError):
            lines = (line.split() for line in Path(place).read_text().splitlines())
            return next(int(value) for name, value in lines if name == "oom_kill")
    return 0
