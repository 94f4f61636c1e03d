"""The server's interface: the verbs and states behind its HTTP API, the command and the page."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Protocol

from typing_extensions import TypedDict

from dray._version import __version__
from dray.config import defaults
from dray.serve.quota import NOTHING, Use
from dray.serve.refusals import NotSubmitted, WrongState

if TYPE_CHECKING:
    from dray.serve.draft import Draft

API = "/api/v1"
"""The path of the HTTP API. A version only gains fields; any other change gets a new version number."""

KEY = "Idempotency-Key"
"""The header with a request's idempotency key."""

ExperimentState = Literal[
    "QUEUED", "RUNNING", "PREEMPTED", "RESTARTING", "STOPPING", "PAUSED", "STOPPED", "COMPLETED", "ERROR"
]
"""QUEUED: waits for its first slots. PREEMPTED: other experiments have its slots; continues when slots are free.
RESTARTING: its process died and is being restarted. STOPPING: trials save before it pauses or stops. PAUSED, STOPPED:
until it is activated, also when the server restarts. COMPLETED, ERROR: its search has ended, as in
`dray.records.overview`."""


ACTIVE: tuple[ExperimentState, ...] = ("QUEUED", "RUNNING", "PREEMPTED", "RESTARTING", "STOPPING")
"""The states in which more events may follow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """An experiment's claim to slots, from ``resources`` in its config."""

    priority: int = defaults.PRIORITY  # 1 to 99; smaller numbers go first, as in Determined
    weight: float = 1.0  # its share of the slots, relative to experiments of the same priority; > 0
    max_slots: int | None = None  # the most slots at a time; None: no limit


@dataclass(frozen=True, slots=True, kw_only=True)
class Submitted:
    """An experiment that was submitted to the server."""

    name: str  # its directory in the results directory; unique
    state: ExperimentState
    submitted: float  # Unix time in s
    share: Share
    slots: float = 0  # slots in use by its trials; fractional if trials share a slot
    waiting: int = 0  # trials that could run if there were slots
    why: str = ""  # the reason why it, or some of its trials, wait, in one line
    restarts: int = 0  # how often its process has died and been restarted
    # One line: why its state is ERROR, why its process last died, or why it can't continue now (a full disk)
    error: str = ""
    tags: tuple[str, ...] = ()  # set by the user, as notes are
    notes: str = ""
    owner: str = ""  # the name of the token that submitted it; "": the server's own
    # In the answer to its submission: fields of its config, with dots, that the quota of its token has set
    by_quota: Mapping[str, Any] = field(default_factory=dict)
    # In the answer to a fork of somebody else's experiment: that one's secrets, which it does not have
    missing_secrets: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """The server and its cluster."""

    version: str  # dray's version
    cluster: str  # a description of the cluster
    results: str  # the results directory
    since: float  # Unix time in s of the server's start
    slots: float  # the cluster's slots
    busy: float  # slots in use by trials
    groups: int  # worker groups that are up or starting
    experiments: Mapping[ExperimentState, int]  # number of experiments in each state


@dataclass(slots=True, kw_only=True)
class Bar:
    """A trial on its lanes, or several short ones of an experiment, one after another."""

    experiment: str
    trial: int  # the first one
    kind: str  # gpu or cpu
    lanes: list[int]
    part: int = 0  # it takes this part of the lanes, from 0
    parts: int = 1  # of so many
    began: float
    ended: float | None = None  # null: it trains
    # how it has left, such as completed, paused, interrupted (another experiment took its slots) or errored; empty if
    # its processes ended
    outcome: str = ""
    trials: int = 1  # more than 1: so many short ones, of which trial is the first


class Lane(TypedDict):
    """A GPU or a CPU now."""

    kind: Literal["gpu", "cpu"]
    lane: int  # counted from 0; not the number of the GPU
    state: Literal["training", "starting", "idle"]
    since: float | None  # since when it is idle, or its process starts; null: it trains


_From = TypedDict("_From", {"from": float})  # a word of Python's


class LanesView(_From):
    """The lanes from a time on, since which all bars are known."""

    now: float
    since: float  # the server's start
    lanes: list[Lane]  # the GPUs of the nodes that are up, or their CPUs
    more_lanes: int  # lanes that are not listed
    bars: list[Bar]


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueState:
    """The queue, and what the cluster's slots did."""

    entries: list[Submitted]  # experiments that run or wait, in the order of their turns; then paused ones
    next: str | None  # the one that gets the next free slot
    slots: float  # the cluster's slots, after it has scaled up
    lanes: LanesView


