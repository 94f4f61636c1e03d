"""Why a server does not do what a client asks for."""

from __future__ import annotations


class Refused(ValueError):
    """The server refused a client's request; the message is one line."""


class Invalid(ValueError):
    """A client's request is invalid, or can't be carried out; the message is one line."""


class NotSubmitted(LookupError):
    """No experiment of this name was submitted to the server; the message is one line."""


class WrongState(ValueError):
    """The experiment's state does not allow this; the message is one line, and says what to do."""


class OverQuota(WrongState):
    """There is no room in a token's quota; the message is one line."""
