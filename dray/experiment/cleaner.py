"""Deletes checkpoints that an experiment no longer keeps, in a thread, as stores may be slow or unavailable."""

from __future__ import annotations

import json
import logging
import math
import queue
import threading
from collections.abc import Callable

from dray.experiment.effects import Examine, Prune, Saved
from dray.experiment.retention import Retention
from dray.storage import CheckpointStore
from dray.storage.errors import Outage
from dray.worker.lease import REPORT_FILE

log = logging.getLogger(__name__)

CLOSE_S = 60.0
"""How long the end of a run waits for deletions; the rest is deleted when the experiment is resumed."""
_LATER = "the rest is deleted when the experiment is resumed"


class Cleaner:
    """Carries out a `Retention`'s effects in order.

    Args:
        store_of: returns a trial's checkpoint store.
        post: schedules a function in the `Retention`'s event loop.
    """

    def __init__(
        self,
        retention: Retention,
        *,
        store_of: Callable[[int], CheckpointStore],
        post: Callable[[Callable[[], None]], None],
    ) -> None:
        self._retention, self._store_of, self._post = retention, store_of, post
        self._jobs: queue.SimpleQueue[Prune | Examine | None] = queue.SimpleQueue()
        self._outage = Outage(
            log,
            fails="can't delete old checkpoints; will retry when there are new ones",
            works="old checkpoints are deleted again, and none is left over",
        )
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="dray-retention", daemon=True)
        self._thread.start()

    def put(self, job: Prune | Examine) -> None:
        """Queue an effect."""
        self._jobs.put(job)

    def close(self) -> None:
        """Finish the queued effects; give up after `CLOSE_S`."""
        self._closing = True
        self._jobs.put(None)
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            log.warning("deleting old checkpoints takes longer than %.0f s; %s", CLOSE_S, _LATER)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            if isinstance(job, Prune):
                self._prune(job)
            else:
                self._examine(job)

    def _prune(self, prune: Prune) -> None:
        deleted: list[Saved] = []
        missing: list[Saved] = []
        error = None
        try:
            for each in prune.keep:
                try:
                    self._store_of(each.trial).force_to_disk(each.batches)
                except FileNotFoundError:
                    missing.append(each)
            for each in () if missing else prune.delete:
                if self._retention.is_pruning(each, prune):
                    self._store_of(each.trial).delete(each.batches)
                    deleted.append(each)
        except Exception as caught:  # an unreachable store must not end the search
            error = caught
        self._note(error)
        failed = error is not None
        self._post(lambda: self._retention.pruned(prune, deleted, missing, failed=failed))

    def _examine(self, examine: Examine) -> None:
        trial, known = examine.trial, set(examine.known)
        found: list[Saved] = []
        unfinished: list[Saved] = []
        missing: list[int] = []
        error = None
        try:
            store = self._store_of(trial)
            listed = dict(store.listed())
            missing = sorted(known - listed.keys())
            for batches, checkpoint in listed.items():
                if batches in known:
                    continue
                saved = Saved(trial=trial, batches=batches, checkpoint=checkpoint)
                if store.find(batches) is not None:
                    value = _metric_at(store, batches)
                    found.append(Saved(trial=trial, batches=batches, checkpoint=checkpoint, value=value))
                elif not store.is_complete(batches):
                    unfinished.append(saved)
        except Exception as caught:
            error = caught
        self._note(error)
        failed = error is not None
        self._post(lambda: self._retention.examined(examine, found, unfinished, missing, failed=failed))

    def _note(self, error: Exception | None) -> None:
        if error is None:
            self._outage.ended()
        elif self._closing:
            log.warning("can't delete all old checkpoints: %s; %s", error, _LATER)
        else:
            self._outage.began(error)


def _metric_at(store: CheckpointStore, batches: int) -> float | None:
    """The searcher's metric stored in a checkpoint, or None."""
    try:
        value = json.loads(store.read(batches, REPORT_FILE)).get("metric")
    except (FileNotFoundError, ValueError):  # from another tool, or damaged
        return None
    return value if isinstance(value, int | float) and math.isfinite(value) else None
