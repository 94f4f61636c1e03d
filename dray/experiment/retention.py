"""The retention policy for checkpoints.

A checkpoint is kept if it is among the best of the experiment, or the best or latest of its trial, as configured
(Determined's `save_experiment_best`, `save_trial_best` and `save_trial_latest`), or if its trial may still resume from
it. `dray.experiment.cleaner` deletes all others.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dray.config.sections import Repeat
from dray.config.storage import CheckpointStorage
from dray.experiment.effects import Append, Effect, Examine, Prune, Saved
from dray.leases.effects import Say
from searchers.errors import IllegalEvent
from searchers.views import TrialView


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Numbers of checkpoints to keep. As in Determined, checkpoints without a metric are never among the best.

    Attributes:
        finalists: how many of the trials that have reached the `deciding_rung` may become the best one: those that are
            to be repeated.
    """

    experiment_best: int = 0
    trial_best: int = 1
    trial_latest: int = 1
    smaller_is_better: bool = True
    finalists: int = 1

    @classmethod
    def of(cls, storage: CheckpointStorage, *, smaller_is_better: bool, repeat: Repeat | None = None) -> Policy:
        """The policy of a config."""
        return cls(
            experiment_best=storage.save_experiment_best,
            trial_best=storage.save_trial_best,
            trial_latest=storage.save_trial_latest,
            smaller_is_better=smaller_is_better,
            finalists=1 if repeat is None else repeat.top,
        )

    def keeps_of(self, saved: Collection[Saved], needs: int, *, is_repeat: bool = False) -> set[Saved]:
        """The checkpoints of one trial to keep as its best and latest.

        Args:
            saved: all checkpoints of the trial, in any order. With equal metrics, the earlier batch is better.
            needs: number of latest checkpoints that the trial needs.
            is_repeat: whether it may be the best run of the trial that it repeats.
        """
        latest = heapq.nlargest(max(self.trial_latest, needs), saved, key=lambda each: each.batches)
        # One that has not ended may become the best at a rung that it has yet to reach.
        may_be_best = (needs > 0 or is_repeat) and self.experiment_best > 0
        return {*self._best(saved, max(self.trial_best, may_be_best)), *latest}

    def best(self, saved: Collection[Saved], reached: Callable[[int], int]) -> set[Saved]:
        """The checkpoints to keep as the experiment's best; with equal metrics, the earlier trial's is better.

        Those of the best trials that have reached each rung are among them, for each may become the `deciding_rung`.

        Args:
            saved: all checkpoints, in any order.
            reached: returns the number of rungs that a trial has reached; -1 if it can't be the best, or has not ended.
        """
        found = set(self._best(saved, self.experiment_best))
        if self.experiment_best:
            mine: dict[int, list[Saved]] = {}
            for each in saved:
                mine.setdefault(each.trial, []).append(each)
            rungs = {best: reached(best.trial) for of_trial in mine.values() for best in self._best(of_trial, 1)}
            for rung in {*rungs.values()} - {-1}:
                found.update(self._best([each for each in rungs if rungs[each] >= rung], self.finalists))
        return found

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
    """The checkpoints of a running experiment, as reported by its trials.

    Args:
        policy: the policy.
        needs: returns the `needs` of `Policy.keeps_of` for a trial.
        reached: that of `Policy.best`.
        is_repeat: that of `Policy.keeps_of` for a trial.
        reported: returns the batches at a trial's latest report to the search, which may let another trial begin there.
        emit: called with each effect. `Prune` and `Examine` are answered by `pruned` and `examined`.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        needs: Callable[[int], int],
        reached: Callable[[int], int] = lambda trial: -1,
        is_repeat: Callable[[int], bool] = lambda trial: False,
        reported: Callable[[int], int | None] = lambda trial: None,
        emit: Callable[[Effect], None],
    ) -> None:
        self._policy, self._needs, self._reached, self._is_repeat = policy, needs, reached, is_repeat
        self._reported, self._emit = reported, emit
        self._saved: dict[int, dict[int, Saved]] = {}
        """Checkpoints that may be deleted some day, by trial and batches. An ended trial's are dropped from here once
        none is among the experiment's best."""
        self._damaged: set[str] = set()
        """Ids of existing checkpoints that don't count; none of them is in `_saved`."""
        self._durable: set[Saved] = set()
        """Checkpoints known to survive a power failure."""
        self._forcing: set[Saved] = set()
        """Checkpoints that will be durable when a pending `Prune` is carried out."""
        self._best: set[Saved] = set()
        self._pruning: dict[Saved, Prune] = {}
        """Checkpoints to be deleted, with the newest `Prune` that says so. Only that one still deletes them: an earlier
        one may rely on checkpoints that have been found damaged meanwhile."""
        self._pinned: dict[int, tuple[int, int]] = {}
        """The checkpoints (trial, batches) that trials without a durable checkpoint of their own begin from."""
        self._unexamined: set[int] = set()
        """Trials whose stores may have checkpoints that are not in `_saved`; none of their checkpoints is deleted."""
        self._failed: list[Examine] = []
        """Effects to retry."""
        self.unanswered = 0
        """The number of effects without an answer. What follows from an answer is counted before the answer is, so that
        in any thread 0 means that nothing is left to do."""
        self._changed: set[int] = set()
        """Trials that may have too many checkpoints; other trials keep all."""

    def recover(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Start with the checkpoints of earlier runs, from the journal and from the trials' stores: a kill may
        have lost the journal's last records."""
        self._damaged = {str(record["checkpoint"]) for record in records if record.get("event") == "damaged"}
        for each in saved_in(records):
            self._saved.setdefault(each.trial, {})[each.batches] = each
        self._changed.update(self._saved)
        for trial in sorted({record["trial"] for record in records if record.get("event") == "started"}):
            self._examine(trial)

    def examined(
        self,
        examine: Examine,
        found: Iterable[Saved] = (),
        unfinished: Iterable[Saved] = (),
        missing: Iterable[int] = (),
        *,
        failed: bool = False,
    ) -> None:
        """Handle the listing of a trial's store.

        Args:
            found: complete checkpoints that were not known.
            unfinished: incomplete checkpoints.
            missing: batches of known checkpoints that do not exist.
            failed: the store could not be used; the listing is retried when there are new checkpoints.
        """
        if failed:
            self._failed.append(examine)
        else:
            self._add_listed(examine.trial, found, unfinished, missing)
        self.unanswered -= 1

    def _add_listed(
        self, trial: int, found: Iterable[Saved], unfinished: Iterable[Saved], missing: Iterable[int]
    ) -> None:
        self._unexamined.discard(trial)
        for batches in missing:
            self._forget(self._saved[trial].get(batches))
        for each in found:
            if each.checkpoint not in self._damaged and each.batches not in self._saved.get(trial, ()):
                self._add(each)
        self._changed.add(trial)
        mine = self._saved.get(trial, {})
        left = tuple(each for each in unfinished if each.batches not in mine)  # not completed since the listing
        if left and not self._needs(trial):  # while its trial runs, they may be being written
            self._emit_prune((), left)
        self._prune()

    def saved(self, trial: int, batches: int, checkpoint: str, value: float | None) -> None:
        """Note that a trial has committed a checkpoint, or has resumed from it."""
        self._damaged.discard(checkpoint)  # it was written again
        is_known = trial in self._saved  # otherwise the trial is new, or had ended
        self._add(Saved(trial=trial, batches=batches, checkpoint=checkpoint, value=value))
        # It may have been scheduled for deletion while later ones seemed intact, or while it was being written.
        self._pruning = {
            each: prune for each, prune in self._pruning.items() if (each.trial, each.batches) != (trial, batches)
        }
        if not is_known:
            self._examine(trial)
        self._prune()

    def damaged(self, trial: int, checkpoint: str, why: str) -> None:
        """Note a damaged checkpoint: it no longer counts, but is not deleted. It is reported once."""
        for each in list(self._saved.get(trial, {}).values()):
            if each.checkpoint == checkpoint:
                self._forget(each)
        if checkpoint not in self._damaged:
            self._damaged.add(checkpoint)
            # It need not be on the disk: the next run would find the checkpoint damaged again.
            self._emit(Append({"event": "damaged", "trial": trial, "checkpoint": checkpoint, "error": why}, wait=False))
            self._emit(Say(f"trial {trial} skipped a checkpoint: {why}"))

    def changed(self, trials: Iterable[int]) -> None:
        """Note that the state of trials has changed: an ended trial needs fewer checkpoints."""
        changed = set(trials)
        # Pending deletions of a resumed trial are decided anew.
        resumed = {trial for trial in changed if self._needs(trial)}
        self._pruning = {each: prune for each, prune in self._pruning.items() if each.trial not in resumed}
        self._changed |= changed
        self._prune()

    def check(self, trial: int, batches: int) -> None:
        """Raise an `IllegalEvent` if the trial's checkpoint is about to be deleted."""
        if any((each.trial, each.batches) == (trial, batches) for each in self._pruning):
            raise IllegalEvent(f"trial {trial}'s checkpoint at batch {batches} is being deleted; choose another one")

    def pin(self, trial: int, source: tuple[int, int]) -> None:
        """Keep another trial's checkpoint (trial, batches), from which this one begins, until this one has a durable
        checkpoint of its own, or `unpin`."""
        self._pinned[trial] = source

    def unpin(self, trial: int) -> None:
        """Note that a trial no longer needs the checkpoint that it began from."""
        if (source := self._pinned.pop(trial, None)) is not None:
            self._changed.add(source[0])

    def is_pruning(self, saved: Saved, prune: Prune) -> bool:
        """Whether this `Prune` is still to delete a checkpoint. Thread-safe."""
        return self._pruning.get(saved) is prune

    def pruned(self, prune: Prune, deleted: Collection[Saved], missing: Collection[Saved], *, failed: bool) -> None:
        """Handle the result of a `Prune`.

        Args:
            deleted: deleted checkpoints.
            missing: checkpoints to keep that did not exist, in which case nothing was deleted.
            failed: the store could not be used; the deletion is retried when there are new checkpoints.
        """
        self._pruning = {each: newest for each, newest in self._pruning.items() if newest is not prune}
        self._forcing.difference_update(prune.keep)
        if not failed:
            for each in prune.keep:
                if each not in missing and self._saved.get(each.trial, {}).get(each.batches) == each:
                    self._durable.add(each)
                    self.unpin(each.trial)
        for each in missing:
            self._forget(each)
        for each in deleted:
            self._forget(each)
            self._record("deleted", each)
        self._changed.update(each.trial for each in (*prune.keep, *prune.delete))
        if not failed:
            self._prune()
        self.unanswered -= 1

    # ------------------------------------------------------------------ decisions
    def _examine(self, trial: int) -> None:
        self._unexamined.add(trial)
        self._ask(Examine(trial, tuple(self._saved.get(trial, ()))))

    def _add(self, saved: Saved) -> None:
        if saved.value is not None and not math.isfinite(saved.value):
            saved = replace(saved, value=None)
        mine = self._saved.setdefault(saved.trial, {})
        self._changed.add(saved.trial)
        if (before := mine.get(saved.batches)) != saved:
            self._forget(before)
            self._record("saved", saved, value=saved.value)
            mine[saved.batches] = saved

    def _forget(self, saved: Saved | None) -> None:
        if saved is None:
            return
        mine = self._saved.get(saved.trial, {})
        if mine.get(saved.batches) == saved:
            del mine[saved.batches]
        self._durable.discard(saved)
        if saved in self._best:
            others = (each for mine in self._saved.values() for each in mine.values())
            self._set_best({*others, *self._best} - {saved})

    def _set_best(self, candidates: set[Saved]) -> None:
        best = self._policy.best(candidates, self._reached)
        self._changed.update(each.trial for each in self._best - best)
        self._best = best

    def _prune(self) -> None:
        """Delete superfluous checkpoints of the trials that have changed."""
        failed, self._failed = self._failed, []
        for examine in failed:
            self._ask(examine)
        # New checkpoints, and those of trials that have ended, which count at the rungs that they have reached.
        self._set_best(
            {*self._best, *(each for trial in self._changed for each in self._saved.get(trial, {}).values())}
        )
        keep: set[Saved] = set(self._best)
        sources = set(self._pinned.values())
        delete: list[Saved] = []
        for trial in sorted(self._changed - self._unexamined):
            mine = self._saved.get(trial, {}).values()
            needs = self._needs(trial)
            kept = self._policy.keeps_of(mine, needs, is_repeat=self._is_repeat(trial))
            if needs:
                kept |= {each for each in mine if each.batches == self._reported(trial)}
            pinned = {each for each in mine if (trial, each.batches) in sources}
            kept |= pinned
            if not (needs or pinned) and self._best.isdisjoint(mine) and (kept & self._durable).issuperset(mine):
                self._durable.difference_update(mine)  # the trial has ended, and keeps all its checkpoints for good
                self._saved.pop(trial, None)
                continue
            keep |= kept
            delete += [each for each in mine if not (each in kept or each in self._best or each in self._pruning)]
        self._changed &= self._unexamined
        keep -= self._durable
        if delete or not self._forcing.issuperset(keep):
            self._forcing |= keep
            self._emit_prune(sorted(keep, key=lambda each: (each.trial, each.batches)), delete)

    def _emit_prune(self, keep: Sequence[Saved], delete: Sequence[Saved]) -> None:
        prune = Prune(tuple(keep), tuple(delete))
        self._pruning |= dict.fromkeys(delete, prune)
        self._ask(prune)

    def _ask(self, effect: Prune | Examine) -> None:
        self.unanswered += 1
        self._emit(effect)

    def _record(self, event: str, saved: Saved, **more: object) -> None:
        record = {"event": event, "trial": saved.trial, "batches": saved.batches, "checkpoint": saved.checkpoint}
        self._emit(Append({**record, **more}, wait=False))


def checkpoints_needed(trial: TrialView) -> int:
    """The number of latest checkpoints that a trial needs: one to resume from, and one more while it may write."""
    return 0 if trial.ended else 2 if trial.state == "RUNNING" else 1


def saved_in(records: Iterable[Mapping[str, Any]]) -> list[Saved]:
    """The existing checkpoints, from a journal's records."""
    saved: dict[tuple[int, str], Saved] = {}
    for record in records:
        match record.get("event"):
            case "saved":
                each = Saved(**{name: record[name] for name in ("trial", "batches", "checkpoint", "value")})
                saved[each.trial, each.checkpoint] = each
            case "deleted" | "damaged":
                saved.pop((record["trial"], record["checkpoint"]), None)
    return list(saved.values())
