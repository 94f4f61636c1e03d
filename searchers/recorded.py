"""A method that repeats the decisions in a journal, for a search that is only looked at."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from searchers.events import Action, Event
from searchers.records import action_from_json


class RecordedMethod:
    """Returns the actions of these records, one record per call.

    Args:
        records: One for each call.
    """

    rungs = ()

    def __init__(self, records: Iterable[Mapping[str, object]]) -> None:
        self._actions = map(_actions_of, records)

    def start(self) -> list[Action]:
        return next(self._actions)

    def on(self, event: Event) -> list[Action]:
        return next(self._actions)

    def progress(self, trained: Mapping[int, float]) -> float:
        raise NotImplementedError("this search is read-only")

    def extend(self, *, max_trials: int | None = None, max_length: int | None = None) -> list[Action]:
        return next(self._actions)


def _actions_of(record: Mapping[str, object]) -> list[Action]:
    actions = record.get("actions")
    if not isinstance(actions, list) or not all(isinstance(action, Mapping) for action in actions):
        raise ValueError(f"actions must be a list of mappings, got {actions!r}")
    return [action_from_json(action) for action in actions]
