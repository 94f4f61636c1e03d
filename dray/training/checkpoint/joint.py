"""Checkpoints of several ranks: each rank writes its part, and the chief commits once all parts are written."""

from __future__ import annotations

import contextlib
import errno
import shutil
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from dray.storage.errors import StorageFull, is_full, writing
from dray.storage.manifest import Listed
from dray.training.errors import PeerFailed
from dray.training.host import Host, Report
from dray.training.parallel.distributed import DistributedContext
from dray.training.parallel.exchange import FAIL_S, Leave, all_or_none, exchange
from dray.training.parallel.transport import StoreTransport

T = TypeVar("T")

POLL_S = 0.02  # between checks, in the background, for the parts of other ranks


@dataclass(frozen=True, kw_only=True)
class JointCheckpoint:
    """One checkpoint that several ranks, or a single one, write together.

    All ranks call the methods together. If one fails, all raise an error, and there is no checkpoint.
    """

    peers: DistributedContext
    host: Host
    report: Report
    staging: Path  # the directory to which this rank writes
    per_machine: bool  # each machine stages and uploads its part; otherwise all use the chief's directory
    owns_staging: bool  # this rank has made the directory, and removes it

    @classmethod
    def begin(cls, peers: DistributedContext, host: Host, report: Report) -> JointCheckpoint:
        per_machine = host.is_remote and peers.cross_size > 1
        machine, owns_staging = (peers.cross_rank, peers.local_rank == 0) if per_machine else (0, peers.rank == 0)

        staged: list[Path] = []

        def stage() -> tuple[int, list[Path]]:
            if owns_staging:
                staged.append(host.new_checkpoint(report.batches))
            return machine, staged

        try:
            machines = _on_all(peers, "preparing a checkpoint", stage)
        except BaseException:
            for path in staged:
                shutil.rmtree(path, ignore_errors=True)
            raise
        staging = next(path for number, paths in machines for path in paths if number == machine)
        return cls(
            peers=peers,
            host=host,
            report=report,
            staging=staging,
            per_machine=per_machine,
            owns_staging=owns_staging,
        )

    def writing(self) -> AbstractContextManager[None]:
        """The block in which ranks write their parts and commit. If it fails, the staged files are removed."""
        return writing(self.staging) if self.owns_staging else contextlib.nullcontext()

    def save(self, write: Callable[[], dict[str, Listed]], written: Callable[[Path], None] | None = None) -> str:
        """Write the parts, commit, and return the checkpoint's id.

        Args:
            write: writes this rank's part, and returns its files.
            written: called on the chief with the directory before the commit; may change files.
        """
        known: dict[str, Listed] = {}

        def work() -> dict[str, Listed]:
            known.update(write())
            return known if self.peers.rank > 0 else {}  # for the chief, and for the rank that uploads them

        with self.writing():
            for part in _on_all(self.peers, "writing its part of a checkpoint", work):
                known.update(part)
            return self.commit(known, written)

    def commit(self, known: dict[str, Listed], written: Callable[[Path], None] | None) -> str:
        """Commit the parts of all ranks, in the block `writing`. `known` has the files whose checksums are known."""
        upload = partial(self._upload, known)
        uploads = _on_all(self.peers, "uploading its part of a checkpoint", upload) if self.per_machine else []

        def commit() -> str:
            if self.peers.rank > 0:
                return ""
            if written is not None:
                written(self.staging)
            files = dict(known) if written is None else {}
            for uploaded in uploads:
                files.update(uploaded)
            return self.host.commit(self.staging, self.report, files)

        return _on_all(self.peers, "committing a checkpoint", commit)[0]

    def _upload(self, known: dict[str, Listed]) -> dict[str, Listed]:
        """Upload this machine's part, unless the chief runs here."""
        if not self.owns_staging or self.peers.rank == 0:
            return {}
        listed = self.host.add_to_checkpoint(self.staging, self.report.batches, known)
        shutil.rmtree(self.staging, ignore_errors=True)
        return listed


def _on_all(peers: DistributedContext, doing: str, work: Callable[[], T]) -> list[T]:
    """Like `exchange.on_all`, with two differences: a rank that has failed waits until the others have written, since
    it would remove their directory; and a full disk is a separate error, which training survives."""
    value: Any = None
    error: BaseException | None = None
    try:
        value = work()
    except (Exception, SystemExit) as caught:
        error = caught
    leave = None if error is None else Leave.because_of(error)
    ranks = exchange(peers, (value, leave, is_full(error) is not None), None, error)
    if error is not None:
        raise error
    for rank, (_, left, full) in enumerate(ranks):
        if left is not None:
            if full:
                raise StorageFull(errno.ENOSPC, f"rank {rank} has no room for its part of a checkpoint: {left.message}")
            raise left.as_error(rank, doing)
    return [value for value, *_ in ranks]


class SideTransport(StoreTransport):
    """Passes objects between ranks in a background thread, beside the collectives of the main one.

    `name` is the same on all ranks, and unique. `leaving` is set when training has failed: then ranks don't wait long
    for one another, since one may be dead.
    """

    def __init__(self, peers: DistributedContext, name: str, leaving: threading.Event) -> None:
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]

        super().__init__(peers.rank, peers.size, PrefixStore(f"checkpoint/{name}", peers.side_store()))
        self._leaving = leaving

    def _loaded(self, key: str, own: bytes | None) -> Any:
        began, left = time.monotonic(), None
        # Polling, because waiting in the store would keep other threads from using it.
        while own is None and not self._store.check([key]):
            now = time.monotonic()
            if self._leaving.is_set():
                left = left or now
                if now > left + FAIL_S:
                    raise PeerFailed(f"rank {key.rpartition('/')[2]} did not write its part of a checkpoint")
            time.sleep(min(max(POLL_S, (now - began) / 10), 1.0))
        return super()._loaded(key, own)


def open_together(peers: DistributedContext, open_one: Callable[[], Path], doing: str) -> Path:
    """Call `open_one` on the first rank of each machine, and return its directory on all ranks, which read it
    unverified. All ranks call this together."""
    directory = None
    with all_or_none(peers, doing):
        if peers.local_rank == 0:
            directory = open_one()
    opened = peers.broadcast_local(directory)
    assert opened is not None
    return opened
