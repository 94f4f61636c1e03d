"""A connection to the server, for commands and for Python programs.

Only the standard library's HTTP: a command is ready in a third of a second.
"""

from __future__ import annotations

import http.client
import json
import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

from dray.errors import ConfigError, Invalid, NoExperiment
from dray.serve import address as addresses
from dray.serve.address import TOKEN, URL
from dray.serve.control import ACTIVE, API, KEY, Status, Submitted, status_from, submitted_from
from dray.serve.refusals import NotSubmitted, Refused, WrongState
from dray.text import one_line

TIMEOUT_S = 30.0  # timeout of a response
SUBMIT_TIMEOUT_S = 300.0  # timeout of a request with code: it may be large, and the model slow to import
WAIT_S = 20  # how long the server holds a request for events while there are none
PATIENCE_S = 600.0  # how long a follower waits for a server that does not answer, as it may be restarting
RETRY_S = 1.0
RESEND_S = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
"""How long to wait before a request whose answer was lost is sent again, each time."""
PROXY_ERRORS = (502, 503, 504)
END = 1 << 59  # an offset beyond every journal's end
MOST_PATH = 8000  # most characters of a request's path with its query; the server takes a few more


class Unreachable(ConnectionError):
    """The server does not answer; the message is one line."""


class AnswerLost(Unreachable):
    """The server has received a request, or part of it, but no answer has come."""


