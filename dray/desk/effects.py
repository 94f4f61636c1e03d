"""What follows from an event, as values: the shell around what decides carries them out, in order."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

from dray.desk.messages import ClientLeft, Message


@dataclass(frozen=True, slots=True)
class Reply:
    """Answer a call; None is what was not called from elsewhere."""

    call: Hashable
    value: Any

    def send(self) -> None:
        """Do it: of a `dray.desk.connection.Call`."""
        if self.call is not None:
            self.call.answer(self.value)  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True)
class Tell:
    """Pass a message to a client of the desk."""

    client: str
    message: Message


@dataclass(frozen=True, slots=True)
class After:
    """Call this method of the desk in so many seconds."""

    seconds: float
    method: str
    args: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Say:
    """Print a line for the user: an effect of all that decides but the desk."""

    line: str


Effect = Reply | Tell | After | ClientLeft
