"""Makes a trial's checkpoints: gathers the state of all ranks, calls the callbacks, and saves, one after another and
large ones in the background.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

from dray.storage.errors import is_full
from dray.storage.manifest import Listed
from dray.training import rng
from dray.training.callback import Hooks
from dray.training.checkpoint import files, sharded
from dray.training.checkpoint.files import Contents
from dray.training.checkpoint.joint import JointCheckpoint, SideTransport
from dray.training.checkpoint.snapshot import NotCopied, Snapshots, on_cpu
from dray.training.host import Host, Report
from dray.training.loop import Publish
from dray.training.parallel.device import on_this_gpu
from dray.training.parallel.distributed import DistributedContext
from dray.training.parallel.exchange import all_or_none, on_chief
from dray.training.pretrained import unshare_changed_shards
from dray.training.trial import Rank

log = logging.getLogger(__name__)

T = TypeVar("T")

#: Smaller states are written before training continues, unless the store is remote and the search decides nothing here.
#: Writing 16 MB takes 45 ms of a core, copying it 13 ms.
AT_ONCE_BYTES = 16 << 20
#: With fewer cores than threads, the writer yields to the training threads, which wait for one another in every
#: operation. It then gets about a tenth of a core, enough for 600 MB in twelve seconds.
NICE = 10


class Saver:
    """Writes checkpoints and commits them to a host. One thread uses it, on each rank that writes.

    At most one checkpoint is written at a time; if that fails, the next call raises its error. A full disk is only
    logged, since space may be freed later, but is an error for the last checkpoint. A report that the search decides on
    is published once its checkpoint is committed. If that happens in the background, `answer` waits for it.

    `on_gpu`: whether states are on a GPU, from where copying them is much faster than writing them.
    """

    def __init__(self, host: Host, *, on_gpu: bool = False) -> None:
        self._host, self._on_gpu = host, on_gpu
        self.snapshots = Snapshots() if host.behind is None else Snapshots(host.behind.wait)
        self._side: DistributedContext | None = None
        self._writing: Future[str | None] | None = None
        self._answer: Future[bool] | None = None
        self._full: OSError | None = None
        self._frees = False  # the last checkpoint is written after this rank has left the trial
        self._nbytes = 0
        self.goes_on = True  # the trial has not asked to stop
        self._leaving = threading.Event()  # set when training has failed

    def save(
        self,
        contents: Contents,
        report: Report,
        *,
        written: Callable[[Path], None] | None = None,
        peers: DistributedContext | None = None,
    ) -> str | None:
        """Save a checkpoint, and return its id; None if it is not committed yet, or the disk is full.

        Args:
            written: called on the chief with the directory, between writing and committing.
            peers: the ranks that write, which call this together; None for this one alone.
        """
        self.wait()
        peers = DistributedContext() if peers is None else peers
        try:
            joint = JointCheckpoint.begin(peers, self._host, report)
        except OSError as error:
            self._disk_full(error, report)
            return None
        way = "now" if written is not None else self._way(peers, contents, report)
        # Also if a large state on a GPU is written now: torch would copy one tensor after another into new memory that
        # is not pinned.
        is_copied = way != "now" or (self._on_gpu and contents.nbytes >= AT_ONCE_BYTES)
        copied = self._copy(peers, contents, report) if is_copied else None
        is_now = way == "now" or copied is None
        self._frees, self._nbytes = way == "behind" and not is_now, contents.nbytes
        copy, complete = copied or (contents, lambda: None)

        def write() -> dict[str, Listed]:
            complete()
            # An upload reads the files soon.
            return files.write(joint.staging, copy, read_soon=is_now or self._host.is_remote)

        if is_now:
            return self._save(joint, write, written)
        if self._side is None and peers.size > 1:
            name = peers.broadcast(joint.staging.name)
            self._side = peers.over(SideTransport(peers, name, self._leaving))
        behind = partial(self._background, replace(joint, peers=self._side or peers), write)
        self._writing = in_thread("dray-saver", on_this_gpu(behind))
        return None

    def _way(
        self, peers: DistributedContext, contents: Contents, report: Report
    ) -> Literal["now", "background", "behind"]:
        """How to write a checkpoint: now, in the background while training continues, or after the trial has left."""
        behind, is_remote = self._host.behind, self._host.is_remote
        copies_fast, is_small = self._on_gpu or is_remote, contents.nbytes < AT_ONCE_BYTES
        may_be_last = report.decides or report.interrupted  # the search may stop the trial here
        if behind is not None and may_be_last and copies_fast and (is_remote or not is_small):

            def is_wanted() -> bool:
                returns = not (report.final or report.interrupted)
                return peers.broadcast(peers.rank == 0 and behind.is_wanted(returns=returns))

            if is_wanted():
                behind.wait()
                if is_wanted():  # meanwhile the other trial may have got other slots
                    return "behind"
        # Training waits at the end of the trial. It also waits where the search decides, unless copying the state is
        # much faster than writing it: most trials stop there, and drop all batches trained since.
        if report.final or (report.decides and not copies_fast):
            return "now"
        return "now" if is_small and (report.decides or not is_remote) else "background"

    def _copy(
        self, peers: DistributedContext, contents: Contents, report: Report
    ) -> tuple[Contents, Callable[[], None]] | None:
        """Copy the contents, to write them in the background. Returns the copy and a function that waits until GPUs
        have completed it; or None, with a message, if a rank can't copy its part."""
        copied = None
        try:
            (objects, shards), complete = self.snapshots.take((contents.objects, contents.shards))
            copied = replace(contents, objects=objects, shards=shards), complete
        except Exception as reason:
            # Any exception, including one for lack of memory: it must not end the training.
            expected = isinstance(reason, NotCopied)
            log.log(
                logging.INFO if expected else logging.WARNING,
                "training waits until the checkpoint at batch %d is written, as its state can't be copied: %r",
                report.batches,
                reason,
            )
        return copied if all(peers.allgather(copied is not None)) else None

    def _background(self, joint: JointCheckpoint, write: Callable[[], dict[str, Listed]]) -> str | None:
        # Be nice, unless the search waits for the checkpoint. Outside Linux this would slow down the whole process.
        if not joint.report.decides and sys.platform == "linux":
            os.nice(NICE)
        return self._save(joint, write)

    def _save(
        self,
        joint: JointCheckpoint,
        write: Callable[[], dict[str, Listed]],
        written: Callable[[Path], None] | None = None,
    ) -> str | None:
        try:
            saved = joint.save(write, written)
        except OSError as error:
            self._disk_full(error, joint.report)
            return None
        self._full = None
        return saved

    def _disk_full(self, error: OSError, report: Report) -> None:
        if is_full(error) is None or self._frees:
            raise error
        self._full = error
        log.warning("the checkpoint at batch %d was not saved; training continues: %s", report.batches, error)

    def publish(self, report: Report) -> bool:
        """Publish a report, and return whether training should stop here; False if `answer` returns that later.

        Raises the error of an earlier checkpoint that has failed.
        """
        if not self._frees:
            if report.final:
                self.finish()
            elif self._writing is not None and self._writing.done():
                self.wait()
        if not (report.decides or self._frees) or (writing := self._writing) is None:
            return self._host.publish(report)
        self._writing = None  # `answer` raises its error
        self._answer = in_thread(
            "dray-report", lambda: self._host.publish(replace(report, checkpoint=writing.result()))
        )
        return self._frees

    def answer(self) -> bool:
        """Wait for the answer to a report that is published in the background: whether the trial stops there."""
        answer, self._answer = self._answer, None
        return answer is not None and answer.result()

    def stops(self) -> bool:
        """Whether that answer has come, and is a stop or an error. Called in another thread."""
        answer = self._answer
        return answer is not None and answer.done() and (answer.exception() is not None or answer.result())

    def wait(self) -> None:
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def finish(self) -> None:
        """Wait until all is committed and published; or leave that behind, so that another trial gets the slots."""
        if self._frees and (behind := self._host.behind) is not None:
            behind.take(self._finish, self._nbytes, goes_on=self.goes_on)
        else:
            self._finish()

    def _finish(self) -> None:
        self.answer()
        self.wait()
        full, self._full = self._full, None
        if full is not None:
            raise full

    def abandon(self) -> None:
        """Wait for the last checkpoint, and only log its error, since another one is about to be raised."""
        self._leaving.set()
        try:
            self._finish()
        except Exception as error:
            log.error("the last checkpoint was not saved: %s", error)


