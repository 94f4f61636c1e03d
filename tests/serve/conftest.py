"""A server's HTTP side in front of `tests.serve.fake.FakeControl`, listening in a thread."""

from __future__ import annotations

import http.client
import json
import multiprocessing
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from jsonschema import Draft202012Validator

from dray.serve import address, long_polling
from dray.serve.app import listening
from dray.serve.site import OPENAPI
from dray.serve.tokens import Tokens
from tests.serve.fake import FakeControl

TOKEN = "secret-token"
PORT = int(os.environ.get("DRAY_TEST_PORT", 20_000 + os.getpid() % 10_000))  # not that of tests in other processes
multiprocessing.set_forkserver_preload(
    ["dray.figures.data", "dray.config.load", "dray.serve.requests"]
)  # not torch, not Ray
Body: TypeAlias = bytes | dict[str, Any] | None


@dataclass(frozen=True)
class Reply:
    """A response."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@cache
def schema_of(method: str, path: str, status: int) -> Any:
    """The schema of an answer, which has no fields that it does not name; None if the answer is empty."""
    paths = {re.sub(r"\\{\w+\\}", "[^/]+", re.escape(name)): item for name, item in DOCUMENT["paths"].items()}
    paths = {pattern.replace("code/[^/]+", "code/.+"): item for pattern, item in paths.items()}
    answers = next((item.get(method.lower()) for pattern, item in paths.items() if re.fullmatch(pattern, path)), None)
    found = (answers or {"responses": {}})["responses"].get(str(status), DOCUMENT["components"]["responses"]["Error"])
    return found.get("content", {}).get("application/json", {}).get("schema")


def strict(schema: Any) -> Any:
    """The schema without room for fields that it does not name."""
    if isinstance(schema, list):
        return [strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {"additionalProperties": False} if "properties" in schema and schema.get("type") == "object" else {}
    return {name: strict(each) for name, each in schema.items()} | closed


DOCUMENT = json.loads(OPENAPI.read_text())
COMPONENTS = strict(DOCUMENT["components"])


def check(method: str, path: str, reply: Reply) -> None:
    if (schema := schema_of(method, path, reply.status)) is not None and "json" in reply.headers["Content-Type"]:
        Draft202012Validator({**schema, "components": COMPONENTS}).validate(reply.json)


@dataclass
class Served:
    """The server: where it is, and what is behind it."""

    port: int
    control: FakeControl
    results: Path
    headers: dict[str, str] = field(default_factory=lambda: {"Authorization": f"Bearer {TOKEN}"})

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def send(
        self,
        method: str,
        path: str,
        body: bytes | dict[str, Any] | None = None,
        *,
        headers: Mapping[str, str] | None = None,
    ) -> Reply:
        """Send one request, by default with the token."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        try:
            given = dict(self.headers if headers is None else headers)
            if isinstance(body, dict):
                body = json.dumps(body).encode()
                given.setdefault("Content-Type", "application/json")
            connection.request(method, path, body, given)
            response = connection.getresponse()
            return Reply(response.status, dict(response.getheaders()), response.read())
        finally:
            connection.close()

    def api(self, method: str, path: str, body: Body = None) -> Reply:
        """A request below ``/api/v1``, whose answer must be as the API's description says."""
        reply = self.send(method, f"/api/v1{path}", body)
        check(method, path.partition("?")[0], reply)
        return reply

    def listed(self) -> list[dict[str, Any]]:
        """The rows of all experiments, once the server has read them all."""
        while (reply := self.api("GET", "/experiments").json)["unread"]:
            pass
        return reply["experiments"]  # type: ignore[no-any-return]


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty results directory."""
    root = tmp_path / "results"
    root.mkdir()
    monkeypatch.setenv("DRAY_HOME", str(root))
    return root


@pytest.fixture
def served(results: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    """The server. It looks more often for news."""
    monkeypatch.setattr(long_polling, "POLL_S", 0.02)
    control = FakeControl(results)
    with listening(control, results, "127.0.0.1", PORT, Tokens(results, TOKEN)) as url:
        yield Served(int(url.rpartition(":")[2]), control, results)


@pytest.fixture
def up(served: Served) -> Iterator[Served]:
    """A server that is found by the results directory."""
    address.write(served.results, served.url, TOKEN)
    yield served
    address.remove(served.results)
