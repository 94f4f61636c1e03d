"""The queue's answers: ``GET /queue``, and ``GET /queue/preview``, which says what a change would do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from typing_extensions import TypedDict

from dray.errors import ConfigError
from dray.serve.answers import BadInput
from dray.serve.auth import refusal
from dray.serve.control import ACTIVE, Control, QueueState, Share, Submitted
from dray.serve.foresight import in_order, moved, ties
from dray.serve.given import PreviewQuery, QueueQuery
from dray.serve.quota import check_priority
from dray.serve.tokens import Token
from dray.text import fields_of

FIELDS = ("priority", "weight", "max_slots")


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueAnswer(QueueState):
    """The queue, and what the cluster's slots did.

    Attributes:
        refused: why the token may not change an experiment, by name; without those that it may.
    """

    refused: Mapping[str, str]


class Preview(TypedDict):
    changes: dict[
        str, dict[str, Any]
    ]  # what to change, by experiment; moving one may need to change the priorities of others
    lines: list[str]  # what happens then
    order: list[str]  # the queue then
    refused: str  # the reason why the token may not do it; empty: it may


def queue(control: Control, query: QueueQuery, token: Token) -> QueueAnswer:
    found = control.queue(query.seconds)
    refused = {each.name: why for each in found.entries if (why := refusal(token, each.name, each.owner))}
    return QueueAnswer(**fields_of(found), refused=refused)


def preview(control: Control, query: PreviewQuery, token: Token) -> Preview:
    name = query.name
    asked = control.experiment(name)
    queued = {each.name: each for each in control.experiments() if each.state in ACTIVE}
    changes, refused = _changes(query, asked, queued, token)
    known = {**queued, name: asked}
    shares = {each: replace(known[each].share, **change) for each, change in changes.items()}
    priorities = {each.name: shares.get(each.name, each.share).priority for each in queued.values()}
    order, lines = in_order(priorities), ["Nothing changes."]
    if shares:
        lines = control.foresee(shares) if name in queued else [f"It takes effect when {name} is queued again."]
    if query.before is not None and (tie := ties(order, priorities, name)):
        lines.append(tie)
    refused = refused or next((why for each in changes if (why := _refusal(token, known[each], shares[each]))), "")
    return {"changes": changes, "lines": lines, "order": order, "refused": refused}


def _changes(
    query: PreviewQuery, asked: Submitted, queued: Mapping[str, Submitted], token: Token
) -> tuple[dict[str, dict[str, Any]], str]:
    """The fields to change by experiment, and the reason why the token may not move the experiment."""
    if query.before is None:
        given = {field: getattr(query, field) for field in FIELDS if field in query.model_fields_set}
        change = {field: value for field, value in given.items() if value != getattr(asked.share, field)}
        return {asked.name: change} if change else {}, ""
    name, before = asked.name, query.before or None
    if name not in queued or before == name or (before is not None and before not in queued):
        raise BadInput(
            f"{name[:100]} can't be moved before {before!r:.100}: give two that run or wait, or nothing: the end"
        )
    priorities = {each.name: each.share.priority for each in queued.values()}
    found = moved(priorities, name, before, lambda each, priority: not _refusal(token, queued[each], priority))
    why = ""
    if found is None:
        found = moved(priorities, name, before) or {}
        why = "" if found else "there is no priority left between its neighbours; change theirs"
    return {each: {"priority": priority} for each, priority in found.items()}, why


def _refusal(token: Token, submitted: Submitted, new: Share | int) -> str:
    """The reason why a token may not give an experiment a share, or a priority."""
    priority = new if isinstance(new, int) else new.priority
    if why := refusal(token, submitted.name, submitted.owner):
        return why
    try:
        if priority != submitted.share.priority:
            check_priority(token.owner, token.quota, priority)
    except ConfigError as error:
        return "; ".join(what for _, what in error.faults)
    return ""
