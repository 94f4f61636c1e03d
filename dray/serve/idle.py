"""Decides when to tell that slots of a server stand idle. Pure: the caller has the clock."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

from dray.text import counted, duration, some

_What: TypeAlias = Literal["idle", "waits"]
_NAMED = 3


class IdleSlots:
    """Slots that no trial uses, at least one at all times for `limit_s` seconds, are told of once until all are in use
    again; and once more if for so long something waits that could use them."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._since: dict[_What, float] = {}
        self._told: set[_What] = set()

    def look(self, now: float, slots: float, free: float, kind: str, waiting: Sequence[str]) -> str:
        """The alert that is due, in words; or "".

        Args:
            now: time in seconds.
            slots: the slots of the cluster's nodes, of which `free` have no trial.
            kind: "gpu" or "cpu".
            waiting: the experiments that wait for slots.
        """
        now_true: list[_What] = [] if free < 1 else ["idle", "waits"] if waiting else ["idle"]
        self._since = {what: self._since.get(what, now) for what in now_true}
        self._told &= self._since.keys()
        due = {what for what, since in self._since.items() if now - since >= self._limit_s} - self._told
        if not due:
            return ""
        self._told |= self._since.keys()  # the text says what waits, however long
        idle_s = now - self._since["waits" if "waits" in due else "idle"]
        waits = (
            f"while {some(waiting, _NAMED)} {'wait' if len(waiting) > 1 else 'waits'}"
            if waiting
            else "and nothing waits"
        )
        return f"{free:g} of {counted(slots, kind.upper(), 'g')} idle for {duration(idle_s)}, {waits}"
