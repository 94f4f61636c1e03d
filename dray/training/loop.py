"""The training loop as a pure generator: it decides the next command, and the executor performs it.

`drive(plan, at)` yields commands and is sent the outcome of each. It knows neither torch nor host nor search; all
arithmetic on progress is here and in `plan`. Every rank runs it: equal outcomes give equal commands, so all ranks take
part in the same collectives.

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
    """Validate, on one batch if `test_mode`; if `compare`, find out whether this is the best validation so far."""

    test_mode: bool = False
    compare: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Publish:
    """Report measurements since the last report to the host, with a checkpoint if `save`.

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
class Outcome:
    """The outcome of a command, equal on all ranks.

    batches: after Train: batches trained in total; fewer than `until` only with `leave`.
    is_best: after Validate with `compare`: this is the best validation so far.
    decides, length_reached: after Validate, if the search measures length by a metric: the search decides here; the
        trial has reached its length.
    stop: after Publish: the search, the host or the trial requests a stop here. After Train: the search has decided on
        the last report only now, and stops the trial there; training since then is dropped.
    leave: after Train or Validate: end at once, without another validation (ShouldExit, InvalidHP, no more data).
    save_on_leave: with leave: save the training since the last checkpoint.
    interrupted: with leave, after Train: the host requested a stop.
    """

    batches: int = 0
    is_best: bool = False
    decides: bool = False
    length_reached: bool = False
    stop: bool = False
    leave: bool = False
    save_on_leave: bool = True
    interrupted: bool = False


def drive(plan: Plan, at: Progress) -> Generator[Command, Outcome, Progress]:
    """Yield the commands that take a run from `at` to the end of `plan`, and return the final progress."""
    if plan.step_zero_validation and at.batches == 0 and at.validated is None:
        outcome = yield Validate(test_mode=plan.test_mode, compare=plan.compares(at))
        if outcome.leave:
            return at
        at = at.just_validated()
        outcome = yield Publish(at=at, save=False)
        if outcome.stop:
            return at
    while not plan.ends(at):
        outcome = yield Train(until=plan.next_due(at.batches))
        if outcome.stop:
            return at
        at = at.trained(outcome.batches)
        if not outcome.leave and plan.validates(at):
            # If the trial leaves during its validation, the trained batches still count.
            validated = yield Validate(test_mode=plan.test_mode, compare=plan.compares(at))
            at = at if validated.leave else at.just_validated()
            outcome = validated
        if outcome.leave:
            save = outcome.save_on_leave and not at.is_saved
            at = at.just_saved() if save else at
            yield Publish(at=at, save=save, final=True, interrupted=outcome.interrupted)
            return at
        last = plan.ends(at) or outcome.length_reached
        decides = plan.decides(at) or outcome.decides or last
        # Save before the search decides, so that a trial that is stopped or paused here loses nothing.
        save = decides or plan.saves(at) or (at.validated == at.batches and plan.saves_validation(outcome.is_best))
        at = at.just_saved() if save else at
        outcome = yield Publish(at=at, save=save, decides=decides, final=last)
        if last:
            return at
        if outcome.stop:
            if not at.is_saved:
                at = at.just_saved()
                yield Publish(at=at, save=True, final=True)
            return at
    return at
