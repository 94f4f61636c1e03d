"""Helpers of these tests: short names for events, a scripted method, and comparable states."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Set
from typing import Any

import pytest
from optuna.trial import FrozenTrial

from searchers import Create, Event, Exited, Reported, Resume, Search, Space, Started, parse_space
from searchers.events import Action, Reason

needs_constraints = pytest.mark.skipif(not hasattr(FrozenTrial, "constraints"), reason="needs Optuna 5")

LINE = parse_space({"x": {"type": "double", "minval": 0, "maxval": 1}})


def new_search(method: Any, space: Space = LINE, log: Any = None, **fields: Any) -> Search:
    """Create a search, by default with seed 7 and smaller values better; `log` is a function or a list."""
    write = log if callable(log) else (lambda record: None) if log is None else log.append
    return Search(method, space, **{"seed": 7, "smaller_is_better": True, "log": write, **fields})


def report(subject: Any, trial: int, step: float, value: float | None) -> list[Action]:
    actions: list[Action] = subject.on(Reported(trial=trial, step=step, value=value))
    return actions


def leave(subject: Any, trial: int, reason: Reason = "completed") -> list[Action]:
    actions: list[Action] = subject.on(Exited(trial=trial, reason=reason))
    return actions


def tell(sampler: Any, trial: int, x: float, *reports: tuple[float, float], reason: str | None = None) -> None:
    sampler.tell(Started(trial=trial), {"x": x})
    for step, value in reports:
        sampler.tell(Reported(trial=trial, step=step, value=value), {"x": x})
    if reason is not None:
        sampler.tell(Exited(trial=trial, reason=reason), {"x": x})  # type: ignore[arg-type]


def creates(*trials: int) -> list[Action]:
    return [Create(trial=trial) for trial in trials]


def to_run(actions: list[Action]) -> list[int]:
    """Return the trials that are created or resumed."""
    return [action.trial for action in actions if isinstance(action, Create | Resume)]


def ranked(method: Any) -> list[list[tuple[int, float]]]:
    """Return (trial, value) pairs by rung."""
    return [sorted(values.items()) for values in method.ranked]


class Scripted:
    """A method with given actions for given events, and no actions for others."""

    rungs: tuple[float, ...] = (1, 4)

    def __init__(self, trials: int, answers: Mapping[Event, list[Action]]) -> None:
        self._trials, self._answers = trials, dict(answers)

    def start(self) -> list[Action]:
        return creates(*range(self._trials))

    def on(self, event: Event) -> list[Action]:
        return self._answers.pop(event, [])

    def progress(self, trained: Mapping[int, float]) -> float:
        return 0.0

    def extend(self, *, max_trials: int | None = None, max_length: int | None = None) -> list[Action]:
        return []


def state(subject: object) -> str:
    """What `copy` and `pickle` would take of an object, with sets and mappings sorted. Equal events must give equal
    text."""
    match subject:
        case None | bool() | int() | float() | str():
            return repr(subject)
        case type():
            return subject.__name__
        case list() | tuple() | deque():
            return f"[{', '.join(map(state, subject))}]"
        case Set():
            return f"{{{', '.join(sorted(map(state, subject)))}}}"
        case Mapping():
            return f"{{{', '.join(sorted(f'{state(key)}: {state(value)}' for key, value in subject.items()))}}}"
    found = subject.__reduce_ex__(2)
    assert isinstance(found, tuple)
    return f"{type(subject).__name__}{state(found[1:])}"
