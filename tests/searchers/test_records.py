"""Events and actions survive JSON, strictly."""

from __future__ import annotations

import json
import math
import pickle

import pytest

from searchers import Create, Done, Exited, FieldError, Pause, Reported, Resume, SpaceError, Started, Stop
from searchers.events import Action, Event
from searchers.records import action_from_json, action_to_json, event_from_json, event_to_json, number_from_json

EVENTS: list[Event] = [
    Started(trial=0),
    Reported(trial=3, step=4, value=0.25),
    Reported(trial=3, step=4.5, value=None),
    Reported(trial=3, step=4, value=math.inf),
    Reported(trial=3, step=4, value=-math.inf),
    Exited(trial=7, reason="invalid_hp"),
]
ACTIONS: list[Action] = [Create(trial=1), Stop(trial=2), Pause(trial=3), Resume(trial=4), Done(reason="errored")]


@pytest.mark.parametrize("event", EVENTS, ids=str)
def test_event_survives_strict_json(event: Event) -> None:
    assert event_from_json(json.loads(json.dumps(event_to_json(event), allow_nan=False))) == event


def test_nan_survives_strict_json_and_whole_steps_stay_whole() -> None:
    event = event_from_json(json.loads(json.dumps(event_to_json(Reported(trial=0, step=1, value=math.nan)))))
    assert repr(event) == repr(Reported(trial=0, step=1, value=math.nan))


@pytest.mark.parametrize("action", ACTIONS, ids=str)
def test_action_survives_strict_json(action: Action) -> None:
    assert action_from_json(json.loads(json.dumps(action_to_json(action), allow_nan=False))) == action


@pytest.mark.parametrize(
    "record",
    [
        {"event": "began", "trial": 0},
        {"event": "started"},
        {"event": "started", "trial": "0"},
        {"event": "reported", "trial": 0},
        {"event": "reported", "trial": 0, "step": 1, "value": "much"},
        {"event": "exited", "trial": 0, "reason": "bored"},
    ],
    ids=str,
)
def test_records_that_are_not_events_are_refused(record: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        event_from_json(record)


@pytest.mark.parametrize(
    "record", [{"action": "go", "trial": 0}, {"action": "stop"}, {"action": "done", "reason": "x"}]
)
def test_records_that_are_not_actions_are_refused(record: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="not an action"):
        action_from_json(record)


def test_a_bool_is_not_a_number() -> None:
    with pytest.raises(ValueError, match="got True"):
        number_from_json(True)


def test_field_errors_survive_pickling() -> None:
    error = pickle.loads(pickle.dumps(SpaceError([("hyperparameters.lr", "is wrong"), ("b", "too")])))
    assert isinstance(error, FieldError)
    assert str(error) == "hyperparameters.lr: is wrong\nb: too"
