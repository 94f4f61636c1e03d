"""The queue's answers: ``GET /queue``, and ``GET /queue/preview``, which says what a change would do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from aiohttp import web

from dray.errors import ConfigError
from dray.serve.answers import BadInput, number
from dray.serve.api import change_of
from dray.serve.auth import CALLER, refusal
from dray.serve.control import ACTIVE, Control, Share, Submitted
from dray.serve.foresight import in_order, moved, ties
from dray.serve.lanes import KEEP_S
from dray.serve.quota import check_priority
from dray.serve.tokens import Token

HOUR_S = 3600
FIELDS = ("priority", "weight", "max_slots")


def queue(control: Control, request: web.Request) -> dict[str, Any]:
    """See `dray.serve.control.QueueState`; ``refused``: for experiments that the caller's token may not change, the
    reason. ``seconds``: the time that the lanes show."""
    found, token = control.queue(number(request, "seconds", HOUR_S, most=int(KEEP_S))), request[CALLER]
    refused = {each.name: why for each in found.entries if (why := refusal(token, each.name, each.owner))}
    entries = [asdict(each) for each in found.entries]
    return {"entries": entries, "refused": refused, "next": found.next, "slots": found.slots, "lanes": found.lanes}


def preview(control: Control, request: web.Request) -> dict[str, Any]:
    """What a change would do: ``changes``, the fields to change by experiment; ``lines``, sentences; ``order``, the new
    order of the queue; ``refused``, the reason why the caller's token may not do it."""
    name, token = request.query.get("name", ""), request[CALLER]
    asked = control.experiment(name)
    queued = {each.name: each for each in control.experiments() if each.state in ACTIVE}
    changes, refused = _changes(request.query, asked, queued, token)
    known = {**queued, name: asked}
    shares = {each: replace(known[each].share, **change) for each, change in changes.items()}
    priorities = {each.name: shares.get(each.name, each.share).priority for each in queued.values()}
    order, lines = in_order(priorities), ["Nothing changes."]
    if shares:
        lines = control.foresee(shares) if name in queued else [f"It takes effect when {name} is queued again."]
    if "before" in request.query and (tie := ties(order, priorities, name)):
        lines.append(tie)
    refused = refused or next((why for each in changes if (why := _refusal(token, known[each], shares[each]))), "")
    return {"changes": changes, "lines": lines, "order": order, "refused": refused}


def _changes(
    query: Mapping[str, str], asked: Submitted, queued: Mapping[str, Submitted], token: Token
) -> tuple[dict[str, dict[str, Any]], str]:
    """The fields to change by experiment, and the reason why the token may not move the experiment."""
    if "before" not in query:
        given = change_of({field: _parsed(query[field]) for field in FIELDS if field in query})
        change = {field: value for field, value in given.items() if value != getattr(asked.share, field)}
        return {asked.name: change} if change else {}, ""
    name, before = asked.name, query["before"] or None
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


def _parsed(text: str) -> Any:
    """A value of the query: a number, or None for none."""
    if text in ("", "none"):
        return None
    try:
        return int(text) if text.lstrip("-").isdecimal() else float(text)
    except ValueError:
        return text
