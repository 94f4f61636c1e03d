"""The section ``log_policies``: reactions to a line in a trial's log."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field, ValidationInfo

from dray.config.determined_fields import IGNORED_FIELDS
from dray.config.section import Section
from searchers.errors import FieldError, did_you_mean

_FIELDS = ("pattern", "action", "actions", "policy", "signal", "name")
_ACTIONS = ("cancel_retries", "exclude_node", "signal", "send_webhook")
#: Names of actions in the first version.
_OLDER_ACTIONS = {"on_failure_dont_retry": "cancel_retries", "on_failure_exclude_node": "exclude_node"}
EXAMPLE_POLICY = "{pattern: CUDA out of memory, action: cancel_retries}"


class LogPolicy(Section):
    """A reaction to a line in a trial's log."""

    place: ClassVar[str] = "log_policies[]"

    pattern: str = Field(
        description="a regular expression to find in the log of a trial that failed", examples=["CUDA out of memory"]
    )
    action: Literal["cancel_retries"] = Field(
        description="cancel_retries: the trial is not restarted", examples=["cancel_retries"]
    )


def policies(raw: object, info: ValidationInfo) -> object:
    """The policies that cancel retries. Other actions have no effect, and are noted as ignored."""
    if not isinstance(raw, list):
        return raw
    kept: list[dict[str, str]] = []
    faults: list[tuple[str, str]] = []
    for number, policy in enumerate(raw):
        try:
            asked = _checked_actions(policy)
        except ValueError as error:
            faults.append((f"log_policies[{number}]", str(error)))
            continue
        for action in asked:
            if action == "cancel_retries":
                kept.append({"pattern": policy["pattern"], "action": action})
            elif info.context is not None:
                info.context.ignored[f"log_policies.{action}"] = IGNORED_FIELDS[f"log_policies.{action}"]
    if faults:
        raise FieldError(faults)
    return kept


def _checked_actions(policy: object) -> list[str]:
    """The actions of a policy; [] if the config only disables the policy of this name."""
    if not isinstance(policy, Mapping):
        raise ValueError(f"must be a mapping, got {policy!r:.60}; for example {EXAMPLE_POLICY}")
    for field in policy:
        if field not in _FIELDS:
            hint = did_you_mean(field, _FIELDS, f"; known fields are {', '.join(_FIELDS)}")
            raise ValueError(f"unknown field {field}{hint}")
    pattern, name = policy.get("pattern"), policy.get("name")
    if not isinstance(name if pattern is None else pattern, str):
        raise ValueError(f"must have a pattern; for example {EXAMPLE_POLICY}")
    if pattern is None:
        return []
    if re.search(r"\[:\w+:\]", pattern):
        raise ValueError(f"pattern must be in Python's syntax, which has no [:alpha:], got {pattern!r}; write A-Za-z")
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"pattern must be a regular expression, got {pattern!r}: {error}") from None
    found = actions(policy)
    for action in found:
        if action not in _ACTIONS:
            raise ValueError(f"action must be one of {', '.join(_ACTIONS)}, got {action}")
    if not found and name is None:
        raise ValueError(f"must have an action; for example {EXAMPLE_POLICY}")
    return found or ["signal"]  # Determined shows the name like a signal


def actions(policy: Mapping[str, Any]) -> list[str]:
    """The actions of a policy, in the form of any version of Determined.

    >>> actions({"pattern": "ECC", "action": {"type": "exclude_node"}, "signal": "bad memory"})
    ['exclude_node', 'signal']
    """
    several = policy.get("actions") or []
    found = []
    for each in (policy.get("action"), policy.get("policy"), *(several if isinstance(several, list) else [several])):
        action = each.get("type", "signal" if each.get("signal") else None) if isinstance(each, Mapping) else each
        if action is not None:
            found.append(_OLDER_ACTIONS.get(str(action), str(action)))
    return found + (["signal"] if policy.get("signal") is not None else [])


def policies_schema() -> dict[str, Any]:
    text = {"type": ["string", "null"]}
    action = {"anyOf": [text, {"type": "object"}]}
    fields: dict[str, Any] = {**dict.fromkeys(("pattern", "name", "signal"), text), "policy": action, "action": action}
    fields["actions"] = {"type": "array", "items": action}
    named = [{"required": ["pattern"]}, {"required": ["name"]}]
    items = {"type": "object", "properties": fields, "allOf": [{"anyOf": named}], "additionalProperties": False}
    return {"type": "array", "items": items}