def in_thread(name: str, work: Callable[[], T]) -> Future[T]:
    """Call a function in a new thread. A program that ends meanwhile waits for it."""
    pool = ThreadPoolExecutor(1, name)
    future = pool.submit(work)
    pool.shutdown(wait=False)
    return future


@dataclass(kw_only=True, eq=False, repr=False)
class Checkpointer:
    """The checkpoints of a trial, on one of its ranks."""

    rank: Rank
    host: Host
    description: Callable[[], files.Description]  # called at the first checkpoint
    hooks: Hooks  # of callbacks on any rank
    full: bool = False  # gather sharded models on the chief, and save them whole
    data_position: Callable[[int], dict[str, Any]] | None = None  # of the training loader, by batches trained

    def __post_init__(self) -> None:
        self.saver = Saver(self.host, on_gpu=self.rank.device.type == "cuda")

    def reserve(self) -> None:
        """Allocate memory for copies of a state on a GPU, while training continues. Called after the first optimizer
        step, which creates the optimizer's state."""
        optimisation, is_chief = self.rank.optimisation, self.rank.is_chief
        if not optimisation.has_sharded and is_chief:
            self.saver.snapshots.reserve(optimisation.state_dict())
        elif optimisation.has_sharded and not self.full:
            state, dtensors = sharded.split(optimisation.state_dict())
            self.saver.snapshots.reserve((state if is_chief else None, sharded.shards_of(dtensors)))

    def save(self, command: Publish, report: Report) -> str | None:
        """Save a checkpoint, on all ranks, and return its id, or None if it is not committed yet."""
        save = partial(self.saver.save, report=report, written=self._written if self.hooks.checkpoints else None)
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
        data = None if self.data_position is None else self.data_position(position.trained)
        return files.RankState(rng=rng.capture(rank.device), gradients=gradients, data=data)

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
