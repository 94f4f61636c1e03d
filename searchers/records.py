"""Events, actions and hyperparameters as strict JSON, for the records of a journal: NaN and infinities are strings."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields
from typing import get_args

from searchers.events import (
    Action,
    Create,
    Done,
    DoneReason,
    Event,
    Exited,
    Pause,
    Reason,
    Reported,
    Resume,
    Started,
    Stop,
)

_EVENTS: dict[str, type[Event]] = {"started": Started, "reported": Reported, "exited": Exited}
_ACTIONS: dict[str, type[Action]] = {"create": Create, "stop": Stop, "pause": Pause, "resume": Resume, "done": Done}
_NAMES: dict[type[Event] | type[Action], str] = {cls: name for name, cls in (*_EVENTS.items(), *_ACTIONS.items())}
EVENT_KINDS = frozenset(_EVENTS)


def event_to_json(event: Event) -> dict[str, object]:
    """`{"event": "reported", "trial": 3, "step": 4, "value": 0.31}`, strict JSON: NaN and infinities are strings.

    >>> event_to_json(Reported(trial=3, step=4, value=float("nan")))
    {'event': 'reported', 'trial': 3, 'step': 4, 'value': 'nan'}
    """
    return {"event": _NAMES[type(event)]} | {f.name: number_to_json(getattr(event, f.name)) for f in fields(event)}


def event_from_json(record: Mapping[str, object]) -> Event:
    """The event of a record that `event_to_json` made; other keys (`actions`, `hparams`) are ignored.

    Raises:
        ValueError: The record is not of a known event, or lacks a field, or a field has the wrong type.
    """
    match record.get("event"), record.get("trial"):
        case "started", int(trial):
            return Started(trial=trial)
        case "reported", int(trial):
            step, value = number_from_json(record.get("step")), number_from_json(record.get("value"))
            if step is not None:
                return Reported(trial=trial, step=step, value=value)
        case "exited", int(trial):
            for reason in get_args(Reason):
                if record.get("reason") == reason:
                    return Exited(trial=trial, reason=reason)
    raise ValueError(f"not an event of a search: {dict(record)}")


def action_to_json(action: Action) -> dict[str, object]:
    """`{"action": "stop", "trial": 7}`."""
    return {"action": _NAMES[type(action)]} | {f.name: getattr(action, f.name) for f in fields(action)}


def action_from_json(record: Mapping[str, object]) -> Action:
    """The action of a record that `action_to_json` made.

    Raises:
        ValueError: The record is not of a known action.
    """
    match dict(record):
        case {"action": "done", "reason": reason}:
            for known in get_args(DoneReason):
                if reason == known:
                    return Done(reason=known)
        case {"action": "create", "trial": int(trial)}:
            return Create(trial=trial)
        case {"action": "stop", "trial": int(trial)}:
            return Stop(trial=trial)
        case {"action": "pause", "trial": int(trial)}:
            return Pause(trial=trial)
        case {"action": "resume", "trial": int(trial)}:
            return Resume(trial=trial)
    raise ValueError(f"not an action of a search: {dict(record)}")


def number_to_json(value: object) -> object:
    """A non-finite float as "nan", "inf" or "-inf"; anything else as it is."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def number_from_json(value: object) -> float | None:
    """The inverse of `number_to_json`, for a number or None.

    Raises:
        ValueError: It is neither.
    """
    if value is None or (isinstance(value, int | float) and not isinstance(value, bool)):
        return value
    if value in ("nan", "inf", "-inf"):
        return float(str(value))
    raise ValueError(f'must be a number, null, "nan", "inf" or "-inf", got {value!r}')


def hparams_to_json(value: object) -> object:
    """Hyperparameters as strict JSON: a float that is not finite becomes {"$float": "inf"}."""
    match value:
        case dict():
            return {name: hparams_to_json(item) for name, item in value.items()}
        case list():
            return [hparams_to_json(item) for item in value]
        case float() if not math.isfinite(value):
            return {"$float": number_to_json(value)}
    return value


def hparams_from_json(value: object) -> object:
    """The inverse of `hparams_to_json`."""
    match value:
        case {"$float": number, **others} if not others:
            return number_from_json(number)
        case dict():
            return {name: hparams_from_json(item) for name, item in value.items()}
        case list():
            return [hparams_from_json(item) for item in value]
    return value
