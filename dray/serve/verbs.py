"""The verbs of an experiment, wherever it is; and those of one that was submitted to a server."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dray.code.archive import pack
from dray.records.overview import COMPLETED, Overview
from dray.serve.client import Server
from dray.serve.control import ACTIVE, Verb

if TYPE_CHECKING:
    from dray.experiment.requests import Decided

END = 1 << 59
"""An offset beyond every journal's end."""


class Handle(ABC):
    """An experiment: on a server, with a driver on this machine, or as a directory alone.

    Verbs that its state does not allow raise `WrongState`.

    Attributes:
        name: its directory's name.
        is_on_server: whether it was submitted to a server, which runs it.
        ran: whether one of these verbs has run it in this process.
    """

    name: str
    is_on_server = False
    ran = False

    @property
    @abstractmethod
    def typed(self) -> str:
        """What is shortest to type for it in a command."""

    @abstractmethod
    def read(self) -> Overview:
        """How it stands now."""

    def stop(self) -> str:
        """Stop it: its running trials save a checkpoint first; a second time, end it at once. Returns its state now:
        STOPPING until all have saved."""
        return self._end("stop")

    def pause(self) -> str:
        """As `stop`; on a server also one that is queued, and it is PAUSED."""
        return self._end("pause")

    def kill(self) -> str:
        """End it at once; training since the last checkpoints is lost."""
        return self._end("kill")

    @abstractmethod
    def _end(self, verb: Verb) -> str: ...

    @abstractmethod
    def activate(self) -> None:
        """Run it again, in any state, from where its journal ends: on a server it is queued; else it runs in this
        process, and this returns when it has ended."""

    @abstractmethod
    def extend(self, **extension: Any) -> None:
        """As `activate`, with new values of ``max_trials``, ``max_length``, ``budget``, ``until``, ``patience`` or
        ``prices``, as for `dray.Experiment.resume`."""

    @abstractmethod
    def wait(self, say: Callable[[str], None] = lambda line: None) -> Overview:
        """Wait until it neither runs nor is queued. `say` is called when a server does not answer, or does again."""

    # `dray.experiment.requests.Trials` describes these.
    @abstractmethod
    def fork_trial(self, trial: int | str, *, at: str = "best", hparams: Mapping[str, Any]) -> Decided: ...

    @abstractmethod
    def add_trial(
        self, hparams: Mapping[str, Any], *, patch: str | None = None, code: Path | None = None
    ) -> Decided: ...

    @abstractmethod
    def stop_trial(self, trial: int | str) -> Decided: ...


class OnServer(Handle):
    """An experiment that was submitted to a server."""

    is_on_server = True

    def __init__(self, server: Server, name: str, answered: Callable[[Decided], None] = lambda decided: None) -> None:
        self.server, self.name, self._answered = server, name, answered
        self._after = 0  # the end of its journal when it was run again

    @property
    def typed(self) -> str:
        return self.server.typed(self.name)

    def read(self) -> Overview:
        return Overview.from_json(self.server.read(self.name, now=1))

    def _end(self, verb: Verb) -> str:
        return self.server.act(self.name, verb).state

    def activate(self) -> None:
        self._after = self.server.events(self.name, END)["next"]
        self.server.act(self.name, "activate")

    def extend(self, **extension: Any) -> None:
        self._after = self.server.events(self.name, END)["next"]
        self.server.extend(self.name, **extension)

    def lines(self, say: Callable[[str], None] = lambda line: None) -> Iterator[str]:
        """Its log from the last `activate` or `extend` on, until it is no longer active."""
        return self.server.follow(self.name, self._after, say=say)

    def wait(self, say: Callable[[str], None] = lambda line: None) -> Overview:
        for _ in self.server.follow(self.name, END, say=say):
            pass
        return self.read()

    def is_active(self) -> bool:
        return self.server.experiment(self.name).state in ACTIVE

    def fork_trial(self, trial: int | str, *, at: str = "best", hparams: Mapping[str, Any]) -> Decided:
        return self._decided(self.server.fork_trial(self.name, trial, at=at, hparams=hparams))

    def add_trial(self, hparams: Mapping[str, Any], *, patch: str | None = None, code: Path | None = None) -> Decided:
        packed = None if code is None else pack(code)
        return self._decided(self.server.add_trial(self.name, hparams, patch=patch, code=packed))

    def stop_trial(self, trial: int | str) -> Decided:
        return self._decided(self.server.stop_trial(self.name, trial))

    def _decided(self, decided: Decided) -> Decided:
        self._answered(decided)
        return decided


def why_failed(seen: Overview, typed: str) -> str:
    """The reason why an experiment that does not run has no complete result; "" if it has one."""
    if seen.state in COMPLETED:
        return ""
    if seen.state == "ERROR":
        return f"{seen.name} failed: {seen.why or f'every trial did; see: dray experiment logs {typed}'}"
    return f"{seen.name} is {seen.state}; continue it with: dray experiment resume {typed}"
