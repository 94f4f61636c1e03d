"""The verbs of an experiment on a server."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from dray.code.archive import pack
from dray.records.overview import Overview
from dray.serve.client import END, SUBMIT_TIMEOUT_S, Server, form, path_of
from dray.serve.control import EndVerb, Submitted, submitted_from
from dray.serve.verbs.handle import Handle


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
