"""The verbs of an experiment."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from dray.records.overview import Overview
from dray.serve.client import Server
from dray.serve.control import EndVerb


class Handle(ABC):
    """An experiment, wherever it is: on a server, in a directory with a driver, or in a directory alone.

    Without a server, what runs an experiment runs it in this process, to its end.

    Attributes:
        name: its directory's name.
        server: the server that it is on, or that its forks are submitted to; None: they run here.
        ran: whether one of these verbs has run it in this process.

    All verbs raise `dray.serve.refusals.WrongState` if the experiment's state does not allow them.
    """

    name: str
    server: Server | None = None
    is_on_server = False
    ran = False

    @property
    @abstractmethod
    def typed(self) -> str:
        """What is shortest to type for it in a command."""

    @abstractmethod
    def read(self) -> Overview:
        """How it stands now."""

    @abstractmethod
    def _end(self, verb: EndVerb) -> str: ...

    def stop(self) -> str:
        """Let running trials save a checkpoint, and end it; a second time, end it at once. Returns its state: STOPPING
        until all have saved, see `wait`."""
        return self._end("stop")

    def pause(self) -> str:
        """Like `stop`; on a server also an experiment that is queued."""
        return self._end("pause")

    def kill(self) -> str:
        """End it at once: running trials lose all training since their last checkpoints."""
        return self._end("kill")

    @abstractmethod
    def activate(self) -> str:
        """Run it again from where its journal ends; one that runs goes on. Returns its state."""

    @abstractmethod
    def extend(self, **extension: Any) -> str:
        """Run it again with new values of ``max_trials``, ``max_length``, ``budget``, ``until``, ``patience`` or
        ``prices``, as for `dray.Experiment.resume`. Returns its state."""

    @abstractmethod
    def fork(self, changes: Mapping[str, Any] | str) -> Handle:
        """A new experiment with its code, and with some fields of its config changed, such as
        ``{"searcher.max_trials": 8}``, or with another config, as YAML text. A server queues it; else `activate` runs
        it."""

    @abstractmethod
    def lines(self, say: Callable[[str], None] = lambda line: None) -> Iterator[str]:
        """Its log since it was last run again, until it is no longer active. `say`: called when the server stops
        answering, and when it answers again."""

    @abstractmethod
    def wait(self, say: Callable[[str], None] = lambda line: None) -> Overview:
        """Wait until it neither runs nor is queued. `say`: as for `lines`."""

    @abstractmethod
    def delete(self) -> None:
        """Delete it and its checkpoints, here and in its object store."""

    @abstractmethod
    def fork_trial(self, trial: int | str, *, at: str | int = "best", hparams: Mapping[str, Any]) -> Mapping[str, Any]:
        """Start a trial from a checkpoint of another one: "best", "latest", or a number of batches. Returns the trial's
        number, ``trial``, or None if the driver has yet to answer; ``hparams``, those given; and ``source``."""

    @abstractmethod
    def add_trial(
        self, hparams: Mapping[str, Any], *, patch: str | None = None, code: Path | None = None
    ) -> Mapping[str, Any]:
        """Add a trial, with the code of the experiment, with a unified diff of it, or with that in a directory. Returns
        as `fork_trial`, with ``code`` if it has its own."""

    @abstractmethod
    def stop_trial(self, trial: int | str) -> Mapping[str, Any]:
        """Stop a trial; the search continues with the others."""
