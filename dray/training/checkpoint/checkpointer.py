"""Makes a trial's checkpoints: gathers the state of all ranks, calls the callbacks, and has it saved."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dray.training import rng
from dray.training.checkpoint import files
from dray.training.checkpoint.saver import Saver
from dray.training.checkpoint.snapshot import on_cpu
from dray.training.host import Host, Report
from dray.training.loop import Publish
from dray.training.parallel.exchange import on_chief
from dray.training.rank import Rank
from dray.training.trial import Hooks


@dataclass(kw_only=True, eq=False, repr=False)
class Checkpointer:
    """The checkpoints of a trial, on one of its ranks.

    Args:
        rank: the user's code on this rank, and what is saved of it.
        host: called on the chief only.
        description: returns what every checkpoint says about the trial; called at the first one.
        hooks: which hooks callbacks of any rank have.
    """

    rank: Rank
    host: Host
    description: Callable[[], files.Description]
    hooks: Hooks

    def __post_init__(self) -> None:
        self._saver = Saver(self.host)

    def save(self, command: Publish, report: Report) -> str | None:
        """Save a checkpoint, on all ranks; returns its id, None if it is not committed yet."""
        rank, position = self.rank, self.rank.position
        # Gradients of a batch that was begun, but does not count because a rank left in it: it is trained again.
        incomplete = position.batch_idx is not None and position.batch_idx >= position.trained
        gradients = None if incomplete else rank.optimisation.pending_gradients()
        mine = files.RankState(
            rng=rng.capture(rank.device),
            gradients=gradients if rank.peers.size == 1 else on_cpu(gradients),
        )
        ranks = rank.peers.gather(mine) or []
        uuid, _ = on_chief(rank.peers, "saving a checkpoint", lambda: self._save(command, report, ranks))
        return uuid

    def _save(self, command: Publish, report: Report, ranks: list[files.RankState]) -> str | None:
        # First, so that memory never holds two copies of the state.
        self._saver.wait()
        state = self.rank.optimisation.state_dict()
        state["callbacks"] = {name: callback.state_dict() for name, callback in self.rank.callbacks.items()}
        for callback in self.rank.callbacks.values():
            callback.on_checkpoint_save_start(state)
        contents = files.contents(state=state, progress=command.at, ranks=ranks, description=self.description())
        return self._saver.save(
            contents,
            report,
            # Where the search decides, or the trial ends, its checkpoint must exist.
            at_once=command.decides or command.final,
            written=self._written if self.hooks.checkpoints else None,
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
        """Pass a report on to the host, on the chief, unless a checkpoint before it has failed."""
        if report.final:
            self._saver.finish()
        else:
            self._saver.check()
        return self.host.publish(report)

    def finish(self) -> None:
        """Wait until the last checkpoint is saved, on all ranks."""
        on_chief(self.rank.peers, "saving the last checkpoint", self._saver.finish)

    def abandon(self) -> None:
        """After an error: wait for the checkpoint that is being saved."""
        self._saver.abandon()