def submitted_from(value: Mapping[str, Any]) -> Submitted:
    """A `Submitted` from its JSON; unknown fields of newer servers are ignored."""
    share = Share(**_known(Share, value["share"]))
    lists = {name: tuple(value.get(name, ())) for name in ("tags", "missing_secrets")}
    return Submitted(**{**_known(Submitted, value), "share": share, **lists})


def status_from(value: Mapping[str, Any]) -> Status:
    """A `Status` from its JSON."""
    return Status(**_known(Status, value))


def _known(kind: type[Any], value: Mapping[str, Any]) -> dict[str, Any]:
    return {each.name: value[each.name] for each in fields(kind) if each.name in value}


EndVerb = Literal["stop", "pause", "kill"]
Verb = Literal["stop", "pause", "activate", "kill"]
"""stop: let running trials save a checkpoint, and end the experiment's process; a second time, as kill. pause: like
stop, also for queued experiments. kill: end the process at once; trials continue from their last checkpoints when the
experiment is activated. activate: run an experiment in any state again; it continues from its journal, and without
anything left to do it ends at once."""


_WORKING = ("QUEUED", "RUNNING", "PREEMPTED", "RESTARTING")
_CHANGES: Mapping[str, tuple[str, ...]] = {
    "stop": (*_WORKING, "PAUSED"),
    "pause": _WORKING,
    "kill": ACTIVE,
    "activate": ("PAUSED", "STOPPED", "ERROR"),
    "extend": ("PAUSED", "STOPPED", "COMPLETED", "PARTLY_FAILED", "ERROR"),
}


def verbs_of(state: str, *, is_submitted: bool) -> list[str]:
    """The verbs that change something about an experiment in this state: what the page offers."""
    changes = [verb for verb, states in _CHANGES.items() if is_submitted and state in states]
    return changes if state in ACTIVE else [*changes, "delete"]


class Control(Protocol):
    """A server's verbs. They are thread-safe and return quickly; the change is on the disk when they return.

    Verbs that take a name raise `NotSubmitted` if there is no such experiment, and `WrongState` if its state does not
    allow them.
    """

    def submit(self, draft: Draft, code: Path, owner: str = "", request: str = "") -> Submitted:
        """Queue a new experiment: its config, and a directory with the model's code, which is copied.
        `owner`: the name of a token, whose quota must have room for it; else `WrongState`. `request`: the id of the
        request, if it may be sent again; the answer is then the experiment that it has created already. Raises
        `ConfigError` with every fault of the config."""

    def experiments(self) -> list[Submitted]:
        """All experiments that were submitted and not deleted, in the order of submission."""

    def experiment(self, name: str) -> Submitted:
        """One experiment."""

    def act(self, name: str, verb: Verb) -> Submitted:
        """Stop, pause, activate or kill an experiment."""

    def extend(self, name: str, extension: Mapping[str, Any]) -> Submitted:
        """Queue an experiment again, finished or not, with more or longer trials, or with other limits. Raises
        `ConfigError` if the limits have faults."""

    def change(self, name: str, change: Mapping[str, Any]) -> Submitted:
        """Change some fields of an experiment's share, its tags or its notes; other fields keep their values."""

    def queue(self, seconds: float) -> QueueState:
        """The queue, and what the slots did in the last `seconds`."""

    def foresee(self, shares: Mapping[str, Share]) -> list[str]:
        """What will happen if experiments get these shares, in sentences. Nothing changes."""

    def use(self, owner: str) -> Use:
        """What the experiments of a token use."""

    def status(self) -> Status:
        """The server's state."""


class Browsing:
    """A `Control` without a server, for ``dray ui``."""

    def __init__(self, results: Path) -> None:
        self._results, self._since = results, time.time()

    def experiments(self) -> list[Submitted]:
        return []

    def experiment(self, name: str) -> Submitted:
        raise NotSubmitted(name)

    def queue(self, seconds: float) -> QueueState:
        since, now = self._since, time.time()
        lanes: LanesView = {"now": now, "from": since, "since": since, "lanes": [], "more_lanes": 0, "bars": []}
        return QueueState(entries=[], next=None, slots=0, lanes=lanes)

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

    def use(self, owner: str) -> Use:
        return NOTHING

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise WrongState("no server is up; to change or run experiments here, end dray ui and start: dray serve")

    submit = act = extend = change = foresee = _refuse
