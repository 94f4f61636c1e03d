"""The vocabulary of a search: events go into a method, actions come out; both are values and both are JSON.

A trial is known by its number: 0, 1, 2, ... in the order of creation.

    driver                      method
      │  start() ───────────────▶ │
      │ ◀──── Create(0) Create(1) │
      │  Started(0) ─────────────▶│        workers were found; its hyperparameters are drawn now
      │  Reported(0, step, value)▶│        a validation
      │ ◀─── Stop(0) Create(2)    │
      │  Exited(0, "stopped") ───▶│        exactly one end per trial; repeats are ignored
      │            ...            │
      │ ◀─────── Done("completed")│        once, when every created trial has ended
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Literal, NoReturn, get_args

Reason = Literal["completed", "stopped", "errored", "invalid_hp", "canceled"]
DoneReason = Literal["completed", "errored", "invalid_hp", "canceled"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """The trial has its workers. Comes again when a paused or restarted trial gets new ones."""

    trial: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Reported:
    """A validation of the trial.

    `step` is the length trained since the trial's beginning, in the unit of `max_length`. `value` is the searcher's
    metric: as measured where a driver tells `Search`; smaller-is-better and never NaN where `Search` tells a method.
    """

    trial: int
    step: float
    value: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Exited:
    """The trial has ended for good. "stopped": it obeyed a `Stop`; "completed": it ended by itself, at any length."""

    trial: int
    reason: Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Create:
    """Make this trial, and run it when there is room. Its hyperparameters are drawn when it starts."""

    trial: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """End this live trial, for good."""

    trial: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause:
    """Take the workers from this trial; its checkpoint stays."""

    trial: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """Give this paused trial workers again, from its latest checkpoint."""

    trial: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """The search is over: all trials have ended and no action follows.

    "invalid_hp": too many trials were invalid, and the search ended early. Otherwise "completed" if any trial completed
    or was stopped, "errored" if any errored, "canceled" if all were.
    """

    reason: DoneReason


Event = Started | Reported | Exited
Action = Create | Stop | Pause | Resume | Done

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
    """The event of a record that `event_to_json` made; keys of others (`actions`, `hparams`) are passed over.

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


def assert_never(value: NoReturn) -> NoReturn:
    """`typing.assert_never`, which Python 3.10 lacks."""
    raise AssertionError(f"unexpected {value!r}")
