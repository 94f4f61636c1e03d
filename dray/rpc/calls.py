"""Calls of other processes, as the pure objects see them; `dray.rpc.connection` has the real ones."""

from __future__ import annotations

from typing import Any, Protocol


class PeerUnreachable(ConnectionError):
    """No connection to the other process is possible: it has ended, or its machine can't be reached."""


class Session(Protocol):
    """A client, with or without a connection."""

    def push(self, value: Any) -> None:
        """Send a value without a call."""

    def end(self) -> None:
        """Tell the client that the session is over. Idempotent."""


class Call(Protocol):
    """A client's call. Answer it once, at once or later."""

    @property
    def method(self) -> str: ...

    @property
    def args(self) -> tuple[Any, ...]: ...

    @property
    def session(self) -> Session: ...

    def answer(self, value: Any = None) -> None:
        """Send the answer, if the client waits for one."""

    def fail(self, error: str) -> None:
        """Let the call raise an error in the client, if the client waits for an answer."""
