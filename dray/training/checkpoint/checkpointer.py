"""Makes a trial's checkpoints: gathers the state of all ranks, calls the callbacks, and saves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from dray.training import rng
from dray.training.callback import Hooks
from dray.training.checkpoint import files, sharded
from dray.training.checkpoint.saver import Saver
from dray.training.checkpoint.snapshot import on_cpu
from dray.training.host import Host, Report
from dray.training.loop import Publish
from dray.training.parallel.exchange import all_or_none, on_chief
from dray.training.pretrained import unshare_changed_shards
from dray.training.trial import Rank


@dataclass(kw_only=True, eq=False, repr=False)
class Checkpointer:
    """The checkpoints of a trial, on one of its ranks."""

    rank: Rank
    host: Host
    description: Callable[[], files.Description]  # called at the first checkpoint
    hooks: Hooks  # of callbacks on any rank
    full: bool = False  # gather sharded models on the chief, and save them whole

    def __post_init__(self) -> None:
        self.saver = Saver(self.host)

    def save(self, command: Publish, report: Report) -> str | None:
        """Save a checkpoint, on all ranks, and return its id, or None if it is not committed yet."""
        # Training waits for the checkpoint at the end of the trial. It also waits where the search decides, unless
        # copying the state is much faster than writing it: most trials stop there, and drop all batches trained since.
        copies_fast = self.rank.device.type == "cuda" or self.host.is_remote
        save = partial(
            self.saver.save,
            report=report,
            at_once=command.final or (command.decides and not copies_fast),
            written=self._written if self.hooks.checkpoints else None,
        )
        if self.rank.optimisation.has_sharded:
            return save(self._part(command), peers=self.rank.peers)
        return self._save_whole(command, save)

    def _save_whole(self, command: Publish, save: Callable[[files.Contents], str | None]) -> str | None:
        rank, peers = self.rank, self.rank.peers
        own = self._rank_state()
        if peers.size > 1:
            own = replace(own, gradients=on_cpu(own.gradients))
        ranks = peers.gather(own) or []

        def work() -> str | None:
            self.saver.wait()  # before copying, so that memory never holds two copies of the state
            return save(self._contents(command, rank.optimisation.state_dict(), ranks))

        return on_chief(peers, "saving a checkpoint", work)[0]

    def _part(self, command: Publish) -> files.Contents:
        """This rank's part of a sharded model's checkpoint: its shards, and on the chief everything else too."""
        rank, peers = self.rank, self.rank.peers
        unshare_changed_shards(rank.optimisation.models, peers)
        with all_or_none(peers, "saving a checkpoint"):
            self.saver.wait()
        own = self._rank_state()
        with all_or_none(peers, "saving a checkpoint"):
            gradients, tensors = sharded.split(own.gradients, "gradients")
            own = replace(own, gradients=on_cpu(gradients))
            state = rank.optimisation.state_dict()
            if not self.full:
                state, dtensors = sharded.split(state)
                tensors |= dtensors
            shards = sharded.shards_of(tensors)
        if self.full:
            state = sharded.gathered(state, keep=peers.rank == 0)
        rows = peers.allgather((own, sum(shard.tensor.nbytes for shard in shards.values())))
        with all_or_none(peers, "saving a checkpoint"):
            contents = files.Contents()
            if peers.rank == 0:
                contents = self._contents(command, state, [rank_state for rank_state, _ in rows])
        return replace(
            contents,
            # The maximum, so that all ranks decide alike whether to write in the background.
            nbytes=max(nbytes for _, nbytes in rows),
            shards={sharded.file_of(peers.rank): shards} if shards else {},
        )

    def _rank_state(self) -> files.RankState:
        rank, position = self.rank, self.rank.position
        # A batch in which a rank left does not count, and is trained again. Its gradients are not saved.
        incomplete = position.batch_idx is not None and position.batch_idx >= position.trained
        gradients = None if incomplete else rank.optimisation.pending_gradients()
        return files.RankState(rng=rng.capture(rank.device), gradients=gradients)

    def _contents(self, command: Publish, state: dict[str, Any], ranks: Sequence[files.RankState]) -> files.Contents:
        state["callbacks"] = {name: callback.state_dict() for name, callback in self.rank.callbacks.items()}
        for callback in self.rank.callbacks.values():
            callback.on_checkpoint_save_start(state)
        return files.contents(state=state, progress=command.at, ranks=ranks, description=self.description())

    def _written(self, directory: Path) -> None:
        for callback in self.rank.callbacks.values():
            callback.on_checkpoint_end(str(directory))
            callback.on_checkpoint_write_end(str(directory))

    def uploaded(self, uuid: str) -> None:
        for callback in self.rank.callbacks.values():
            callback.on_checkpoint_upload_end(uuid=uuid)

    def finish(self) -> None:
        with all_or_none(self.rank.peers, "saving the last checkpoint"):
            self.saver.finish()
