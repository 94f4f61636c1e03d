"""Records that are not actions are refused, and errors cross processes."""

from __future__ import annotations

import pickle

import pytest

from searchers import FieldError, SpaceError
from searchers.records import action_from_json


@pytest.mark.parametrize(
    "record", [{"action": "go", "trial": 0}, {"action": "stop"}, {"action": "done", "reason": "x"}]
)
def test_records_that_are_not_actions_are_refused(record: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="not an action"):
        action_from_json(record)


def test_field_errors_survive_pickling() -> None:
    error = pickle.loads(pickle.dumps(SpaceError([("hyperparameters.lr", "is wrong"), ("b", "too")])))
    assert isinstance(error, FieldError)
    assert str(error) == "hyperparameters.lr: is wrong\nb: too"
