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
from dray.serve.control import Control, NotSubmitted, Share, Submitted
from dray.serve.foresight import in_order, moved, ties
from dray.serve.lanes import KEEP_S
from dray.serve.quota import check_priority
from dray.serve.tokens import Token

HOUR_S = 3600


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
    entries = {each.name: each for each in control.queue(0).entries if each.state != "PAUSED"}
    submitted = {each.name: each for each in control.experiments() if each.name in entries}
    if name not in submitted:
        raise NotSubmitted(f"{name[:100]!r} is not in the queue")
    changes, refused = _changes(request.query, name, submitted, token)
    shares = {each: replace(submitted[each].share, **change) for each, change in changes.items()}
    priorities = {each.name: shares.get(each.name, each.share).priority for each in submitted.values()}
    order = in_order(priorities)
    lines = control.foresee(shares) if shares else ["Nothing changes."]
    tie = ties(order, priorities, name) if "before" in request.query else ""
    refused = refused or next((why for each in changes if (why := _refusal(token, submitted[each], shares[each]))), "")
    return {"changes": changes, "lines": [*lines, *([tie] if tie else [])], "order": order, "refused": refused}


def _changes(
    query: Mapping[str, str], name: str, submitted: Mapping[str, Submitted], token: Token
) -> tuple[dict[str, dict[str, Any]], str]:
    """The fields to change by experiment, and the reason why the token may not move the experiment."""
    if "before" not in query:
        given = {field: _parsed(query[field]) for field in ("priority", "weight", "max_slots") if field in query}
        change = {
            field: value for field, value in change_of(given).items() if value != getattr(submitted[name].share, field)
        }
        return {name: change} if change else {}, ""
    before = query["before"] or None
    if before is not None and (before == name or before not in submitted):
        raise BadInput(f"before={before[:100]}: give another experiment of the queue, or nothing for its end")
    priorities = {each.name: each.share.priority for each in submitted.values()}
    found = moved(priorities, name, before, lambda each, priority: not _refusal(token, submitted[each], priority))
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
