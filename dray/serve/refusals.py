"""Why a server does not do what a client asks for."""

from __future__ import annotations

from dray.errors import NoExperiment


class Refused(ValueError):
    """The server refused a client's request; the message is one line."""


class NotSubmitted(NoExperiment):
    """The experiment of this name, the argument, was not submitted to the server."""

    def __str__(self) -> str:
        return f"{self.args[0]} was not submitted to the server"


class WrongState(ValueError):
    """The experiment's state does not allow this; the message is one line, and says what to do."""


def has_ended(name: str, state: str) -> WrongState:
    """Why an experiment can't be stopped, paused or killed."""
    verb = "resume" if state == "ERROR" else "extend"
    return WrongState(f"{name} has ended; to continue it: dray experiment {verb} {name}")


def is_running(name: str, state: str = "RUNNING") -> WrongState:
    """Why an experiment can't be extended or deleted."""
    return WrongState(f"{name} is {state}; stop it first: dray experiment stop {name}")


class OverQuota(WrongState):
    """There is no room in a token's quota; the message is one line."""
