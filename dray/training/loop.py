"""The training loop, pure: it decides what comes next and never does it.

`drive(plan, at)` yields commands and is sent what was seen when they had been performed. It knows no torch, no host and
no search; all arithmetic on progress is here and in `plan`. Every rank runs it: equal `Seen` give equal commands, hence
no collective operation without its counterpart.

Its law: resuming from any published progress yields exactly the remaining commands.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

from dray.training.plan import Plan
from dray.training.progress import Progress


@dataclass(frozen=True, slots=True, kw_only=True)
class Train:
    """Train until `until` batches have been trained in all."""

    until: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Validate:
    """Validate, on one batch if `test_mode`."""

    test_mode: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Publish:
    """Tell the host what was measured since the last time, together with a checkpoint if `save`.

    `decides`: a search may answer with a stop. `final`: nothing comes after it. `interrupted`: for the run was asked to
    stop here, and is to be gone on with.
    """

    at: Progress
    save: bool
    decides: bool = False
    final: bool = False
    interrupted: bool = False


Command = Train | Validate | Publish


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """The answer to a command, equal on all ranks.

    batches: after Train: batches trained in all; fewer than `until` only together with `leave`.
    worth_saving: after Validate: the best validation so far.
    decides, enough: after Validate: where a search counts by a metric: it decides here; it wants no more than this.
    stop: after Publish: the search, the host or the trial asks to end here.
    leave: after Train or Validate: end at once, without another validation (ShouldExit, InvalidHP, no more data).
    save_on_leave: then save what is not yet saved.
    interrupted: after Train: leaves because it was asked to stop.
    """

    batches: int = 0
    worth_saving: bool = False
    decides: bool = False
    enough: bool = False
    stop: bool = False
    leave: bool = False
    save_on_leave: bool = True
    interrupted: bool = False


def drive(plan: Plan, at: Progress) -> Generator[Command, Seen, Progress]:
    """Yield the commands that take a run from `at` to the end of `plan`; return where it ended."""
    if plan.step_zero_validation and at.batches == 0 and at.validated is None:
        seen = yield Validate(test_mode=plan.test_mode)
        if seen.leave:
            return at
        at = at.just_validated()
        seen = yield Publish(at=at, save=False)
        if seen.stop:
            return at
    while not plan.ends(at):
        seen = yield Train(until=plan.next_due(at.batches))
        at = at.trained(seen.batches)
        if not seen.leave and plan.validates(at):
            # Nothing is lost by a trial that leaves within its validation, so that the batches count either way.
            validated = yield Validate(test_mode=plan.test_mode)
            at = at if validated.leave else at.just_validated()
            seen = validated
        if seen.leave:
            save = seen.save_on_leave and not at.is_saved
            at = at.just_saved() if save else at
            yield Publish(at=at, save=save, final=True, interrupted=seen.interrupted)
            return at
        last = plan.ends(at) or seen.enough
        decides = plan.decides(at) or seen.decides or last
        # Before a search decides there is a checkpoint, so that a trial stopped or paused there loses nothing.
        save = decides or plan.saves(at) or (at.validated == at.batches and plan.worth_saving(seen))
        at = at.just_saved() if save else at
        seen = yield Publish(at=at, save=save, decides=decides, final=last)
        if last:
            return at
        if seen.stop:
            if not at.is_saved:
                at = at.just_saved()
                yield Publish(at=at, save=True, final=True)
            return at
    return at
