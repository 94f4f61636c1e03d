"""The section ``log_policies``: what to do about a line in a trial's log."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Literal

from pydantic import Field

from dray.experiment.determined_fields import actions
from dray.experiment.schema.section import Section

_ACTIONS = ("cancel_retries", "exclude_node", "signal", "send_webhook")
_OF_A_POLICY = ("pattern", "action", "actions", "policy", "signal", "name")
EXAMPLE_POLICY = "{pattern: CUDA out of memory, action: cancel_retries}"


def policies(raw: object) -> object:
    """The policies that have an effect here, which is not to start a trial again."""
    if not isinstance(raw, list):
        return raw
    kept = []
    for number, policy in enumerate(raw):
        pattern = policy.get("pattern") if isinstance(policy, Mapping) else None
        is_named = isinstance(policy, Mapping) and isinstance(policy.get("name"), str)
        if not isinstance(policy, Mapping) or not (isinstance(pattern, str) or (pattern is None and is_named)):
            raise ValueError(f"number {number} must have a pattern; for example {EXAMPLE_POLICY}")
        for field in policy:
            if field not in _OF_A_POLICY:
                near = difflib.get_close_matches(str(field), _OF_A_POLICY, n=1)
                hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(_OF_A_POLICY)}"
                raise ValueError(f"number {number} has an unknown field {field}; {hint}")
        if pattern is None:  # so a config disables one of the master's policies, by its name
            continue
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"number {number}: {pattern!r} is no regular expression of Python's: {error}") from None
        asked = actions(policy)
        for action in asked:
            if action not in _ACTIONS:
                raise ValueError(f"number {number}: action must be one of {', '.join(_ACTIONS)}, got {action!r}")
        if not asked and not is_named:
            raise ValueError(f"number {number} says nothing of what to do; for example {EXAMPLE_POLICY}")
        if "cancel_retries" in asked:
            kept.append({"pattern": pattern, "action": "cancel_retries"})
    return kept


class LogPolicy(Section):
    """What to do about a line in a trial's log."""

    pattern: str = Field(
        description="a regular expression, found in a line of what a trial that failed has printed",
        examples=["CUDA out of memory"],
    )
    action: Literal["cancel_retries"] = Field(
        description="cancel_retries: the trial is not started again", examples=["cancel_retries"]
    )
