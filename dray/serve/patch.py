"""What a ``PATCH`` of an experiment may change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dray.serve.answers import BadInput

MAX_TAGS, MAX_TAG, MAX_NOTES = 50, 100, 100_000
"""Most tags, and most characters of a tag and of the notes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What is given; None: it stays.

    Attributes:
        share: fields of `dray.serve.control.Share`.
        tags, notes: as of `dray.serve.control.Submitted`.
    """

    share: Mapping[str, Any]
    tags: tuple[str, ...] | None
    notes: str | None


def parsed(body: Mapping[str, Any]) -> Change:
    """The change that a request's body asks for.

    Raises:
        BadInput: it is none.
    """
    known = ("priority", "weight", "max_slots", "tags", "notes")
    if unknown := [name for name in body if name not in known]:
        raise BadInput(f"{unknown[0][:40]} can't be changed; only {', '.join(known)} can")
    share: dict[str, Any] = {}
    if "priority" in body:
        share["priority"] = whole(body, "priority", most=99)
    if "weight" in body:
        share["weight"] = _weight(body["weight"])
    if "max_slots" in body:
        share["max_slots"] = None if body["max_slots"] is None else whole(body, "max_slots")
    tags, notes = body.get("tags"), body.get("notes")
    if tags is not None:
        good = isinstance(tags, list) and all(isinstance(tag, str) and 0 < len(tag) <= MAX_TAG for tag in tags)
        if not good or len(tags) > MAX_TAGS:
            raise BadInput(f"tags must be a list of at most {MAX_TAGS} texts, each of 1 to {MAX_TAG} characters")
        tags = tuple(dict.fromkeys(tags))
    if notes is not None and (not isinstance(notes, str) or len(notes) > MAX_NOTES):
        raise BadInput(f"notes must be text of at most {MAX_NOTES:,} characters")
    return Change(share=share, tags=tags, notes=notes)


def whole(body: Mapping[str, Any], name: str, *, most: int = 1_000_000_000) -> int | None:
    """A field that is an integer from 1; None if it is not given.

    Raises:
        BadInput: it is something else.
    """
    if name not in body:
        return None
    value = body[name]
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        limits = f"from 1 to {most}" if most < 1000 else "from 1"
        raise BadInput(f"{name} must be an integer {limits}, got {value!r:.40}")
    return value


def _weight(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1_000_000:
        raise BadInput(f"weight must be a number > 0, at most 1000000, got {value!r:.40}")
    return float(value)
