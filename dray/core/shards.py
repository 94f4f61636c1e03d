"""Sharded checkpoints: the parts of several ranks, brought together. All ranks call these functions together."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dray.storage.manifest import Listed
from dray.training.host import ProgramHost
from dray.training.parallel.distributed import DistributedContext
from dray.training.parallel.exchange import all_or_none


def merged(ranks: Sequence[Mapping[str, Any]], where: str = "") -> dict[str, Any]:
    """The metadata of all ranks, merged; dicts in it recursively.

    Raises:
        RuntimeError: ranks have different values of the same name.
    """
    found: dict[str, Any] = {}
    for metadata in ranks:
        for key, value in metadata.items():
            before = found.get(key, value)
            if isinstance(value, dict) and isinstance(before, dict):
                found[key] = merged([before, value], f"{where}{key}.")
            elif before != value:
                raise RuntimeError(
                    f"the ranks' metadata of a sharded checkpoint differ: {where}{key} is {before!r} on one and "
                    f"{value!r} on another; use different names"
                )
            else:
                found[key] = value
    return found


def add_parts(
    host: ProgramHost, peers: DistributedContext, staging: Path, names: Sequence[str], steps: int
) -> dict[str, Listed]:
    """Upload what other machines than the chief's have staged; returns these files.

    Args:
        staging: the directory that the ranks of this machine have written to.
        names: the files in it, on the first rank of the machine; [] on others.
        steps: the steps of the checkpoint.

    Raises:
        RuntimeError: several machines have a file of the same name.
    """
    if twice := _repeated(peers.allgather(names)):
        raise RuntimeError(
            f"store_path(shard=True): several machines wrote a file {twice[0]!r}; put the rank into the names"
        )
    part: dict[str, Listed] = {}
    with all_or_none(peers, "storing a part of a checkpoint"):
        if peers.local_rank == 0 and peers.rank > 0:
            part = host.add_to_checkpoint(staging, steps)
    return {name: listed for each in peers.allgather(part) for name, listed in each.items()}


def check_conflicts(peers: DistributedContext, source: Path | None, ranks: Sequence[Sequence[str]]) -> None:
    """Check that files of the same name have the same content.

    Args:
        source: the directory of this rank's files; None if it has none.
        ranks: the names of each rank's files.

    Raises:
        RuntimeError: some differ.
    """
    twice = _repeated(ranks)
    if not twice:
        return
    mine = set(ranks[peers.rank])
    digests = {} if source is None else {name: _digest(source / name) for name in twice if name in mine}
    everyones = peers.allgather(digests)
    different = [name for name in twice if len({each[name] for each in everyones if name in each}) > 1]
    if different:
        raise RuntimeError(
            f"upload(shard=True): ranks have different files of the same name: {', '.join(different)}; put the "
            "rank into the names, or give each rank a selector"
        )


def _repeated(ranks: Sequence[Sequence[str]]) -> list[str]:
    """Names that several ranks have, sorted."""
    counts = Counter(name for names in ranks for name in names)
    return sorted(name for name, count in counts.items() if count > 1)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()
