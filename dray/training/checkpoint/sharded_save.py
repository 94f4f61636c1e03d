"""Saves a checkpoint of a trial with sharded tensors: every rank prepares and writes its part of it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dray.training.checkpoint import files, sharded
from dray.training.checkpoint.parts import ByStore, Together, by_collective, stages
from dray.training.checkpoint.saver import Copied, Saver
from dray.training.checkpoint.shard_file import Shard
from dray.training.checkpoint.snapshot import on_cpu
from dray.training.host import Host, Report
from dray.training.parallel.distributed import DistributedContext
from dray.training.parallel.exchange import all_or_none, on_all, on_chief

ContentsOf = Callable[[dict[str, Any], list[files.RankState]], files.Contents]


@dataclass(kw_only=True, eq=False, repr=False)
class ShardedSave:
    """One checkpoint on one rank. All ranks call `save` together; a failure of one is an error on all.

    Args:
        peers, host, saver: of the trial.
        report: that the checkpoint belongs to.
        full: gather the state on the chief, which writes it whole.
        at_once: commit it before returning.
        written: as in `Saver.save`.
    """

    peers: DistributedContext
    host: Host
    saver: Saver
    report: Report
    full: bool
    at_once: bool
    written: Callable[[Path], None] | None

    def __post_init__(self) -> None:
        # If it is to be uploaded, the first rank of each machine stages its part.
        self._apart = self.host.is_remote and self.peers.cross_size > 1
        self._state: dict[str, Any] = {}
        self._shards: dict[str, Shard] = {}
        self._contents = files.Contents(objects={}, texts={}, nbytes=0)
        self._copied: Copied | None = None
        self._staging: Path | None = None

    def save(
        self,
        state_of: Callable[[], dict[str, Any]],
        mine: Callable[[], files.RankState],
        contents_of: ContentsOf,
        exchange: ByStore,
    ) -> str | None:
        """Save it; returns its id on all ranks, None if it is not committed yet, or the disk is full.

        Args:
            state_of: returns the state of models, optimizers and schedulers.
            mine: returns this rank's other state; all ranks call it together.
            contents_of: returns the checkpoint's content; called on the chief.
            exchange: for a save in the background.
        """
        peers = self.peers
        with all_or_none(peers, "saving a checkpoint"):
            # First, so that memory never holds two copies of the state.
            self.saver.wait()
        other = mine()
        rows = on_all(peers, "saving a checkpoint", lambda: self._prepare(state_of(), other))
        if self.full:
            self._state = sharded.gathered(self._state, keep=peers.rank == 0)
        ranks = [state for state, _ in rows]
        is_small = self.saver.is_small(max(nbytes for _, nbytes in rows), self.report)
        wants_copy = not (self.at_once or self.written or is_small)
        try:
            places = on_all(peers, "copying its state", lambda: self._take(contents_of, ranks, wants_copy))
        except BaseException:
            if self._staging is not None:
                shutil.rmtree(self._staging, ignore_errors=True)
            raise
        machine = peers.cross_rank if self._apart else 0
        staging = next(place for cross_rank, place, _ in places if place is not None and cross_rank == machine)
        together = Together(
            peers=peers,
            host=self.host,
            report=self.report,
            staging=staging,
            apart=self._apart,
            exchange=by_collective(peers),
        )
        if self._copied is not None and all(copied for *_, copied in places):
            exchange.begin(next(place.name for _, place, _ in places if place is not None))
            self.saver.start_part(replace(together, exchange=exchange), self._copied)
            return None
        error: Exception | None = None
        saved = None
        try:
            saved = self.saver.save_part(together, self._contents, self.written)
        except Exception as caught:
            error = caught
        return on_chief(peers, "saving a checkpoint", lambda: _returned(saved, error))[0]

    def _prepare(self, state: dict[str, Any], other: files.RankState) -> tuple[files.RankState, int]:
        """Find this rank's shards; returns its other state, and the size of the shards in bytes."""
        gradients, tensors = sharded.split(other.gradients, "gradients")
        if not self.full:
            state, found = sharded.split(state)
            tensors |= found
        self._state, self._shards = state, sharded.shards_of(tensors)
        return replace(other, gradients=on_cpu(gradients)), sum(each.tensor.nbytes for each in self._shards.values())

    def _take(
        self, contents_of: ContentsOf, ranks: list[files.RankState], wants_copy: bool
    ) -> tuple[int, Path | None, bool]:
        """Collect what this rank writes; returns its machine, its staging directory, and whether there is a copy."""
        if self.peers.rank == 0:
            self._contents = contents_of(self._state, ranks)
        if self._shards:
            self._contents = replace(self._contents, shards={sharded.file_of(self.peers.rank): self._shards})
        if wants_copy:
            self._copied = self.saver.copy(self._contents, self.report)
        if stages(self.peers, self._apart):
            self._staging = self.host.new_checkpoint(self.report.batches)
        return self.peers.cross_rank, self._staging, self._copied is not None


def _returned(saved: str | None, error: Exception | None) -> str | None:
    if error is not None:
        raise error
    return saved
