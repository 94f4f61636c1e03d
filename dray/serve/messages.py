"""What the server and its clients exchange, as JSON: the values of `dray.serve.control`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from dray.serve.control import Share, Status, Submitted

API = "/api/v1"
"""Where the API is. Fields are only added to it; what changes otherwise gets another number."""


class Refused(ValueError):
    """The server refused a client's request; the message is one line."""


def to_json(value: Submitted | Status) -> dict[str, Any]:
    """A submitted experiment, or the server's state, as JSON: its fields."""
    fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Status):
        return {**fields, "experiments": dict(value.experiments)}
    return {**fields, "share": dataclasses.asdict(value.share), "tags": list(value.tags)}


def submitted_from(value: Mapping[str, Any]) -> Submitted:
    """The reverse of `to_json`; fields of newer servers are ignored."""
    known = _known(Submitted, value)
    share = Share(**_known(Share, value["share"]))
    return Submitted(**{**known, "share": share, "tags": tuple(value.get("tags", ()))})


def status_from(value: Mapping[str, Any]) -> Status:
    """The reverse of `to_json`; fields of newer servers are ignored."""
    return Status(**_known(Status, value))


def _known(kind: type[Any], value: Mapping[str, Any]) -> dict[str, Any]:
    return {field.name: value[field.name] for field in dataclasses.fields(kind) if field.name in value}
