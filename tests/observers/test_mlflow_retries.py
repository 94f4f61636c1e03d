"""A tracking server that closes a connection, as servers do with idle ones: nobody need hear of that."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from dray.observers import loggers
from tests.observers.test_loggers import with_loggers
from tests.records.test_result import told

pytestmark = pytest.mark.slow


class Closing(BaseHTTPRequestHandler):
    """Answers the first request by closing its connection, and then as a server does that has no such thing."""

    paths: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self.paths.append(self.path)
        if len(self.paths) > 1:
            body = json.dumps({"error_code": "PERMISSION_DENIED", "message": "not here"}).encode()
            self.send_response(403)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Nothing."""


@pytest.fixture
def server() -> Iterator[str]:
    pytest.importorskip("mlflow")
    Closing.paths = []
    with ThreadingHTTPServer(("127.0.0.1", 0), Closing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def test_a_request_that_is_repeated_is_not_logged(
    server: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    story = told(tmp_path, with_loggers({"mlflow": {"tracking_uri": server}}))
    caplog.clear()
    with pytest.raises(Exception, match="not here"):
        loggers.makes(story.directory, story.directory.config())["mlflow"]()
    assert len(Closing.paths) == 2, "the second time it was answered"
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []
