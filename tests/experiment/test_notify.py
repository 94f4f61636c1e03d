"""Who is told when an experiment ends: by a real HTTP server, and a real command."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import threading
import urllib.error
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from dray.config.load import load_config
from dray.errors import ConfigError
from dray.experiment import notify
from dray.experiment.experiment import Experiment
from dray.masking import MASK
from dray.records.directory import ExperimentDirectory

CONFIG: dict[str, Any] = {
    "name": "told",
    "entrypoint": "python3 train.py",
    "searcher": {"name": "single", "metric": "loss", "max_length": {"batches": 2}},
}


class Webhook(HTTPServer):
    """Keeps what it is sent; answers with ``status``."""

    def __init__(self) -> None:
        self.received: list[dict[str, Any]] = []
        self.status = 200
        super().__init__(("127.0.0.1", 0), _Answer)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/services/s3cr3t-t0k3n"


class _Answer(BaseHTTPRequestHandler):
    server: Webhook

    def do_POST(self) -> None:
        self.server.received.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(self.server.status)
        self.send_header("Location", "/elsewhere")  # for a redirection
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def webhook() -> Iterator[Webhook]:
    with Webhook() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, notify: dict[str, Any], error: BaseException | None) -> None:
    """Create an experiment whose search ends with this error, and run it."""

    def ends(*_: Any) -> Any:
        if error is not None:
            raise error

    monkeypatch.setattr(Experiment, "_run_in", ends)
    (tmp_path / "train.py").write_text("import dray\n")
    experiment = Experiment({**CONFIG, "notify": notify}, model_dir=tmp_path, path=tmp_path / "told")
    experiment.run()


def test_the_webhook_and_the_command_learn_how_it_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, webhook: Webhook
) -> None:
    command = f'printf "$DRAY_NOTIFY_STATE $DRAY_NOTIFY_EXPERIMENT $DRAY_NOTIFY_TEXT" >> {tmp_path}/told.txt'
    with pytest.raises(ValueError, match="lost"):
        run(tmp_path, monkeypatch, {"url": webhook.url, "command": command}, ValueError("lost\neverything"))
    text = "experiment told failed; lost everything"
    assert webhook.received == [{"experiment": "told", "state": "failed", "text": text}]
    assert (tmp_path / "told.txt").read_text() == f"failed told {text}"


@pytest.mark.parametrize(
    ("states", "error", "told"),
    [
        (["stopped"], KeyboardInterrupt("SIGTERM"), ["stopped"]),
        (["completed", "failed"], KeyboardInterrupt("SIGTERM"), []),
        (["completed"], None, ["completed"]),
    ],
)
def test_only_the_ends_that_are_wanted_are_told(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    webhook: Webhook,
    states: list[str],
    error: BaseException | None,
    told: list[str],
) -> None:
    with contextlib.suppress(KeyboardInterrupt):
        run(tmp_path, monkeypatch, {"url": webhook.url, "states": states}, error)
    assert [each["state"] for each in webhook.received] == told


def test_a_notification_that_fails_is_a_warning_without_the_url(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, webhook: Webhook, caplog: pytest.LogCaptureFixture
) -> None:
    webhook.status = 404
    run(tmp_path, monkeypatch, {"url": webhook.url, "command": "exit 3"}, None)
    assert caplog.messages[0] == "notify.url answers with HTTP status 404"
    assert caplog.messages[1].startswith("notify.command failed: Command 'exit 3' returned non-zero exit status 3")
    for url in (f"http://127.0.0.1:{webhook.server_port}/s3cr3t t0k3n", "http://[s3cr3t-t0k3n/"):
        (tmp_path / "told").rename(tmp_path / f"told-{url[-2]}")
        run(tmp_path, monkeypatch, {"url": url}, None)
        assert "notify.url can't be reached" in caplog.messages[-1]
    assert "t0k3n" not in caplog.text


def test_the_url_is_a_secret(tmp_path: Path) -> None:
    url = "https://hooks.example/services/s3cr3t-t0k3n"
    config = load_config({**CONFIG, "notify": {"url": url}})
    (tmp_path / "train.py").write_text(f"import dray\nURL = '{url}'\n")
    directory = ExperimentDirectory.create(tmp_path / "told", config, tmp_path)
    files = [path for path in directory.path.rglob("*") if path.is_file() and "s3cr3t" in path.read_text()]
    assert files == [directory.secrets_file]
    assert directory.config().notify.url == MASK
    assert "s3cr3t" not in repr(config)
    assert Experiment.resume(directory.path).config.notify.url == url
    with pytest.raises(ConfigError) as refused:
        load_config({**CONFIG, "notify": {"url": "hooks.example/s3cr3t-t0k3n"}})
    assert "must be a URL that begins with https://" in str(refused.value)
    assert "s3cr3t" not in str(refused.value)


def test_a_command_that_takes_too_long_ends_with_what_it_has_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notify, "TIMEOUT_S", 0.5)
    os.mkfifo(tmp_path / "held")
    reader = os.open(tmp_path / "held", os.O_RDONLY | os.O_NONBLOCK)
    with pytest.raises(subprocess.TimeoutExpired):
        notify._run(f"sleep 600 > {tmp_path / 'held'} & wait", dict(os.environ))  # noqa: SLF001
    os.set_blocking(reader, True)
    assert os.read(reader, 1) == b"", "nobody holds its other end"
    os.close(reader)


def test_a_redirection_is_not_followed(webhook: Webhook) -> None:
    """It would go to another address, without what is to be told."""
    webhook.status = 302
    with pytest.raises(urllib.error.HTTPError, match="302"):
        notify._post(webhook.url, b'{"state": "completed"}')  # noqa: SLF001
    assert webhook.received == [{"state": "completed"}]
