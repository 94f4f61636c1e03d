"""Which checkpoints an experiment keeps, and the removal of the others while it runs.

A checkpoint is kept if it is one of the best of the experiment, or one of the best or the latest of its trial, so many
of each as the config says (Determined's `save_experiment_best`, `save_trial_best` and `save_trial_latest`); or if its
trial may yet go on from it.
"""

from __future__ import annotations

import heapq
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from dray.experiment.config import CheckpointStorage
from dray.storage import CheckpointStore

log = logging.getLogger(__name__)

CLOSE_S = 60.0
"""How long the end of a run waits for what is being removed; the rest is removed when the experiment is resumed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """A checkpoint that is there.

    Args:
        trial, batches: whose, and where.
        checkpoint: its id.
        value: the search's metric there; None if the trial was not validated at that batch.
    """

    trial: int
    batches: int
    checkpoint: str
    value: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """How many checkpoints to keep, as Determined has it: those without a metric are never among the best."""

    experiment_best: int = 0
    trial_best: int = 1
    trial_latest: int = 1
    smaller_is_better: bool = True

    @classmethod
    def of(cls, storage: CheckpointStorage, *, smaller_is_better: bool) -> Policy:
        """That of a config."""
        return cls(
            experiment_best=storage.save_experiment_best,
            trial_best=storage.save_trial_best,
            trial_latest=storage.save_trial_latest,
            smaller_is_better=smaller_is_better,
        )

    def keeps(self, saved: Iterable[Saved], needs: Callable[[int], int] = lambda trial: 0) -> set[Saved]:
        """Those of all checkpoints of an experiment that are kept.

        Args:
            saved: all there are, in any order. Of equal metrics the one of the earlier trial and batch is better.
            needs: of a trial, how many of its latest checkpoints it needs.
        """
        trials: dict[int, list[Saved]] = {}
        for each in saved:
            trials.setdefault(each.trial, []).append(each)
        found = self.best(each for mine in trials.values() for each in mine)
        return found.union(*(self.keeps_of(mine, needs(trial)) for trial, mine in trials.items()))

    def keeps_of(self, saved: Collection[Saved], needs: int) -> set[Saved]:
        """Those of all checkpoints of one trial that are kept for its own sake."""
        latest = heapq.nlargest(max(self.trial_latest, needs), saved, key=lambda each: each.batches)
        return {*self._best(saved, self.trial_best), *latest}

    def best(self, saved: Iterable[Saved]) -> set[Saved]:
        """Those of all checkpoints of an experiment that are kept for its sake."""
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
    """The checkpoints of a running experiment, known from what the trials tell; a thread removes what is not kept.

    Before that it sees to it that what is kept is on the disk: the trials do not wait for that.

    Args:
        policy: what is kept.
        store_of: a trial's checkpoints.
        needs: see `Policy.keeps`; asked in the thread.
        note: writes a journal's record; called in the thread, and need not wait for the disk: what a kill has lost of
            it, `start` finds out by looking.
        say: tells the user; in the thread too.
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
        self._there: dict[int, dict[int, Saved]] = {}
        self._best: set[Saved] = set()
        self._on_disk: set[Saved] = set()
        self._changed: set[int] = set()
        self._damaged: set[str] = set()
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._failed = False
        self._thread = threading.Thread(target=self._run, name="dray-retention", daemon=True)

    def start(
        self,
        records: Iterable[Mapping[str, Any]],
        trials: Iterable[int],
        value_of: Callable[[CheckpointStore, int], float | None],
    ) -> None:
        """Begin, with what a run before this one has left: by its journal, and by the store itself.

        Args:
            records: of the journal.
            trials: that may have checkpoints.
            value_of: the metric at a checkpoint, in its store and at so many batches, that the journal does not know.
        """
        records, trials = list(records), list(trials)
        self._work.put(lambda: self._recover(records, trials, value_of))
        self._thread.start()

    def saved(self, trial: int, batches: int, checkpoint: str, value: float | None) -> None:
        """A trial has committed a checkpoint, or has found this one to go on from."""
        self._work.put(lambda: self._add(trial, batches, checkpoint, value))

    def damaged(self, trial: int, checkpoint: str, why: str) -> None:
        """A checkpoint was found to be damaged: it counts no more, and is left where it is. Told once."""
        self._work.put(lambda: self._forget(trial, checkpoint, why))

    def look(self, trials: Iterable[int]) -> None:
        """These trials have changed: one that has ended needs less."""
        self._work.put(lambda: self._changed.update(trials))

    def close(self) -> None:
        """Remove what is left to remove, for a while."""
        self._work.put(None)
        if self._thread.ident is not None:
            self._thread.join(CLOSE_S)

    # ------------------------------------------------------------------ in the thread
    def _run(self) -> None:
        goes_on = True
        while goes_on:
            todo = [self._work.get()]
            while not self._work.empty():
                todo.append(self._work.get())
            for step in todo:
                if step is None:
                    goes_on = False
                else:
                    self._safely(step)
            self._safely(self._remove_the_rest)

    def _safely(self, step: Callable[[], None]) -> None:
        """A store that can't be reached is no reason to end a search: what is left is removed later."""
        try:
            step()
        except Exception as error:
            if not self._failed:
                log.warning("can't remove old checkpoints, and will try again when there are new ones: %s", error)
            self._failed = True

    def _recover(
        self,
        records: list[Mapping[str, Any]],
        trials: list[int],
        value_of: Callable[[CheckpointStore, int], float | None],
    ) -> None:
        for each in saved_in(records):
            self._there.setdefault(each.trial, {})[each.batches] = each
        self._changed.update(self._there)
        self._damaged.update(str(record["checkpoint"]) for record in records if record.get("event") == "damaged")
        for trial in trials:
            store = self._store_of(trial)
            found, mine = dict(store.listed()), self._there.setdefault(trial, {})
            for batches in mine.keys() - found.keys():
                del mine[batches]
            for batches, checkpoint in found.items():
                if batches in mine:
                    continue
                if store.find(batches) is not None:
                    self._add(trial, batches, checkpoint, value_of(store, batches))
                elif not self._needs(trial) and not store.is_complete(batches):
                    store.delete(batches)  # which was begun; of a trial that runs, it may be on its way

    def _add(self, trial: int, batches: int, checkpoint: str, value: float | None) -> None:
        value = value if value is not None and math.isfinite(value) else None
        saved = Saved(trial=trial, batches=batches, checkpoint=checkpoint, value=value)
        self._damaged.discard(saved.checkpoint)  # written anew
        self._on_disk.discard(saved)
        self._changed.add(saved.trial)
        mine = self._there.setdefault(saved.trial, {})
        if mine.get(saved.batches) != saved:
            mine[saved.batches] = saved
            self._record("saved", saved, value=saved.value)

    def _forget(self, trial: int, checkpoint: str, why: str) -> None:
        mine = self._there.get(trial, {})
        for batches in [batches for batches, each in mine.items() if each.checkpoint == checkpoint]:
            del mine[batches]
        if checkpoint not in self._damaged:
            self._damaged.add(checkpoint)
            self._note(
                {"event": "damaged", "trial": trial, "checkpoint": checkpoint, "error": why, "time": time.time()}
            )
            self._say(f"trial {trial} passes over a checkpoint: {why}")

    def _remove_the_rest(self) -> None:
        while not self._are_on_disk(kept := self._kept()):
            pass  # one of them is gone, and another one is kept in its place
        for trial in sorted(self._changed):
            mine = self._there.get(trial, {})
            for each in [each for each in mine.values() if each not in kept]:
                self._store_of(trial).delete(each.batches)
                del mine[each.batches]
                self._on_disk.discard(each)
                self._record("deleted", each)
            self._changed.discard(trial)

    def _kept(self) -> set[Saved]:
        """The best of the experiment, and what is kept of trials that have changed."""
        best = self._policy.best(each for mine in self._there.values() for each in mine.values())
        self._changed |= {each.trial for each in self._best - best}
        self._best = best
        mine = {trial: self._there.get(trial, {}).values() for trial in self._changed}
        return best.union(*(self._policy.keeps_of(saved, self._needs(trial)) for trial, saved in mine.items()))

    def _are_on_disk(self, kept: set[Saved]) -> bool:
        """Wait until they are, so that a power failure does not take both these and what they replace."""
        there = True
        for each in kept - self._on_disk:
            try:
                self._store_of(each.trial).force_to_disk(each.batches)
                self._on_disk.add(each)
            except FileNotFoundError:
                del self._there[each.trial][each.batches]
                there = False
        return there

    def _record(self, event: str, saved: Saved, **more: object) -> None:
        record = {"event": event, "trial": saved.trial, "batches": saved.batches, "checkpoint": saved.checkpoint}
        self._note({**record, **more, "time": time.time()})


def saved_in(records: Iterable[Mapping[str, Any]]) -> list[Saved]:
    """The checkpoints that are there, as a journal's records tell it."""
    there: dict[tuple[int, str], Saved] = {}
    for record in records:
        match record.get("event"):
            case "saved":
                each = Saved(**{name: record[name] for name in ("trial", "batches", "checkpoint", "value")})
                there[each.trial, each.checkpoint] = each
            case "deleted" | "damaged":
                there.pop((record["trial"], record["checkpoint"]), None)
    return list(there.values())
