"""The training loop, pure: it decides what comes next, and leaves it to others to do it.

`drive(plan, at)` yields commands and is sent what was seen when each was performed. It knows neither torch nor host nor
search; all arithmetic on progress is here and in `plan`. Every rank runs it: equal `Seen` gives equal commands, so all
ranks take part in the same collectives.

Its law: resuming from any published progress yields exactly the remaining commands.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

from dray.training.plan import Plan
from dray.training.progress import Progress


@dataclass(frozen=True, slots=True, kw_only=True)
class Train:
    """Train until `until` batches have been trained in total."""

    until: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Validate:
    """Validate, on one batch if `test_mode`. `saved`: a checkpoint is saved in any case."""

    test_mode: bool = False
    saved: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Publish:
    """Report to the host what was measured since the last report, with a checkpoint if `save`.

    `decides`: the search may answer with a stop. `final`: this is the last report. `interrupted`: the run was asked to
    stop here, to be resumed later.
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

    batches: after Train: batches trained in total; fewer than `until` only with `leave`.
    worth_saving: after Validate: it is the best validation so far.
    decides, enough: after Validate, if the search measures length by a metric: it decides here; the length is reached.
    stop: after Publish: the search, the host or the trial asks to stop here.
    leave: after Train or Validate: end at once, without another validation (ShouldExit, InvalidHP, no more data).
    save_on_leave: with leave: save what is not yet saved.
    interrupted: after Train: leave is for a request to stop.
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
            # A trial that leaves during its validation loses nothing: its batches count.
            validated = yield Validate(test_mode=plan.test_mode, saved=plan.decides(at))
            at = at if validated.leave else at.just_validated()
            seen = validated
        if seen.leave:
            save = seen.save_on_leave and not at.is_saved
            at = at.just_saved() if save else at
            yield Publish(at=at, save=save, final=True, interrupted=seen.interrupted)
            return at
        last = plan.ends(at) or seen.enough
        decides = plan.decides(at) or seen.decides or last
        # Saved before the search decides, so that a trial that is stopped or paused here loses nothing.
        save = decides or plan.saves(at) or (at.validated == at.batches and plan.worth_saving(seen.worth_saving))
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
