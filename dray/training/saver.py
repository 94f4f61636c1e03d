"""Saves checkpoints, one after another: the large ones while training goes on."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from dray.storage import writing
from dray.storage.errors import is_full
from dray.training import checkpoint
from dray.training.checkpoint import Contents
from dray.training.host import Host, Report
from dray.training.snapshot import NotCopied, Snapshots

log = logging.getLogger(__name__)

AT_ONCE_BYTES = 16 << 20
"""Smaller states are written before training goes on, unless the store is a network away. To write one of 16 MB takes
45 ms of a core, and to copy it 13; one of 1 MB 9 and 5. So there is little to gain, and where cores are few the thread
takes that back."""
NICE = 10
"""The writer's thread gives way to those that train, where there are fewer cores than threads. These wait for one
another in every operation: what takes one's core takes all of theirs. It then has about a tenth of a core, with which
it gets through 600 MB in twelve seconds; and a whole one where one is free, or the next checkpoint waits for it."""


class Saver:
    """Writes checkpoints and commits them to a host. On the chief; not from several threads.

    At most one is being written. If that fails, whatever is called next raises its error; but for a full disk, which
    is told, and which the trial may outlast: it is an error if the last checkpoint is the one that found no room.

    Args:
        host: whose `new_checkpoint` and `commit` are called, the latter also from a thread.
    """

    def __init__(self, host: Host) -> None:
        self._host = host
        self._snapshots = Snapshots()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._full: OSError | None = None

    def save(
        self, contents: Contents, report: Report, *, at_once: bool, written: Callable[[Path], None] | None = None
    ) -> str | None:
        """Save a checkpoint; its id, or None if it is yet to be committed, or found no room.

        Args:
            contents: of it.
            report: that it belongs to.
            at_once: return when it is committed.
            written: called in between with the directory.
        """
        self.wait()
        try:
            staging = self._host.new_checkpoint(report.batches)
        except OSError as error:
            self._no_room(error, report)
            return None
        if at_once or written is not None or (contents.nbytes < AT_ONCE_BYTES and not self._host.is_remote):
            return self._save(staging, contents, report, written)
        try:
            objects, complete = self._snapshots.take(contents.objects)
        except Exception as reason:
            # Also for want of memory: that there is no copy is no reason to end the training.
            expected = isinstance(reason, NotCopied)
            log.log(
                logging.INFO if expected else logging.WARNING,
                "training waits until the checkpoint at batch %d is written: its state is not copied (%r)",
                report.batches,
                reason,
            )
            return self._save(staging, contents, report)
        copied = Contents(objects=objects, texts=contents.texts, nbytes=contents.nbytes)
        # No daemon: a program that ends meanwhile waits for it.
        self._thread = threading.Thread(
            target=self._behind, args=(staging, copied, report, complete), name="dray-saver"
        )
        self._thread.start()
        return None

    def check(self) -> None:
        """Raise what a checkpoint has failed with."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def wait(self) -> None:
        """Wait until nothing is being written, and `check`."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.check()

    def finish(self) -> None:
        """Wait for the last checkpoint.

        Raises:
            OSError: there was no room for it.
        """
        self.wait()
        full, self._full = self._full, None
        if full is not None:
            raise full

    def abandon(self) -> None:
        """Wait for the last checkpoint, and log what it failed with: there is another error to be raised."""
        try:
            self.finish()
        except Exception as error:
            log.error("the last checkpoint was not saved: %s", error)

    def _behind(self, staging: Path, contents: Contents, report: Report, complete: Callable[[], None]) -> None:
        try:
            if sys.platform == "linux":  # elsewhere it would be the whole process
                os.nice(NICE)
            complete()
            # An upload reads it.
            self._save(staging, contents, report, read_soon=self._host.is_remote)
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
                digests = checkpoint.write(staging, contents, read_soon=read_soon)
                if written is not None:
                    written(staging)
                    digests = {}  # it may have changed files
                saved = self._host.commit(staging, report, digests)
        except OSError as error:
            self._no_room(error, report)
            return None
        self._full = None
        return saved

    def _no_room(self, error: OSError, report: Report) -> None:
        if is_full(error) is None:
            raise error
        self._full = error
        log.warning("the checkpoint at batch %d was not saved, training goes on: %s", report.batches, error)
