"""Effects of decisions, as values that the shell around the pure objects carries out, in order."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

from dray.leases.messages import ClientLeft, Message


@dataclass(frozen=True, slots=True)
class Reply:
    """Answer a call; None stands for an internal call."""

    call: Hashable
    value: Any

    def send(self) -> None:
        """Send the answer; `call` must be a `dray.rpc.connection.Call` or None."""
        if self.call is not None:
            self.call.answer(self.value)  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True)
class Tell:
    """Pass a message to a client of the desk."""

    client: str
    message: Message


@dataclass(frozen=True, slots=True)
class After:
    """Call a method of the desk after a delay."""

    seconds: float
    method: str
    args: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Say:
    """Print a line for the user. The desk itself does not emit this."""

    line: str


Effect = Reply | Tell | After | ClientLeft
