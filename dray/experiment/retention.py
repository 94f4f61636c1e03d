"""Which checkpoints an experiment keeps, and the removal of the others while it runs.

A checkpoint is kept if it is among the best of the experiment, or the best or latest of its trial, as many as
configured (Determined's `save_experiment_best`, `save_trial_best` and `save_trial_latest`), or if its trial may still
resume from it.
"""

from __future__ import annotations

import heapq
import json
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dray.config.storage import CheckpointStorage
from dray.storage import CheckpointStore
from dray.storage.errors import Outage
from dray.worker.host import REPORT_FILE
from searchers.views import TrialView

log = logging.getLogger(__name__)

CLOSE_S = 60.0
"""How long the end of a run waits for removals; the rest is removed when the experiment is resumed."""
_LATER = "the rest is deleted when the experiment is resumed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """An existing checkpoint.

    Attributes:
        trial, batches: its trial, and after how many batches it was saved.
        checkpoint: its id.
        value: the searcher's metric at that batch; None if the trial was not validated at that batch.
        is_on_disk: whether it is known to survive a power failure.
    """

    trial: int
    batches: int
    checkpoint: str
    value: float | None = None
    is_on_disk: bool = field(default=False, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """How many checkpoints to keep; as in Determined, those without a metric are never among the best."""

    experiment_best: int = 0
    trial_best: int = 1
    trial_latest: int = 1
    smaller_is_better: bool = True

    @classmethod
    def of(cls, storage: CheckpointStorage, *, smaller_is_better: bool) -> Policy:
        """The policy of a config."""
        return cls(
            experiment_best=storage.save_experiment_best,
            trial_best=storage.save_trial_best,
            trial_latest=storage.save_trial_latest,
            smaller_is_better=smaller_is_better,
        )

    def keeps_of(self, saved: Collection[Saved], needs: int) -> set[Saved]:
        """The checkpoints of one trial to keep, as its best and latest.

        Args:
            saved: all of the trial, in any order. Of equal metrics, the earlier batch is better.
            needs: how many of its latest checkpoints the trial needs.
        """
        latest = heapq.nlargest(max(self.trial_latest, needs), saved, key=lambda each: each.batches)
        return {*self._best(saved, self.trial_best), *latest}

    def best(self, saved: Iterable[Saved]) -> set[Saved]:
        """The checkpoints to keep as the experiment's best; of equal metrics, the earlier trial's is better."""
        return set(self._best(saved, self.experiment_best))

    def _best(self, saved: Iterable[Saved], count: int) -> list[Saved]:
        if not count:
            return []
        sign = 1 if self.smaller_is_better else -1
        ranked = (
            (sign * each.value, each.trial, each.batches, each)
            for each in saved
            if each.value is not None and math.isfinite(each.value)
        )
        return [each for *_, each in heapq.nsmallest(count, ranked, key=lambda row: row[:3])]


class Retention:
    """The checkpoints of a running experiment, as trials report them; a thread removes those that are not kept.

    First the thread makes sure that the kept ones are on the disk: trials do not wait for that.

    Args:
        policy: which to keep.
        store_of: returns a trial's checkpoints.
        needs: returns the `needs` of `Policy.keeps_of` for a trial; called in the thread.
        note: writes a record to the journal; called in the thread. It need not wait for the disk: `start` recovers
            what a kill has lost from the store.
        say: prints a line for the user; called in the thread.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        store_of: Callable[[int], CheckpointStore],
        needs: Callable[[int], int],
        note: Callable[[Mapping[str, object]], None],
        say: Callable[[str], None],
    ) -> None:
        self._policy, self._store_of, self._needs, self._note, self._say = policy, store_of, needs, note, say
        # Those that may be removed some day, by trial and batches; of an ended trial, only if one is among the
        # experiment's best.
        self._saved: dict[int, dict[int, Saved]] = {}
        self._damaged: set[str] = set()  # ids of those that exist and do not count; none of them is in `_saved`
        self._best: set[Saved] = set()  # the experiment's best, when they were last removed
        self._changed: set[int] = set()  # trials that may have too many; in other trials, all are kept
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._outage = Outage(
            log,
            fails="can't delete old checkpoints; will retry when there are new ones",
            works="old checkpoints are deleted again, and none is left over",
        )
        self._thread = threading.Thread(target=self._run, name="dray-retention", daemon=True)

    def start(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Start with the checkpoints of earlier runs, from the journal's records and from the trials' stores."""
        started = sorted({record["trial"] for record in records if record.get("event") == "started"})
        damaged = [str(record["checkpoint"]) for record in records if record.get("event") == "damaged"]
        saved = saved_in(records)
        self._work.put(lambda: self._recover(started, saved, damaged))
        self._thread.start()

    def saved(self, trial: int, batches: int, checkpoint: str, value: float | None) -> None:
        """A trial has committed this checkpoint, or has resumed from it."""
        self._work.put(lambda: self._add(trial, batches, checkpoint, value))

    def damaged(self, trial: int, checkpoint: str, why: str) -> None:
        """A checkpoint is damaged: it no longer counts, but is not deleted. Reported once."""
        self._work.put(lambda: self._forget(trial, checkpoint, why))

    def changed(self, trials: Iterable[int]) -> None:
        """The state of these trials has changed: one that has ended needs fewer checkpoints."""
        self._work.put(lambda: self._changed.update(trials))

    def close(self) -> None:
        """Finish the removals; give up after `CLOSE_S`."""
        self._work.put(None)
        if self._thread.ident is not None:
            self._thread.join(CLOSE_S)
            if self._thread.is_alive():
                log.warning("deleting old checkpoints takes longer than %.0f s; %s", CLOSE_S, _LATER)

    # ------------------------------------------------------------------ in the thread
    def _run(self) -> None:
        is_open = True
        todo: list[Callable[[], None]] = []  # failed steps, to be retried, and new ones
        while is_open:
            new = [self._work.get()]
            while not self._work.empty():
                new.append(self._work.get())
            is_open = None not in new
            todo += [step for step in new if step is not None]
            errors = {step: error for step in [*todo, self._remove_others] if (error := _error_of(step)) is not None}
            todo = [step for step in todo if step in errors]
            if not errors:
                self._outage.ended()
            elif is_open:
                self._outage.began(next(iter(errors.values())))
            else:
                log.warning("can't delete all old checkpoints: %s; %s", next(iter(errors.values())), _LATER)

    def _recover(self, started: Sequence[int], saved: Iterable[Saved], damaged: Iterable[str]) -> None:
        for each in saved:
            self._saved.setdefault(each.trial, {})[each.batches] = each
        self._changed.update(self._saved)
        self._damaged.update(damaged)
        for trial in started:
            store = self._store_of(trial)
            found, mine = dict(store.listed()), self._saved.setdefault(trial, {})
            for batches in mine.keys() - found.keys():
                del mine[batches]
            for batches, checkpoint in found.items():
                if batches in mine or checkpoint in self._damaged:
                    continue
                if store.find(batches) is not None:
                    self._add(trial, batches, checkpoint, _metric_at(store, batches))
                elif not self._needs(trial) and not store.is_complete(batches):
                    store.delete(batches)  # unfinished; while its trial runs, it may be being written
            if not mine:
                del self._saved[trial]

    def _add(self, trial: int, batches: int, checkpoint: str, value: float | None) -> None:
        value = value if value is not None and math.isfinite(value) else None
        saved = Saved(trial=trial, batches=batches, checkpoint=checkpoint, value=value)
        self._damaged.discard(checkpoint)  # it was written again
        if trial not in self._saved:  # it is new, or it has ended
            self._saved[trial] = self._earlier(trial, batches)
        self._changed.add(trial)
        if self._saved[trial].get(batches) != saved:
            self._record("saved", saved, value=value)
        self._saved[trial][batches] = saved

    def _earlier(self, trial: int, batches: int) -> dict[int, Saved]:
        """The checkpoints in a trial's store from before this one."""
        store = self._store_of(trial)
        return {
            at: Saved(trial=trial, batches=at, checkpoint=checkpoint, value=_metric_at(store, at))
            for at, checkpoint in store.listed()
            if at < batches and checkpoint not in self._damaged and store.find(at) is not None
        }

    def _forget(self, trial: int, checkpoint: str, why: str) -> None:
        mine = self._saved.get(trial, {})
        for at in [at for at, each in mine.items() if each.checkpoint == checkpoint]:
            del mine[at]
        if checkpoint not in self._damaged:
            self._damaged.add(checkpoint)
            self._note(
                {"event": "damaged", "trial": trial, "checkpoint": checkpoint, "error": why, "time": time.time()}
            )
            self._say(f"trial {trial} skipped a checkpoint: {why}")

    def _remove_others(self) -> None:
        while not self._are_on_disk(kept := self._kept()):
            pass  # one of them is gone, so another one is kept instead
        for trial in sorted(self._changed):
            mine = self._saved.get(trial, {})
            for each in [each for each in mine.values() if each not in kept]:
                self._store_of(trial).delete(each.batches)
                del mine[each.batches]
                self._record("deleted", each)
            # By what an ended trial keeps: it may have ended since `kept` was found, and more of it goes next time.
            is_final = set(mine.values()) <= self._policy.keeps_of(mine.values(), needs=0)
            if is_final and not self._needs(trial) and self._best.isdisjoint(mine.values()):
                self._saved.pop(trial, None)
            self._changed.discard(trial)

    def _kept(self) -> set[Saved]:
        """The experiment's best, and the checkpoints to keep of trials that have changed."""
        best = self._policy.best(each for mine in self._saved.values() for each in mine.values())
        self._changed |= {each.trial for each in self._best - best}
        self._best = best
        return best.union(
            *(
                self._policy.keeps_of(mine.values(), self._needs(trial))
                for trial in self._changed
                if (mine := self._saved.get(trial))
            )
        )

    def _are_on_disk(self, kept: set[Saved]) -> bool:
        """Wait until they are on the disk, so that a power failure can't take both them and those that they replace.

        False if one of them is gone.
        """
        all_exist = True
        for each in [each for each in kept if not each.is_on_disk]:
            try:
                self._store_of(each.trial).force_to_disk(each.batches)
                self._saved[each.trial][each.batches] = replace(each, is_on_disk=True)
            except FileNotFoundError:
                del self._saved[each.trial][each.batches]
                all_exist = False
        return all_exist

    def _record(self, event: str, saved: Saved, **more: object) -> None:
        record = {"event": event, "trial": saved.trial, "batches": saved.batches, "checkpoint": saved.checkpoint}
        self._note({**record, **more, "time": time.time()})


def checkpoints_needed(trial: TrialView) -> int:
    """How many of its latest checkpoints a trial needs: one to resume from, and one more while it may write others."""
    return 0 if trial.ended else 2 if trial.state == "RUNNING" else 1


def _metric_at(store: CheckpointStore, batches: int) -> float | None:
    """The searcher's metric that a checkpoint carries; None if it carries none."""
    try:
        value = json.loads(store.read(batches, REPORT_FILE)).get("metric")
    except (FileNotFoundError, ValueError):  # from another tool, or damaged
        return None
    return value if isinstance(value, int | float) else None


def _error_of(step: Callable[[], None]) -> Exception | None:
    """Run a step, and return its error: an unreachable store must not end the search."""
    try:
        step()
    except Exception as error:
        return error
    return None


def saved_in(records: Iterable[Mapping[str, Any]]) -> list[Saved]:
    """The existing checkpoints according to a journal's records."""
    saved: dict[tuple[int, str], Saved] = {}
    for record in records:
        match record.get("event"):
            case "saved":
                each = Saved(**{name: record[name] for name in ("trial", "batches", "checkpoint", "value")})
                saved[each.trial, each.checkpoint] = each
            case "deleted" | "damaged":
                saved.pop((record["trial"], record["checkpoint"]), None)
    return list(saved.values())
