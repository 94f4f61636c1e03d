"""Saves checkpoints, one after another; large ones in the background."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from dray.storage import writing
from dray.storage.errors import is_full
from dray.training.checkpoint import files
from dray.training.checkpoint.files import Contents
from dray.training.checkpoint.parts import Together
from dray.training.checkpoint.snapshot import NotCopied, Snapshots
from dray.training.host import Host, Report
from dray.training.parallel.device import on_this_gpu

log = logging.getLogger(__name__)

AT_ONCE_BYTES = 16 << 20
"""Smaller states are written before training continues, unless the store is remote and the search decides nothing.
Writing 16 MB takes 45 ms of a core, copying it 13 ms; 1 MB takes 9 and 5 ms. So there is little to gain, and on few
cores the thread costs as much. Where the search decides, a trial that it stops would end some 0.2 s later.
"""
NICE = 10
"""With fewer cores than threads, the writer's thread yields to those that train. These wait for one another in every
operation, so a core taken from one slows all of them. The writer then has about a tenth of a core, enough for 600 MB in
twelve seconds; and a whole core if one is free, or if the next checkpoint waits for it."""


@dataclass(frozen=True, slots=True)
class Copied:
    """A copy of a checkpoint's content, valid until the next one is made.

    Args:
        complete: waits until GPUs have copied all of it.
    """

    contents: Contents
    complete: Callable[[], None]


class Saver:
    """Writes checkpoints and commits them to a host. Used by one thread, on the chief; for sharded ones on every rank.

    At most one is written at a time. If that fails, the next call raises its error. A full disk is only logged, since
    space may be freed later; for the last checkpoint it is an error.

    A report that the search decides on is published when its checkpoint is committed. If that is still being written,
    both happen in the background too, and `answer` waits for them.

    Args:
        host: `new_checkpoint`, `commit` and `publish` are called, the latter two also in a thread.
    """

    def __init__(self, host: Host) -> None:
        self._host = host
        self._snapshots = Snapshots()
        self._thread: threading.Thread | None = None
        self._saved: str | None = None
        self._error: BaseException | None = None
        self._answer: Future[bool] | None = None
        self._full: OSError | None = None
        #: Set if training has failed.
        self.leaving = threading.Event()

    def save(
        self, contents: Contents, report: Report, *, at_once: bool, written: Callable[[Path], None] | None = None
    ) -> str | None:
        """Save a checkpoint; returns its id, or None if it is not committed yet, or the disk is full.

        Args:
            contents: its content.
            report: the report that it belongs to.
            at_once: commit it before returning.
            written: called with its directory between writing and committing.
        """
        self.wait()
        try:
            staging = self._host.new_checkpoint(report.batches)
        except OSError as error:
            self._disk_full(error, report)
            return None
        if at_once or self.is_small(contents.nbytes, report) or written is not None:
            return self._save(staging, contents, report, written)
        if (copied := self.copy(contents, report)) is None:
            return self._save(staging, contents, report)
        # An upload reads the files.
        self._start(
            copied, report, lambda contents: self._save(staging, contents, report, read_soon=self._host.is_remote)
        )
        return None

    def is_small(self, nbytes: int, report: Report) -> bool:
        """Whether a state of so many bytes is written before training continues: see `AT_ONCE_BYTES`."""
        return nbytes < AT_ONCE_BYTES and (report.decides or not self._host.is_remote)

    def copy(self, contents: Contents, report: Report) -> Copied | None:
        """A copy of a checkpoint's content to write in the background; None, with a message, if it can't be copied."""
        try:
            (objects, shards), complete = self._snapshots.take((contents.objects, contents.shards))
        except Exception as reason:
            # Also if there is no memory for a copy: that must not end the training.
            expected = isinstance(reason, NotCopied)
            log.log(
                logging.INFO if expected else logging.WARNING,
                "training waits until the checkpoint at batch %d is written, as its state can't be copied: %r",
                report.batches,
                reason,
            )
            return None
        return Copied(replace(contents, objects=objects, shards=shards), complete)

    def save_part(
        self, together: Together, contents: Contents, written: Callable[[Path], None] | None = None
    ) -> str | None:
        """Save this rank's part of a checkpoint before training continues.

        All ranks call this together; the chief gets the checkpoint's id, or None if the disk is full.

        Args:
            contents: of this rank.
            written: as in `save`.
        """
        return self._save_part(together, contents, written)

    def start_part(self, together: Together, copied: Copied) -> None:
        """Save this rank's part of a checkpoint in the background."""
        self._start(
            copied,
            together.report,
            lambda contents: self._save_part(together, contents, read_soon=self._host.is_remote),
        )

    def _save_part(
        self,
        together: Together,
        contents: Contents,
        written: Callable[[Path], None] | None = None,
        *,
        read_soon: bool = True,
    ) -> str | None:
        try:
            saved = together.commit(lambda: files.write(together.staging, contents, read_soon=read_soon), written)
        except OSError as error:
            self._disk_full(error, together.report)
            return None
        self._full = None
        return saved

    def _start(self, copied: Copied, report: Report, save: Callable[[Contents], str | None]) -> None:
        # Not a daemon: a program that ends meanwhile waits for it.
        self._thread = threading.Thread(
            target=on_this_gpu(self._background),
            args=(copied, save),
            kwargs={"yields": not report.decides},  # nobody waits for it
            name="dray-saver",
        )
        self._thread.start()

    def publish(self, report: Report) -> bool:
        """Publish a report, unless a checkpoint before it has failed; returns whether training should stop here.

        False if the search decides on it but its checkpoint is still being written: see `answer`.
        """
        if report.final:
            self.finish()
        else:
            self.check()
        if not report.decides or self._thread is None:
            return self._host.publish(report)
        pool = ThreadPoolExecutor(1, "dray-report")
        self._answer = pool.submit(self._publish_once_saved, report)
        pool.shutdown(wait=False)
        return False

    def _publish_once_saved(self, report: Report) -> bool:
        return self._host.publish(replace(report, checkpoint=self.wait()))

    def answer(self) -> bool:
        """Wait for the answer to a report that was to be published later; returns whether the trial stops there."""
        answer, self._answer = self._answer, None
        return answer is not None and answer.result()

    def stops(self) -> bool:
        """Whether that answer is known, and training should not go on. Called in another thread."""
        answer = self._answer
        return answer is not None and answer.done() and (answer.exception() is not None or answer.result())

    def check(self) -> None:
        """Raise the error of a checkpoint that failed."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def wait(self) -> str | None:
        """Wait until nothing is being written, and `check`; returns the id of what was written in the background."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.check()
        return self._saved

    def finish(self) -> None:
        """Wait for the last checkpoint.

        Raises:
            OSError: the disk was full.
        """
        self.answer()
        self.wait()
        full, self._full = self._full, None
        if full is not None:
            raise full

    def abandon(self) -> None:
        """Wait for the last checkpoint, and only log its error, since another is about to be raised."""
        self.leaving.set()
        try:
            self.finish()
        except Exception as error:
            log.error("the last checkpoint was not saved: %s", error)

    def _background(self, copied: Copied, save: Callable[[Contents], str | None], *, yields: bool) -> None:
        self._saved = None
        try:
            if yields and sys.platform == "linux":  # elsewhere it affects the whole process
                os.nice(NICE)
            copied.complete()
            self._saved = save(copied.contents)
        except BaseException as error:
            self._error = error

    def _save(
        self,
        staging: Path,
        contents: Contents,
        report: Report,
        written: Callable[[Path], None] | None = None,
        *,
        read_soon: bool = True,
    ) -> str | None:
        try:
            with writing(staging):
                digests = files.write(staging, contents, read_soon=read_soon)
                if written is not None:
                    written(staging)
                    digests = {}  # the callback may have changed files
                saved = self._host.commit(staging, report, digests)
        except OSError as error:
            self._disk_full(error, report)
            return None
        self._full = None
        return saved

    def _disk_full(self, error: OSError, report: Report) -> None:
        if is_full(error) is None:
            raise error
        self._full = error
        log.warning("the checkpoint at batch %d was not saved; training continues: %s", report.batches, error)
