"""A cloud's notice that it takes a machine away is asked for as the cloud wants to be asked."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from types import SimpleNamespace

import pytest

from dray.cluster import spot_notice

NOW = 1_800_000_000


class Metadata:
    """The metadata services of both clouds, on this machine: they answer who asks as they demand.

    Attributes:
        notice: whether there is one.
        left_s: until the machine of AWS's is gone.
    """

    def __init__(self) -> None:
        self.notice, self.left_s = False, 120
        metadata = self

        class Handler(BaseHTTPRequestHandler):
            def do_PUT(self) -> None:
                wanted = self.path == "/latest/api/token" and "X-aws-ec2-metadata-token-ttl-seconds" in self.headers
                self._say(200 if wanted else 400, "a-token")

            def do_GET(self) -> None:
                self._say(*metadata.answer(self.path, dict(self.headers)))

            def _say(self, code: int, text: str) -> None:
                self.send_response(code)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.host = f"127.0.0.1:{self.server.server_port}"
        Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def answer(self, path: str, headers: dict[str, str]) -> tuple[int, str]:
        lower = {name.lower(): value for name, value in headers.items()}
        if path == "/latest/meta-data/spot/instance-action":
            if lower.get("x-aws-ec2-metadata-token") != "a-token":
                return 401, ""
            end = datetime.datetime.fromtimestamp(NOW + self.left_s, datetime.timezone.utc)
            action = {"action": "terminate", "time": end.strftime("%Y-%m-%dT%H:%M:%SZ")}
            return (200, json.dumps(action)) if self.notice else (404, "")
        if path == "/computeMetadata/v1/instance/preempted":
            if lower.get("metadata-flavor") != "Google":
                return 403, ""
            return 200, "TRUE" if self.notice else "FALSE"
        return 404, ""

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def metadata(monkeypatch: pytest.MonkeyPatch) -> Iterator[Metadata]:
    metadata = Metadata()
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", f"http://{metadata.host}/")
    monkeypatch.setenv("GCE_METADATA_HOST", metadata.host)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # it is not asked
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.setattr(spot_notice, "time", SimpleNamespace(time=lambda: NOW))
    monkeypatch.setattr(spot_notice, "ANSWER_S", 30.0)
    yield metadata
    metadata.close()


@pytest.mark.parametrize(("asked", "left_s"), [(spot_notice.aws, 120), (spot_notice.gcp, 25)])
def test_a_notice_says_how_long_the_machine_will_stay(
    asked: Callable[[], int | None], left_s: int, metadata: Metadata
) -> None:
    assert asked() is None
    metadata.notice = True
    assert asked() == left_s


def test_a_notice_whose_time_is_over_leaves_nothing(metadata: Metadata) -> None:
    metadata.notice, metadata.left_s = True, -30
    assert spot_notice.aws() == 0


@pytest.mark.parametrize("asked", [spot_notice.aws, spot_notice.gcp])
def test_metadata_that_do_not_answer_are_no_notice(asked: Callable[[], int | None], metadata: Metadata) -> None:
    metadata.close()
    with pytest.raises(OSError, match="refused"):
        asked()


def test_metadata_that_refuse_are_no_notice(metadata: Metadata, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "answer", lambda *_: (500, ""))
    with pytest.raises(OSError, match="500"):
        spot_notice.aws()
