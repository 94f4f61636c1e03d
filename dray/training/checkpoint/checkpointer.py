"""Makes a trial's checkpoints: gathers the state of all ranks, calls the callbacks, and has it saved."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dray.training import rng
from dray.training.checkpoint import files
from dray.training.checkpoint.parts import ByStore
from dray.training.checkpoint.saver import Saver
from dray.training.checkpoint.sharded_save import ShardedSave
from dray.training.checkpoint.snapshot import on_cpu
from dray.training.host import Host, Report
from dray.training.loop import Publish
from dray.training.parallel.exchange import all_or_none, on_chief
from dray.training.pretrained import unshare_changed_shards
from dray.training.trial import Hooks, Rank


@dataclass(kw_only=True, eq=False, repr=False)
class Checkpointer:
    """The checkpoints of a trial, on one of its ranks.

    Args:
        rank: the user's code on this rank, and what is saved of it.
        host: called on the chief only.
        description: returns what every checkpoint says about the trial; called at the first one.
        hooks: which hooks callbacks of any rank have.
        full: gather sharded models on the chief, and save them whole.
    """

    rank: Rank
    host: Host
    description: Callable[[], files.Description]
    hooks: Hooks
    full: bool = False

    def __post_init__(self) -> None:
        self._saver = Saver(self.host)
        self._exchange = ByStore(self.rank.peers, self._saver.leaving)

    def save(self, command: Publish, report: Report) -> str | None:
        """Save a checkpoint, on all ranks; returns its id, None if it is not committed yet."""
        rank = self.rank
        if rank.optimisation.has_sharded:
            return self._save_together(command, report)
        mine = self._rank_state()
        if rank.peers.size > 1:
            mine = replace(mine, gradients=on_cpu(mine.gradients))
        ranks = rank.peers.gather(mine) or []
        uuid, _ = on_chief(rank.peers, "saving a checkpoint", lambda: self._save(command, report, ranks))
        return uuid

    def _rank_state(self) -> files.RankState:
        rank, position = self.rank, self.rank.position
        # Gradients of a batch that was begun, but does not count because a rank left in it: it is trained again.
        incomplete = position.batch_idx is not None and position.batch_idx >= position.trained
        gradients = None if incomplete else rank.optimisation.pending_gradients()
        return files.RankState(rng=rng.capture(rank.device), gradients=gradients)

    def _save(self, command: Publish, report: Report, ranks: list[files.RankState]) -> str | None:
        # First, so that memory never holds two copies of the state.
        self._saver.wait()
        return self._saver.save(
            self._contents(command, self.rank.optimisation.state_dict(), ranks),
            report,
            at_once=self._at_once(command),
            written=self._written if self.hooks.checkpoints else None,
        )

    def _contents(self, command: Publish, state: dict[str, Any], ranks: list[files.RankState]) -> files.Contents:
        """The content of a checkpoint with this state of what is optimised."""
        state["callbacks"] = {name: callback.state_dict() for name, callback in self.rank.callbacks.items()}
        for callback in self.rank.callbacks.values():
            callback.on_checkpoint_save_start(state)
        return files.contents(state=state, progress=command.at, ranks=ranks, description=self.description())

    def _at_once(self, command: Publish) -> bool:
        """Whether the checkpoint must exist before training goes on: where the trial ends, and where the search decides
        if a copy would cost much of what it saves. Most trials stop there, and what they train meanwhile is lost."""
        copies_fast = self.rank.device.type == "cuda" or self.host.is_remote
        return command.final or (command.decides and not copies_fast)

    def _save_together(self, command: Publish, report: Report) -> str | None:
        """Save a checkpoint of which each rank writes its shards."""
        unshare_changed_shards(self.rank.optimisation.models, self.rank.peers)
        save = ShardedSave(
            peers=self.rank.peers,
            host=self.host,
            saver=self._saver,
            report=report,
            full=self.full,
            at_once=self._at_once(command),
            written=self._written if self.hooks.checkpoints else None,
        )
        return save.save(
            self.rank.optimisation.state_dict,
            self._rank_state,
            lambda state, ranks: self._contents(command, state, ranks),
            self._exchange,
        )

    def _written(self, directory: Path) -> None:
        for callback in self.rank.callbacks.values():
            callback.on_checkpoint_end(str(directory))
            callback.on_checkpoint_write_end(str(directory))

    def uploaded(self, uuid: str) -> None:
        """Call this rank's callbacks for a committed checkpoint."""
        for callback in self.rank.callbacks.values():
            callback.on_checkpoint_upload_end(uuid=uuid)

    def publish(self, report: Report) -> bool:
        """As `Saver.publish`, on the chief."""
        return self._saver.publish(report)

    def answer(self) -> bool:
        """As `Saver.answer`; False on other ranks than the chief."""
        return self._saver.answer()

    def stops(self) -> bool:
        """As `Saver.stops`."""
        return self._saver.stops()

    def finish(self) -> None:
        """Wait until the last checkpoint is saved, on all ranks."""
        with all_or_none(self.rank.peers, "saving the last checkpoint"):
            self._saver.finish()

    def abandon(self) -> None:
        """After an error: wait for the checkpoint that is being saved."""
        self._saver.abandon()
