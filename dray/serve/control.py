"""What a server does with its experiments: the verbs and states behind its HTTP API, the command and the page."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, NoReturn, Protocol

from dray._version import __version__
from dray.config import defaults

API = "/api/v1"
"""Where the HTTP API is. Fields are only added to it; what changes otherwise gets another number."""

ExperimentState = Literal[
    "QUEUED", "RUNNING", "PREEMPTED", "RESTARTING", "STOPPING", "PAUSED", "STOPPED", "COMPLETED", "ERROR"
]
"""QUEUED: it waits for its first slots. PREEMPTED: others have its slots; it continues when there are some.
RESTARTING: its process has died, and it is started again. STOPPING: its trials save before it pauses or stops. PAUSED,
STOPPED: until it is activated, also when the server restarts. COMPLETED, ERROR: its search has ended, as in
`dray.records.overview`."""


ACTIVE: tuple[ExperimentState, ...] = ("QUEUED", "RUNNING", "PREEMPTED", "RESTARTING", "STOPPING")
"""States in which more events may come."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What slots an experiment gets; in its config, ``resources``."""

    priority: int = defaults.PRIORITY  # 1 to 99; smaller numbers go first, as in Determined
    weight: float = 1.0  # of its share among those of the same priority; > 0
    max_slots: int | None = None  # the most that it may have; None: no limit


@dataclass(frozen=True, slots=True, kw_only=True)
class Submitted:
    """An experiment that was submitted to the server."""

    name: str  # of its directory in the results directory; unique
    state: ExperimentState
    submitted: float  # Unix time in s
    share: Share  # what slots it gets
    slots: float = 0  # that its trials have now; of shared slots, fractions
    waiting: int = 0  # trials that could run if there were slots
    restarts: int = 0  # how often its process has died and was started again
    # Why it is in ERROR, its process last died, or it can't continue now, as on a full disk; one line
    error: str = ""
    tags: tuple[str, ...] = ()  # tags, notes: by the user
    notes: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """The server and its cluster."""

    version: str  # of dray
    cluster: str  # which one it is, as text
    results: str  # the results directory
    since: float  # Unix time in s of the server's start
    slots: float  # of the cluster
    busy: float  # slots that trials have
    groups: int  # worker groups that are up, or start
    experiments: Mapping[ExperimentState, int]  # how many are in each state


def submitted_from(value: Mapping[str, Any]) -> Submitted:
    """From its fields as JSON; fields of newer servers are ignored."""
    share = Share(**_known(Share, value["share"]))
    return Submitted(**{**_known(Submitted, value), "share": share, "tags": tuple(value.get("tags", ()))})


def status_from(value: Mapping[str, Any]) -> Status:
    """The same of the server's state."""
    return Status(**_known(Status, value))


def _known(kind: type[Any], value: Mapping[str, Any]) -> dict[str, Any]:
    return {field.name: value[field.name] for field in fields(kind) if field.name in value}


class Refused(ValueError):
    """The server refused a client's request; the message is one line."""


class NotSubmitted(LookupError):
    """No experiment of this name was submitted to the server; the message is one line."""


class WrongState(ValueError):
    """The experiment can't do that in its state; the message is one line, and says what can be done."""


Verb = Literal["stop", "pause", "activate", "kill"]
"""stop: have its running trials save a checkpoint, and end its process. pause: the same, also before it begins.
activate: queue it again if it was paused or stopped, or its process died; it continues from its journal. kill: end its
process at once; its trials continue from their last checkpoints if it is activated."""


class Control(Protocol):
    """A server's verbs. Thread-safe; each returns at once, and has been written to the disk when it returns.

    All that take a name raise `NotSubmitted` if there is no such experiment, and `WrongState` if it can't do that.
    """

    def submit(self, config: str, code: Path) -> Submitted:
        """Queue a new experiment: the text of a YAML file, and a directory with the model's code, which is copied.
        Raises `ConfigError` with every fault of the config."""

    def experiments(self) -> list[Submitted]:
        """All that were submitted and not deleted, in the order of submission."""

    def experiment(self, name: str) -> Submitted:
        """One of them."""

    def act(self, name: str, verb: Verb) -> Submitted:
        """Stop, pause, activate or kill it."""

    def extend(self, name: str, *, max_trials: int | None, max_length: int | None) -> Submitted:
        """Queue one again, finished or not, with more trials or longer ones. Raises `ConfigError` if it can't be."""

    def change(self, name: str, change: Mapping[str, Any]) -> Submitted:
        """Change some of the fields of its share, from now on, its tags or its notes; the others stay."""

    def status(self) -> Status:
        """The server's state."""


class Browsing:
    """A `Control` without a server, for ``dray ui``."""

    def __init__(self, results: Path) -> None:
        self._results, self._since = results, time.time()

    def experiments(self) -> list[Submitted]:
        return []

    def experiment(self, name: str) -> Submitted:
        raise NotSubmitted(f"experiment {name} was not submitted to a server")

    def status(self) -> Status:
        return Status(
            version=__version__,
            cluster="no server is up",
            results=str(self._results),
            since=self._since,
            slots=0,
            busy=0,
            groups=0,
            experiments={},
        )

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise WrongState("no server is up; to change or run experiments here, end dray ui and start: dray serve")

    submit = act = extend = change = _refuse
