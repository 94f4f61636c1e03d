"""The life of a lease on its chief, as a state machine: the trial's progress, and how it must end.

Pure: `dray.worker.reports` turns reports and the desk's answers into events.
"""

from __future__ import annotations

from typing import Literal

from dray.leases.messages import LeaseOutcome

State = Literal[
    "idle", "fitting", "reporting", "fitted", "trained_enough",
    "stopped", "paused", "interrupted", "yielded", "diverged", "completed", "lost",
]  # fmt: skip
"""idle: no report yet. fitting, reporting: it trains in `fit()`, or in its own loop, which reports through `dray.core`.
fitted: a program's `fit()` has ended, and the program runs on. trained_enough: a program has reached the last length,
and should return. stopped, paused, interrupted, diverged: it should save and return, with this outcome. yielded: it
has returned, so that another trial gets its group, and goes on later. completed: its
final report has been sent. lost: it runs on other workers."""

Event = Literal[
    "fit", "report", "end_fit", "reach_end", "stop", "pause", "interrupt", "yield", "diverge", "complete", "lose"
]  # fmt: skip
"""fit, report: a report from `fit()`, or through `dray.core`. end_fit: the final report of a program's `fit()`.
reach_end: a program has reached the last of several lengths. stop, pause: the search's decisions. interrupt: the
workers are needed elsewhere. yield: another trial has got its group. diverge: a loss is NaN, and the config stops on
that. complete: the final report was sent. lose: the desk has given the trial to other workers."""

_DECISIONS: dict[Event, State] = {"stop": "stopped", "pause": "paused", "interrupt": "interrupted"}
_UNDECIDED: dict[Event, State] = {**_DECISIONS, "diverge": "diverged", "complete": "completed", "lose": "lost"}


def _settled(state: State, *events: Event) -> dict[Event, State]:
    """The transitions of a state that only the loss of the lease changes, because the first decision counts."""
    return {**dict.fromkeys((*events, *_DECISIONS), state), "lose": "lost"}


TRANSITIONS: dict[State, dict[Event, State]] = {
    "idle": {"fit": "fitting", "report": "reporting", **_UNDECIDED},
    "fitting": {"fit": "fitting", "report": "reporting", "end_fit": "fitted", "yield": "yielded", **_UNDECIDED},
    "reporting": {
        "fit": "reporting", "report": "reporting", "end_fit": "fitted", "reach_end": "trained_enough", **_UNDECIDED
    },
    "fitted": {"report": "fitted", "reach_end": "trained_enough", **_UNDECIDED},
    "trained_enough": {**_settled("trained_enough", "fit", "report"), "end_fit": "fitted", "complete": "completed"},
    "stopped": _settled("stopped", "fit", "report"),
    "paused": _settled("paused", "fit", "report"),
    "interrupted": _settled("interrupted", "fit", "report"),
    "yielded": _settled("yielded"),
    "diverged": _settled("diverged", "fit", "report"),
    "completed": _settled("completed"),
    "lost": _settled("lost", "fit", "report"),
}  # fmt: skip


class IllegalTransition(RuntimeError):
    """The event can't happen in this state: a bug in dray."""


class Lifecycle:
    """The state of one lease."""

    def __init__(self) -> None:
        self.state: State = "idle"

    def on(self, event: Event) -> None:
        """Move to the next state. An event that can't happen here raises `IllegalTransition`, and changes nothing."""
        if event not in TRANSITIONS[self.state]:
            raise IllegalTransition(f"a lease that is {self.state!r} can't {event!r}")
        self.state = TRANSITIONS[self.state][event]

    @property
    def should_return(self) -> bool:
        """Whether the trial's code should save and return."""
        return self.state in ("trained_enough", "stopped", "paused", "interrupted", "diverged")

    @property
    def outcome(self) -> LeaseOutcome:
        """The trial's outcome if its code returns now."""
        match self.state:
            case "stopped" | "paused" | "interrupted" | "yielded" | "diverged":
                return self.state
            case "lost":
                return "interrupted"
            case _:
                return "completed"
