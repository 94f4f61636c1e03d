"""The life of a lease: events lead from state to state, and the first decision counts."""

from __future__ import annotations

from typing import get_args

import pytest

from dray.leases.messages import LeaseOutcome
from dray.worker.lifecycle import TRANSITIONS, Event, IllegalTransition, Lifecycle, State

STATES: tuple[State, ...] = get_args(State)
EVENTS: tuple[Event, ...] = get_args(Event)


def after(*events: Event) -> Lifecycle:
    life = Lifecycle()
    for event in events:
        life.on(event)
    return life


@pytest.mark.parametrize(
    ("events", "state", "should_return", "outcome"),
    [
        ([], "idle", False, "completed"),
        (["fit", "fit", "complete"], "completed", False, "completed"),
        (["complete"], "completed", False, "completed"),
        (["fit", "stop", "fit"], "stopped", True, "stopped"),
        (["fit", "pause", "stop"], "paused", True, "paused"),
        (["fit", "diverge", "interrupt"], "diverged", True, "diverged"),
        (["interrupt"], "interrupted", True, "interrupted"),
        (["fit", "end_fit", "complete"], "completed", False, "completed"),
        (["fit", "end_fit", "report", "stop"], "stopped", True, "stopped"),
        (["report", "fit", "report"], "reporting", False, "completed"),
        (["report", "reach_end", "report", "stop", "interrupt"], "trained_enough", True, "completed"),
        (["report", "reach_end", "complete"], "completed", False, "completed"),
        (["fit", "lose", "report"], "lost", False, "interrupted"),
    ],
)
def test_events_lead_to_a_state(events: list[Event], state: State, should_return: bool, outcome: LeaseOutcome) -> None:
    life = after(*events)
    assert (life.state, life.should_return, life.outcome) == (state, should_return, outcome)


@pytest.mark.parametrize(
    "events",
    [
        ["fit", "end_fit", "fit"],
        ["fit", "complete", "fit"],
        ["end_fit"],
        ["fit", "reach_end"],
        ["report", "stop", "complete"],
        ["complete", "complete"],
        ["lose", "complete"],
    ],
)
def test_an_illegal_event_raises_and_changes_nothing(events: list[Event]) -> None:
    life = after(*events[:-1])
    before = life.state
    with pytest.raises(IllegalTransition, match=f"a lease that is '{before}' can't '{events[-1]}'"):
        life.on(events[-1])
    assert life.state == before


def test_every_state_is_in_the_table_and_can_be_reached() -> None:
    assert set(TRANSITIONS) == set(STATES)
    reached = {"idle", *(state for row in TRANSITIONS.values() for state in row.values())}
    assert reached == set(STATES)
    assert {event for row in TRANSITIONS.values() for event in row} == set(EVENTS)


def test_a_lease_can_be_lost_in_every_state_and_never_comes_back() -> None:
    assert {row["lose"] for row in TRANSITIONS.values()} == {"lost"}
    assert set(TRANSITIONS["lost"].values()) == {"lost"}
