"""Hyperparameters that are searched, but that no trial's code has read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from searchers.domains import Nested, searched


class UnreadHparams:
    """The searched hyperparameters that no trial has read so far, from the journal's records and from reports."""

    def __init__(self, records: Iterable[Mapping[str, Any]]) -> None:
        self._read: dict[str, None] = {"global_batch_size": None}  # the trainer reads it
        self._names: dict[str, None] = {}
        self._shown: list[str] = []
        for record in records:
            if record.get("event") == "unread":
                self._read |= dict.fromkeys(record["read"])
                self._names |= dict.fromkeys(record["unread"])
                self._shown = record["unread"]

    def add(self, space: Nested, hparams: Mapping[str, Any], read: Sequence[str]) -> dict[str, Any] | None:
        """The record of what is unread after this trial, which has read these; None if it is unchanged.

        A nested hyperparameter counts as read with the one that contains it.
        """
        self._read |= {name: None for name in read if name in hparams}
        self._names |= {name: None for name, _ in searched(space, hparams)}
        within = tuple(f"{name}." for name in self._read)
        unread = [name for name in self._names if name not in self._read and not name.startswith(within)]
        if unread == self._shown:
            return None
        self._shown = unread
        shown = [name for name in self._read if name in hparams and name != "global_batch_size"]
        return {"event": "unread", "unread": unread, "read": shown}
