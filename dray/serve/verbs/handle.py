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

    Without a server, methods that run an experiment run it in this process, to its end.

    Attributes:
        name: its directory's name.
        server: the server that runs it, or to which its forks are submitted. None: forks run in this process.
        ran: whether a method has run it in this process.

    All methods raise `dray.serve.refusals.WrongState` if the experiment's state does not allow them.
    """

    name: str
    server: Server | None = None
    is_on_server = False
    ran = False

    @property
    @abstractmethod
    def typed(self) -> str:
        """The shortest name of the experiment in a command."""

    @abstractmethod
    def read(self) -> Overview:
        """Return the experiment's current overview."""

    @abstractmethod
    def _end(self, verb: EndVerb) -> str: ...

    def stop(self) -> str:
        """Stop the experiment after its running trials have saved a checkpoint. A second call ends it at once. Returns
        its state, which is STOPPING until all have saved: see `wait`."""
        return self._end("stop")

    def pause(self) -> str:
        """Pause the experiment if it runs or is queued on a server. Without a server, the same as `stop`."""
        return self._end("pause")

    def kill(self) -> str:
        """End the experiment at once. Running trials lose all training since their last checkpoints."""
        return self._end("kill")

    @abstractmethod
    def activate(self) -> str:
        """Run the experiment again from where its journal ends, unless it is running. Returns its state."""

    @abstractmethod
    def extend(self, **extension: Any) -> str:
        """Run the experiment again with new values of ``max_trials``, ``max_length``, ``budget``, ``until``,
        ``patience`` or ``prices``, as for `dray.Experiment.resume`. Returns its state."""

    @abstractmethod
    def fork(self, changes: Mapping[str, Any] | str) -> Handle:
        """Make a new experiment with the same code, and with some fields of the config changed, such as
        ``{"searcher.max_trials": 8}``, or with another config, as YAML text. A server queues it. Otherwise, `activate`
        runs it."""

    @abstractmethod
    def lines(self, say: Callable[[str], None] = lambda line: None) -> Iterator[str]:
        """Yield the log since the experiment was last run again, until it is no longer active. `say`: called when the
        server stops answering, and when it answers again."""

    @abstractmethod
    def wait(self, say: Callable[[str], None] = lambda line: None) -> Overview:
        """Wait until the experiment neither runs nor is queued. `say`: as for `lines`."""

    @abstractmethod
    def delete(self) -> None:
        """Delete the experiment and its checkpoints, here and in its object store."""

    @abstractmethod
    def fork_trial(self, trial: int | str, *, at: str | int = "best", hparams: Mapping[str, Any]) -> Mapping[str, Any]:
        """Start a trial from a checkpoint of another one: "best", "latest", or a number of batches. Returns the new
        ``trial``, a number, or None if the driver has yet to answer; its given ``hparams``; and its ``source``."""

    @abstractmethod
    def add_trial(
        self, hparams: Mapping[str, Any], *, patch: str | None = None, code: Path | None = None
    ) -> Mapping[str, Any]:
        """Add a trial with the experiment's code, with that code changed by a patch (a unified diff), or with the code
        in a directory. Returns the same as `fork_trial`, and ``code`` if the trial has its own."""

    @abstractmethod
    def stop_trial(self, trial: int | str) -> Mapping[str, Any]:
        """Stop a trial; the search continues with the others."""
