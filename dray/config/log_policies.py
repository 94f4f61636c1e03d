"""The section ``log_policies``: reactions to a line in a trial's log."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, ConfigDict, Field, ValidationInfo

from dray.config.determined_fields import IGNORED_FIELDS
from dray.config.section import Section
from searchers.errors import FieldError

_ACTIONS = ("cancel_retries", "exclude_node", "signal", "send_webhook")
#: Names of actions in the first version.
_OLDER_ACTIONS = {"on_failure_dont_retry": "cancel_retries", "on_failure_exclude_node": "exclude_node"}
EXAMPLE_POLICY = "{pattern: CUDA out of memory, action: cancel_retries}"


def _regular(pattern: str) -> str:
    if re.search(r"\[:\w+:\]", pattern):
        raise ValueError(f"must be in Python's syntax, which has no [:alpha:], got {pattern!r}; write A-Za-z")
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"must be a regular expression, got {pattern!r}: {error}") from None
    return pattern


class LogPolicy(Section):
    """A reaction to a line in a trial's log, in the form of any version of Determined."""

    model_config = ConfigDict(json_schema_extra={"anyOf": [{"required": ["pattern"]}, {"required": ["name"]}]})
    place: ClassVar[str] = "log_policies[]"

    pattern: Annotated[str, AfterValidator(_regular)] = Field(
        default="",
        description="a regular expression to find in the log of a trial that failed",
        examples=["CUDA out of memory"],
    )
    action: Any = Field(
        default=None, description="cancel_retries: the trial is not restarted", examples=["cancel_retries"]
    )
    actions: Any = Field(default=None, description="several actions", examples=[["cancel_retries"]])
    policy: Any = Field(default=None, description="older name of action", examples=[{"type": "on_failure_dont_retry"}])
    signal: str | None = Field(default=None, description="a text for Determined's web UI", examples=["out of memory"])
    name: str | None = Field(default=None, description="a name for Determined's web UI", examples=["OOM"])

    def asked(self) -> list[str]:
        """The actions.

        >>> LogPolicy(pattern="ECC", action={"type": "exclude_node"}, signal="bad memory").asked()
        ['exclude_node', 'signal']
        """
        several = self.actions or []
        found = []
        for each in (self.action, self.policy, *(several if isinstance(several, list) else [several])):
            kind = each.get("type", "signal" if each.get("signal") else None) if isinstance(each, Mapping) else each
            if kind is not None:
                found.append(_OLDER_ACTIONS.get(str(kind), str(kind)))
        # Without a pattern, the config only disables the policy of this name; Determined shows a name like a signal.
        found += ["signal"] if self.signal is not None else []
        return (found or (["signal"] if self.name is not None else [])) if self.pattern else []


def policies(given: list[LogPolicy], info: ValidationInfo) -> list[LogPolicy]:
    """The policies that cancel retries. Other actions have no effect, and are noted as ignored."""
    kept: list[LogPolicy] = []
    faults: list[tuple[str, str]] = []
    for number, policy in enumerate(given):
        asked, what = policy.asked(), ""
        if not policy.pattern and policy.name is None:
            what = f"must have a pattern; for example {EXAMPLE_POLICY}"
        elif policy.pattern and not asked:
            what = f"must have an action; for example {EXAMPLE_POLICY}"
        elif unknown := [action for action in asked if action not in _ACTIONS]:
            what = f"action must be one of {', '.join(_ACTIONS)}, got {unknown[0]}"
        if what:
            faults.append((f"log_policies[{number}]", what))
        for action in () if what else asked:
            if action == "cancel_retries":
                kept.append(LogPolicy(pattern=policy.pattern, action=action))
            elif info.context is not None:
                info.context.ignored[f"log_policies.{action}"] = IGNORED_FIELDS[f"log_policies.{action}"]
    if faults:
        raise FieldError(faults)
    return kept
