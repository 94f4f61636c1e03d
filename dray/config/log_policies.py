"""The section ``log_policies``: what to do about a line in a trial's log."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field

from dray.config.determined_fields import actions
from dray.config.section import Section
from searchers.errors import FieldError

_FIELDS = ("pattern", "action", "actions", "policy", "signal", "name")
_ACTIONS = ("cancel_retries", "exclude_node", "signal", "send_webhook")
_IN_PYTHON = {
    r"\z": r"\Z",
    "[:alnum:]": "0-9A-Za-z",
    "[:alpha:]": "A-Za-z",
    "[:blank:]": r"\t ",
    "[:digit:]": "0-9",
    "[:lower:]": "a-z",
    "[:punct:]": r"!-/:-@\[-`{-~",
    "[:space:]": r"\t\n\v\f\r ",
    "[:upper:]": "A-Z",
    "[:word:]": "0-9A-Za-z_",
    "[:xdigit:]": "0-9A-Fa-f",
}
_GO = re.compile(r"\\.|\[:[a-z]+:\]", re.DOTALL)
EXAMPLE_POLICY = "{pattern: CUDA out of memory, action: cancel_retries}"


def policies(raw: object) -> object:
    """The policies that have an effect here, which is not to start a trial again."""
    if not isinstance(raw, list):
        return raw
    kept = []
    unknown = [
        (f"log_policies[{number}].{name}", f"unknown field{_hint(name)}")
        for number, policy in enumerate(raw)
        if isinstance(policy, Mapping)
        for name in policy
        if name not in _FIELDS
    ]
    if unknown:
        raise FieldError(unknown)
    for number, policy in enumerate(raw):
        pattern = policy.get("pattern") if isinstance(policy, Mapping) else None
        is_named = isinstance(policy, Mapping) and isinstance(policy.get("name"), str)
        if not isinstance(policy, Mapping) or not (isinstance(pattern, str) or (pattern is None and is_named)):
            raise ValueError(f"number {number} must have a pattern; for example {EXAMPLE_POLICY}")
        if pattern is None:  # so a config disables one of the master's policies, by its name
            continue
        pattern = _in_python(pattern)
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(
                f"number {number}: pattern must be a regular expression, got {pattern!r}: {error}"
            ) from None
        asked = actions(policy)
        for action in asked:
            if action not in _ACTIONS:
                raise ValueError(f"number {number}: action must be one of {', '.join(_ACTIONS)}, got {action}")
        if not asked and not is_named:
            raise ValueError(f"number {number} must have an action; for example {EXAMPLE_POLICY}")
        if "cancel_retries" in asked:
            kept.append({"pattern": pattern, "action": "cancel_retries"})
    return kept


def _hint(name: object) -> str:
    near = difflib.get_close_matches(str(name), _FIELDS, n=1)
    return f"; did you mean {near[0]}?" if near else f"; known fields are {', '.join(_FIELDS)}"


def policies_schema() -> dict[str, Any]:
    """The JSON Schema of what ``policies`` takes, Determined's older forms included."""
    text = {"type": ["string", "null"]}
    action = {"anyOf": [text, {"type": "object"}]}
    fields: dict[str, Any] = {**dict.fromkeys(("pattern", "name", "signal"), text), "policy": action, "action": action}
    fields["actions"] = {"type": "array", "items": action}
    named = [{"required": ["pattern"]}, {"required": ["name"]}]
    items = {"type": "object", "properties": fields, "allOf": [{"anyOf": named}], "additionalProperties": False}
    return {"type": "array", "items": items}


def _in_python(pattern: str) -> str:
    """A pattern in Go's syntax, which is Determined's, in Python's: classes such as [:alpha:], and the end."""
    return _GO.sub(lambda found: _IN_PYTHON.get(found[0], found[0]), pattern)


class LogPolicy(Section):
    """What to do about a line in a trial's log."""

    place: ClassVar[str] = "log_policies"

    pattern: str = Field(
        description="a regular expression to find in the log of a trial that failed",
        examples=["CUDA out of memory"],
    )
    action: Literal["cancel_retries"] = Field(
        description="cancel_retries: the trial is not started again", examples=["cancel_retries"]
    )
