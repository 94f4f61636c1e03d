"""What may happen to a worker group in each of its states."""

from __future__ import annotations

from itertools import product
from typing import get_args

import pytest

from dray.groups.pool import TRANSITIONS, GroupEvent, GroupState, Member
from tests.groups.clusters import cpus


@pytest.mark.parametrize(("state", "event"), [*product(get_args(GroupState), get_args(GroupEvent))])
def test_a_groups_events_change_its_state_as_the_table_says(state: GroupState, event: GroupEvent) -> None:
    member = Member(name="group-0", start=1, slots=cpus(), since=0.0, state=state)
    if (after := TRANSITIONS[state].get(event)) is not None:
        member.on(event)
        assert member.state == after
    else:
        with pytest.raises(AssertionError, match=f"group-0, start 1, is {state}: no '{event}' now"):
            member.on(event)
        assert member.state == state


def test_a_group_can_end_in_each_state_and_then_nothing_happens_to_it() -> None:
    assert {state for state, events in TRANSITIONS.items() if events.get("end") == "ended"} == {
        *get_args(GroupState)
    } - {"ended"}
    assert TRANSITIONS["ended"] == {}
