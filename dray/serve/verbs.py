"""The verbs of an experiment, and an experiment on a server."""

from __future__ import annotations

import json
import shlex
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from dray.code.archive import pack
from dray.records.overview import Overview
from dray.serve.client import END, SUBMIT_TIMEOUT_S, Server, form, path_of
from dray.serve.control import EndVerb, Submitted, submitted_from


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


class OnServer(Handle):
    """An experiment that was submitted to a server.

    Args:
        answered: called with the answer to each request for a trial.
        sent: the answer to its submission, if it is new.
    """

    is_on_server = True
    server: Server

    def __init__(
        self,
        server: Server,
        name: str,
        answered: Callable[[Any], None] = lambda decided: None,
        sent: Submitted | None = None,
    ) -> None:
        self.server, self.name, self._answered, self.sent = server, name, answered, sent
        self._after = 0  # the end of its journal when it was run again

    @property
    def number(self) -> int | None:
        """Its number; None if it has none yet."""
        if self.server.is_here:
            from dray.records.numbering import number_of
            from dray.records.root import results_root

            return number_of(results_root() / self.name)
        found: int | None = self.server.read(self.name)["number"]
        return found

    @property
    def typed(self) -> str:
        number = self.number
        return shlex.quote(self.name) if number is None else str(number)

    def read(self) -> Overview:
        return Overview.from_json(self.server.read(self.name, now=1))

    def _end(self, verb: EndVerb) -> str:
        state = self._send(verb)
        return self.wait().state if verb == "kill" and state == "STOPPING" else state

    def activate(self) -> str:
        return self._run_again("activate", {})

    def extend(self, **extension: Any) -> str:
        return self._run_again("extend", extension)

    def _run_again(self, verb: str, body: Mapping[str, Any]) -> str:
        self._after = self.server.events(self.name, END)["next"]
        return self._send(verb, body)

    def _send(self, verb: str, body: Mapping[str, Any] | None = None) -> str:
        return str(self.server.request("POST", path_of(self.name, verb), body or {})["state"])

    def fork(self, changes: Mapping[str, Any] | str) -> OnServer:
        body = {"config": changes if isinstance(changes, str) else dict(changes)}
        sent = self.server.request("POST", path_of(self.name, "fork"), body, timeout_s=SUBMIT_TIMEOUT_S)
        return OnServer(self.server, sent["name"], self._answered, submitted_from(sent))

    def lines(self, say: Callable[[str], None] = lambda line: None) -> Iterator[str]:
        return self.server.follow(self.name, self._after, say=say)

    def wait(self, say: Callable[[str], None] = lambda line: None) -> Overview:
        for _ in self.server.follow(self.name, END, say=say):
            pass
        return self.read()

    def delete(self) -> None:
        self.server.request("DELETE", path_of(self.name))

    def fork_trial(self, trial: int | str, *, at: str | int = "best", hparams: Mapping[str, Any]) -> Mapping[str, Any]:
        return self._ask(f"trials/{quote(str(trial), safe='')}/fork", {"at": at, "hparams": hparams})

    def add_trial(
        self, hparams: Mapping[str, Any], *, patch: str | None = None, code: Path | None = None
    ) -> Mapping[str, Any]:
        body: dict[str, Any] = {"hparams": hparams} | ({} if patch is None else {"patch": patch})
        if code is None:
            return self._ask("trials", body, timeout_s=SUBMIT_TIMEOUT_S)
        kind, sent = form(("trial", "trial.json", json.dumps(body).encode()), ("code", "code.tar.gz", pack(code)))
        return self._ask("trials", sent, kind=kind, timeout_s=SUBMIT_TIMEOUT_S)

    def stop_trial(self, trial: int | str) -> Mapping[str, Any]:
        return self._ask(f"trials/{quote(str(trial), safe='')}/stop", {})

    def _ask(self, what: str, body: bytes | Mapping[str, Any], **sent: Any) -> Mapping[str, Any]:
        decided: dict[str, Any] = self.server.request("POST", path_of(self.name, what), body, **sent)
        self._answered(decided)
        return decided
