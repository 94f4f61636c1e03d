"""A checkpoint that several ranks write: each its part, and the chief commits it when all parts are written."""

from __future__ import annotations

import contextlib
import errno
import json
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from dray.storage.errors import is_full, writing
from dray.storage.manifest import Listed
from dray.training.errors import PeerFailed
from dray.training.host import Host, Report
from dray.training.parallel.distributed import DistributedContext
from dray.training.parallel.exchange import FAIL_S

POLL_S = 0.02
"""How often a rank looks whether the others have written their parts, in the background."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What a rank has made of its part of a checkpoint.

    Args:
        digests: the SHA-256 of its files by name, as far as known.
        uploaded: its machine's files in the store, by name: (size, SHA-256).
        error: why it failed, "" if it did not; `full`: because the disk is full.
    """

    digests: Mapping[str, str] = field(default_factory=dict)
    uploaded: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    error: str = ""
    full: bool = False

    @classmethod
    def failed(cls, error: BaseException) -> Part:
        return cls(error=str(error) if isinstance(error, OSError) else repr(error), full=is_full(error) is not None)


class Exchange(Protocol):
    """How ranks tell one another of their parts."""

    def __call__(self, phase: str, mine: Part, *, wait: bool) -> list[Part]:
        """The parts of all ranks, in their order; [] if this rank need not `wait` for them.

        Args:
            phase: of the checkpoint; "written" or "uploaded".
        """
        ...


def by_collective(peers: DistributedContext) -> Exchange:
    """In the training's thread."""

    def exchange(phase: str, mine: Part, *, wait: bool) -> list[Part]:
        return peers.allgather(mine)

    return exchange


class ByStore:
    """In another thread, by the ranks' `side_store`.

    Args:
        leaving: set if training has failed: a rank may be dead, and is not waited for long.
    """

    def __init__(self, peers: DistributedContext, leaving: threading.Event) -> None:
        self._peers, self._leaving = peers, leaving
        self._store: Any = None
        self._name = ""
        self._posted: list[str] = []

    def begin(self, name: str) -> None:
        """Begin a checkpoint, when the one before is over on all ranks, which call this together.

        Args:
            name: of the checkpoint, the same on all ranks and never used before.
        """
        self._store = self._peers.side_store()
        for key in self._posted:
            self._store.delete_key(key)
        self._name, self._posted = name, []

    def __call__(self, phase: str, mine: Part, *, wait: bool) -> list[Part]:
        if self._store is None:
            return [mine]
        keys = [f"checkpoint/{self._name}/{phase}/{rank}" for rank in range(self._peers.size)]
        self._store.set(keys[self._peers.rank], json.dumps(asdict(mine)))
        self._posted.append(keys[self._peers.rank])
        if not wait:
            return []
        left: float | None = None
        while not self._store.check(keys):
            if self._leaving.is_set():
                left = left or time.monotonic()
                if time.monotonic() > left + FAIL_S:
                    missing = [str(rank) for rank, key in enumerate(keys) if not self._store.check([key])]
                    raise PeerFailed(f"rank {', '.join(missing)} did not write its part of a checkpoint")
            time.sleep(POLL_S)
        return [Part(**json.loads(self._store.get(key))) for key in keys]


@dataclass(frozen=True, kw_only=True)
class Together:
    """One checkpoint that all ranks write.

    Args:
        peers: the ranks.
        host: stores the checkpoint.
        report: that it belongs to.
        staging: where this rank writes.
        apart: each machine has its own staging directory, which its first rank uploads; otherwise there is one, the
            chief's.
        exchange: between the ranks.
    """

    peers: DistributedContext
    host: Host
    report: Report
    staging: Path
    apart: bool
    exchange: Exchange

    def commit(self, write: Callable[[], dict[str, str]], written: Callable[[Path], None] | None) -> str | None:
        """Write this rank's part; then, on the chief, commit the whole and return its id.

        Args:
            write: writes the part; returns the SHA-256 of its files by name.
            written: called on the chief with the directory, before the commit.

        Raises:
            OSError: the disk is full, here or where another rank writes.
            PeerFailed: another rank has failed.
        """
        chief, cleans = self.peers.rank == 0, stages(self.peers, self.apart)
        with writing(self.staging) if cleans else contextlib.nullcontext():
            digests: dict[str, str] = {}
            mine, failed = Part(), None
            try:
                digests = write()
                mine = Part() if chief else Part(digests=digests)
            except Exception as error:
                mine, failed = Part.failed(error), error
            # A rank that has failed waits too: the others still write into the directory that it would remove.
            parts = self.exchange("written", mine, wait=cleans)
            _check(parts, failed)
            uploads: list[Part] = []
            if self.apart:
                mine, failed = Part(), None
                try:
                    if cleans and not chief:
                        listed = self.host.add_to_checkpoint(self.staging, self.report.batches)
                        mine = Part(uploaded={name: (each.size, each.sha256) for name, each in listed.items()})
                        shutil.rmtree(self.staging, ignore_errors=True)
                except Exception as error:
                    mine, failed = Part.failed(error), error
                uploads = self.exchange("uploaded", mine, wait=chief)
                _check(uploads, failed)
            if not chief:
                return None
            for part in parts:
                digests.update(part.digests)
            if written is not None:
                written(self.staging)
                digests = {}  # the callback may have changed files
            others = {name: Listed(*each) for part in uploads for name, each in part.uploaded.items()}
            return self.host.commit(self.staging, self.report, digests, others)


def stages(peers: DistributedContext, apart: bool) -> bool:
    """Whether this rank makes a staging directory, and removes it."""
    return (peers.local_rank if apart else peers.rank) == 0


def _check(parts: list[Part], failed: Exception | None) -> None:
    if failed is not None:
        raise failed
    for rank, part in enumerate(parts):
        if part.full:
            raise OSError(errno.ENOSPC, f"rank {rank} found no room for its part of a checkpoint: {part.error}")
        if part.error:
            raise PeerFailed(f"rank {rank} failed while writing its part of a checkpoint: {part.error}")