class Server:
    """A client of a server. The verbs of one experiment are those of `dray.serve.verbs.on_server.OnServer`.

    Args:
        url: such as ``http://127.0.0.1:8600``.
        is_here: whether the server and this process share a results directory.

    All methods raise:
        Unreachable: the server does not answer.
        Refused: the server refuses the token or the request.
        Invalid: the request is invalid, or can't be carried out.
    """

    def __init__(self, url: str, token: str, *, is_here: bool = False) -> None:
        self.url, self._token, self.is_here = url.rstrip("/"), token, is_here
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(
                [(URL, f"must be a URL such as http://127.0.0.1:8600, got {url!r:.100}")], "The environment"
            )
        self._parts = parts

    @classmethod
    def find(cls, results: Path | None = None, *, url: str | None = None) -> Server | None:
        """The server to use, see `dray.serve.address`; None if there is none.

        A server that `url` or ``DRAY_SERVER`` names is returned without a check; one from the results directory only if
        it answers.
        """
        if results is None:
            from dray.records.root import results_root

            results = results_root()
        found = addresses.find(results, url)
        if found is None:
            return None
        written = addresses.read(results)
        # Only the server's own results directory contains its token, even where machines share a file system.
        is_here = written is not None and bool(found.token) and written.token == found.token
        server = cls(found.url, found.token, is_here=is_here)
        if found.pid:
            try:
                server.status()
            except Unreachable:
                return None
        return server

    @property
    def page(self) -> str:
        """The URL of the page, with the token that logs a browser in."""
        return f"{self.url}/login?{urlencode({'token': self._token})}"

    def submit(self, config: str, code: bytes) -> Submitted:
        """Queue a new experiment: the text of a YAML file, and the model's code from `dray.code.archive.pack`.
        Raises `ConfigError` with every fault of the config."""
        kind, sent = form(("config", "experiment.yaml", config.encode()), ("code", "code.tar.gz", code))
        return submitted_from(self.request("POST", "/experiments", sent, kind=kind, timeout_s=SUBMIT_TIMEOUT_S))

    def experiments(self) -> list[dict[str, Any]]:
        """All experiments in the server's results directory, as JSON: see ``/api/v1/openapi.json``."""
        found: list[dict[str, Any]] = self.request("GET", "/experiments")["experiments"]
        return found

    def named(self, experiment: str) -> str:
        """The name of an experiment given by number, by name, by a unique part of the name, or as ``latest``.
        Raises `NoExperiment` if there is none, or several match."""
        from dray.records.lookup import names_of

        found = self.experiments()
        numbered = [each["name"] for each in found if str(each["number"]) == experiment]
        matches = numbered or names_of(experiment, [each["name"] for each in reversed(found) if not each["is_local"]])
        if len(matches) != 1:
            several = f"matches {', '.join(matches[:5])}; give a number, or more of the name"
            raise NoExperiment(f"{experiment!r} {several if matches else 'is no experiment'} on the server {self.url}")
        return str(matches[0])

    def read(self, name: str, what: str = "", **query: str | int) -> Any:
        """What a GET request below an experiment answers, such as ``read(name, "trials", sort="rank")``: see
        ``/api/v1/openapi.json``."""
        return self.request("GET", f"{path_of(name, what)}?{urlencode(query)}")

    def experiment(self, name: str) -> Submitted:
        """An experiment that was submitted."""
        found = self.request("GET", path_of(name)).get("submitted")
        if found is None:
            raise NotSubmitted(name)
        return submitted_from(found)

    def change(self, name: str, **fields: Any) -> Submitted:
        """Change some of ``priority``, ``weight``, ``max_slots``, ``tags`` and ``notes``; the others stay."""
        return submitted_from(self.request("PATCH", path_of(name), fields))

    def token(self) -> dict[str, Any]:
        """This client's token: ``name``, ``scope``, ``quota``, and what its experiments have ``used``, have
        ``reserved``, and what is ``left``; see ``/api/v1/openapi.json``."""
        found: dict[str, Any] = self.request("GET", "/token")
        return found

    def tokens(self) -> list[dict[str, Any]]:
        """All tokens but the server's own, as `token`, and when they were ``created`` and ``revoked``."""
        found: list[dict[str, Any]] = self.request("GET", "/tokens")["tokens"]
        return found

    def queue(self, seconds: int = 3600) -> dict[str, Any]:
        """The experiments in the order of their turns, ``entries``, and what the slots did, ``lanes``."""
        found: dict[str, Any] = self.request("GET", f"/queue?seconds={seconds}")
        return found

    def preview(self, name: str, **change: Any) -> dict[str, Any]:
        """What it would do to set an experiment's priority, weight or max_slots, or to move it ``before`` another one:
        ``lines``, and the ``changes`` by experiment."""
        found: dict[str, Any] = self.request("GET", f"/queue/preview?{urlencode({'name': name, **change})}")
        return found

    def status(self) -> Status:
        return status_from(self.request("GET", "/status"))

    # ------------------------------------------------------------------------------------------------------ following
    def events(self, name: str, after: int = 0, *, wait_s: int = 0) -> dict[str, Any]:
        """Events after an offset in an experiment's journal: ``lines``, ``next`` (offset), ``state``, ``failed``."""
        query = urlencode({"after": after, "wait_s": wait_s})
        path = path_of(name, "events")
        found: dict[str, Any] = self.request("GET", f"{path}?{query}", timeout_s=TIMEOUT_S + wait_s)
        return found

    def follow(self, name: str, after: int = 0, *, say: Callable[[str], None] = lambda line: None) -> Iterator[str]:
        """Yield an experiment's event lines as they arrive, until it is no longer active.

        A server that stops answering may be restarting: `Unreachable` is raised only after ten minutes.

        Args:
            after: an offset in the journal, from `events`; 0: from the beginning.
            say: called with a line when the server stops answering, and when it answers again.
        """
        lost_at: float | None = None
        while True:
            try:
                news = self.events(name, after, wait_s=WAIT_S)
            except Unreachable as error:
                now = time.monotonic()
                if lost_at is None:
                    lost_at = now
                    say("the server does not answer; waiting for it, as the experiment continues when it is back")
                elif now - lost_at > PATIENCE_S:
                    raise error
                time.sleep(RETRY_S)
                self._find_again()
                continue
            if lost_at is not None:
                lost_at = None
                say("the server is back")
            yield from news["lines"]
            after = news["next"]
            if not news["lines"] and news["state"] not in ACTIVE:
                return

    def _find_again(self) -> None:
        """A server that was restarted may be at another port, with another token."""
        from dray.records.root import results_root

        found = addresses.find(results_root())
        if found is not None and found.pid:
            self.url, self._token, self._parts = found.url, found.token, urlsplit(found.url)

    # ------------------------------------------------------------------------------------------------------- requests
    def request(
        self,
        method: str,
        path: str,
        body: bytes | Mapping[str, Any] | None = None,
        *,
        kind: str = "application/json",
        timeout_s: float = TIMEOUT_S,
    ) -> Any:
        """Send a request below the API's path, and return its JSON. A POST whose answer is lost is sent again."""
        if len(path) > MOST_PATH:
            raise Invalid(f"the request is too long: {len(path):,} characters of at most {MOST_PATH:,}; give less")
        data = json.dumps(body).encode() if isinstance(body, Mapping) else body
        headers = {} if data is None else {"Content-Type": kind}
        if method != "POST":
            return self._answer(*self._sent(method, path, data, headers, timeout_s))
        headers[KEY] = secrets.token_hex(16)  # the server carries out each key once
        waits, lost = iter(RESEND_S), ""
        while True:
            try:
                status, text = self._sent(method, path, data, headers, timeout_s)
            except Unreachable as error:
                if not (lost or isinstance(error, AnswerLost)):
                    raise  # it has received nothing
                lost = str(error)
            else:
                if status not in PROXY_ERRORS or text.startswith(b"{"):
                    return self._answer(status, text)
                lost = f"a proxy answers for the server at {self.url}, with status {status}"
            if (wait_s := next(waits, None)) is None:
                raise AnswerLost(f"{lost}; the request may have been carried out: look before you send it again")
            time.sleep(wait_s)
            if self.is_here:
                self._find_again()  # it may have been restarted

    def _sent(
        self, method: str, path: str, data: bytes | None, headers: Mapping[str, str], timeout_s: float
    ) -> tuple[int, bytes]:
        """Send a request. Returns the status and the content of the answer."""
        token = {"Authorization": f"Bearer {self._token}"} if self._token else {}
        # Redirections and proxies are ignored: either could receive the token.
        make = http.client.HTTPSConnection if self._parts.scheme == "https" else http.client.HTTPConnection
        connection = make(self._parts.hostname or "", self._parts.port, timeout=timeout_s)
        is_connected = False
        try:
            connection.connect()
            is_connected = True
            connection.request(method, f"{self._parts.path}{API}{path}", data, {**headers, **token})
            response = connection.getresponse()
            return response.status, response.read()
        except (OSError, http.client.HTTPException) as error:
            what = one_line(error) or type(error).__name__
            if is_connected and method == "POST":
                raise AnswerLost(f"the answer of the server at {self.url} was lost ({what})") from None
            raise Unreachable(f"no dray server answers at {self.url} ({what}); start it with: dray serve") from None
        finally:
            connection.close()

    def _answer(self, status: int, text: bytes) -> Any:
        try:
            value = json.loads(text) if text else None
        except ValueError:
            raise Refused(f"the server at {self.url} is not a dray server: {text[:60]!r}") from None
        if status < 300:
            return value
        why = str(value.get("error", status)) if isinstance(value, dict) else str(status)
        if isinstance(value, dict) and value.get("faults"):
            found = [(str(field), str(what)) for field, what in value["faults"]]
            raise ConfigError(found, re.sub(r" has [\d,]+ errors?$", "", why))
        match status:
            case 400:
                raise Invalid(why)
            case 401:
                raise Refused(f"the server at {self.url} refuses this process: {why}; export {TOKEN}")
            case 403:
                raise Refused(f"{why} (the token is that of {TOKEN}, or of the server's results directory)")
            case 404:
                raise NoExperiment(why)
            case 409:
                raise WrongState(why)
        raise Refused(f"the server at {self.url} can't do that: {why}")


def form(*parts: tuple[str, str, bytes]) -> tuple[str, bytes]:
    """The content type and the content of a form. `parts`: each with its name, a file's name, and its content."""
    boundary = secrets.token_hex(16)
    head = '--{}\r\nContent-Disposition: form-data; name="{}"; filename="{}"\r\n\r\n'
    body = b"".join(head.format(boundary, *names).encode() + data + b"\r\n" for *names, data in parts)
    return f"multipart/form-data; boundary={boundary}", body + f"--{boundary}--\r\n".encode()


def path_of(name: str, what: str = "") -> str:
    """The path of an experiment, or of something below it."""
    return f"/experiments/{quote(name, safe='')}{what and '/'}{what}"
