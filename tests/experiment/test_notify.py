"""Who is told about an experiment: by a real HTTP server, and a real command."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import threading
import urllib.error
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from dray.config.load import load_config
from dray.config.notify import Notify
from dray.errors import AlreadyEnded, ConfigError
from dray.experiment import notify
from dray.experiment.experiment import Experiment
from dray.experiment.notify import Notifier
from dray.masking import MASK
from dray.records.directory import ExperimentDirectory
from dray.records.listing import StoredExperiment
from searchers.journal import Journal
from tests.experiment.test_existing import finished, resume

CONFIG: dict[str, Any] = {
    "name": "told",
    "entrypoint": "python3 train.py",
    "searcher": {"name": "single", "metric": "loss", "max_length": {"batches": 2}},
}


class Webhook(HTTPServer):
    """Keeps what it is sent; answers with each of ``statuses``, and then with the last one."""

    def __init__(self) -> None:
        self.received: list[dict[str, Any]] = []
        self.statuses = [200]
        self.may_answer = threading.Event()
        self.may_answer.set()
        super().__init__(("127.0.0.1", 0), _Answer)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/services/s3cr3t-t0k3n"


class _Answer(BaseHTTPRequestHandler):
    server: Webhook

    def do_POST(self) -> None:
        self.server.received.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.server.may_answer.wait()
        statuses = self.server.statuses
        self.send_response(statuses.pop(0) if len(statuses) > 1 else statuses[0])
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


def run(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    notify: dict[str, Any],
    error: BaseException | None,
    happens: Callable[[Notifier, Journal], None] = lambda notifier, journal: None,
) -> ExperimentDirectory:
    """Create an experiment whose search ends with this error, or resume it, and run it."""

    def ends(self: Experiment, directory: ExperimentDirectory, interrupts: Any, notifier: Notifier, *_: Any) -> Any:
        with Journal(directory.journal) as journal, notifier.writing(journal):
            journal.append({"event": "opened"})
            happens(notifier, journal)
        if error is not None:
            raise error

    monkeypatch.setattr(Experiment, "_run_in", ends)
    (tmp_path / "train.py").write_text("import dray\n")
    experiment = Experiment({**CONFIG, "notify": notify}, model_dir=tmp_path, path=tmp_path / "told")
    with contextlib.suppress(KeyboardInterrupt, ValueError, AlreadyEnded):
        experiment.run()
    return ExperimentDirectory(tmp_path / "told")


def events(directory: ExperimentDirectory, event: str) -> list[dict[str, Any]]:
    return [dict(each) for each in Journal.read(directory.journal) if each["event"] == event]


def alert(number: int = 0, **fields: Any) -> dict[str, Any]:
    """A record of the journal."""
    key = json.dumps(["trial_failed", None, number])
    known = {
        "event": "alert",
        "id": number,
        "kind": "trial_failed",
        "level": None,
        "key": key,
        "text": "trial 3 failed",
    }
    return {**known, **fields}


def test_the_webhook_and_the_command_learn_how_it_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, webhook: Webhook
) -> None:
    out = tmp_path / "told.txt"
    command = f'echo "$DRAY_NOTIFY_EVENT $DRAY_NOTIFY_EXPERIMENT $DRAY_NOTIFY_TEXT" > {out}; cat >> {out}'
    run(tmp_path, monkeypatch, {"url": webhook.url, "command": command}, ValueError("lost\n<everything> & more"))
    [posted] = webhook.received
    text = "experiment told failed; lost <everything> & more"
    assert posted.keys() == {"experiment", "event", "text", "time", "id"}
    assert (posted["experiment"], posted["event"], posted["id"]) == ("told", "failed", 0)
    assert posted["text"] == text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;"), "as in Slack"
    first, second = out.read_text().splitlines()
    assert first == f"failed told {text}"
    assert json.loads(second) == {**posted, "text": text}


def test_an_alert_of_a_server_leads_to_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, webhook: Webhook
) -> None:
    monkeypatch.setenv(notify.SERVED_AT, "https://hub.example.org/lab")
    run(tmp_path, monkeypatch, {"url": webhook.url}, None)
    [posted] = webhook.received
    assert posted["url"] == "https://hub.example.org/lab/#/e/told"
    assert posted["text"].endswith(f"\n{posted['url']}"), "what Slack shows"


def test_controls_in_an_error_are_told_as_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "told.txt"
    run(
        tmp_path,
        monkeypatch,
        {"command": f'printf %s "$DRAY_NOTIFY_TEXT" > {out}'},
        ValueError("a\0b\x1b[8m" + "c" * 9999),
    )
    assert out.read_text().startswith(r"experiment told failed; a\x00b\x1b[8mccc")
    assert len(out.read_text()) < 2100


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
    run(tmp_path, monkeypatch, {"url": webhook.url, "states": states}, error)
    assert [each["event"] for each in webhook.received] == told


def test_an_end_is_told_once_however_often_the_experiment_is_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, webhook: Webhook
) -> None:
    def ends(notifier: Notifier, journal: Journal) -> None:
        journal.append({"event": "ended", "reason": "budget.time is spent"})

    notify = {"url": webhook.url}
    run(tmp_path, monkeypatch, notify, None, ends)
    run(tmp_path, monkeypatch, notify, None)
    run(tmp_path, monkeypatch, notify, AlreadyEnded("it has ended"))
    assert [each["text"] for each in webhook.received] == ["experiment told completed; budget.time is spent"]
    run(tmp_path, monkeypatch, notify, None, ends)  # it has gone on
    assert len(webhook.received) == 2
    run(tmp_path, monkeypatch, notify, KeyboardInterrupt("SIGTERM"))
    run(tmp_path, monkeypatch, notify, KeyboardInterrupt("SIGTERM"))
    assert [each["event"] for each in webhook.received[2:]] == ["stopped", "stopped"]


def test_alerts_are_sent_while_the_search_goes_on_and_noted_in_the_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, webhook: Webhook
) -> None:
    def happens(notifier: Notifier, journal: Journal) -> None:
        webhook.may_answer.clear()
        for number in range(3):
            notifier.send(alert(number))  # returns though nobody answers
        notifier.send(alert(3, kind="no_gain", level=7))  # another receiver's
        webhook.may_answer.set()

    directory = run(tmp_path, monkeypatch, {"url": webhook.url, "states": ["failed"]}, None, happens)
    assert [each["text"] for each in webhook.received] == ["experiment told: trial 3 failed"] * 3
    assert [each["id"] for each in webhook.received] == [0, 1, 2]
    assert sorted(each["id"] for each in events(directory, "told")) == [0, 1, 2, 3]


def test_a_notification_that_fails_is_a_warning_without_the_url(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, webhook: Webhook, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(notify, "PAUSES_S", (0.0, 0.0))
    webhook.statuses = [404]
    directory = run(tmp_path, monkeypatch, {"url": webhook.url, "command": "exit 3"}, None)
    [told] = events(directory, "told")
    assert [told["error"]] == caplog.messages
    assert told["error"].startswith("notify.url answers with HTTP status 404; notify.command failed: Command 'exit 3'")
    with contextlib.closing(StoredExperiment.here(directory).read()) as reader:
        assert [(each["event"], each["text"], each["error"]) for each in reader.alerts] == [
            ("completed", "completed", told["error"])
        ]
    for url in (
        f"http://127.0.0.1:{webhook.server_port}/s3cr3t t0k3n",
        "http://[s3cr3t-t0k3n/",
        "http://127.0.0.1:9/t0k3n",
    ):
        (tmp_path / "told").rename(tmp_path / f"told-{len(caplog.messages)}")
        run(tmp_path, monkeypatch, {"url": url}, None)
        assert "notify.url can't be reached" in caplog.messages[-1]
    assert "t0k3n" not in caplog.text


@pytest.mark.parametrize(
    ("statuses", "posts", "fault"),
    [
        ([500, 429, 200], 3, ""),
        ([503], 3, "notify.url answers with HTTP status 503; tried 3 times"),
        ([400, 200], 1, "notify.url answers with HTTP status 400"),
    ],
)
def test_a_webhook_is_tried_again_after_a_passing_fault(
    monkeypatch: pytest.MonkeyPatch, webhook: Webhook, statuses: list[int], posts: int, fault: str
) -> None:
    monkeypatch.setattr(notify, "PAUSES_S", (0.0, 0.0))
    webhook.statuses = statuses
    assert notify.deliver(Notify(url=webhook.url), {"text": "a", "event": "budget"}) == fault
    assert len(webhook.received) == posts


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
    for given, what in (({"url": "hooks.example/s3cr3t-t0k3n"}, "a URL that begins with https://"), (url, "a mapping")):
        with pytest.raises(ConfigError) as refused:
            load_config({**CONFIG, "notify": given})
        assert f"must be {what}" in str(refused.value)
        assert "s3cr3t" not in str(refused.value)


def test_a_command_that_takes_too_long_ends_with_what_it_has_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notify, "TIMEOUT_S", 0.5)
    os.mkfifo(tmp_path / "held")
    reader = os.open(tmp_path / "held", os.O_RDONLY | os.O_NONBLOCK)
    with pytest.raises(subprocess.TimeoutExpired):
        notify._run(f"sleep 600 > {tmp_path / 'held'} & wait", {})  # noqa: SLF001
    os.set_blocking(reader, True)
    assert os.read(reader, 1) == b"", "nobody holds its other end"
    os.close(reader)


def test_a_webhook_that_answers_byte_by_byte_is_given_up(webhook: Webhook, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notify, "TIMEOUT_S", 0.5)
    over = threading.Event()

    def answer(self: _Answer) -> None:
        with contextlib.suppress(OSError):
            while not over.wait(0.1):
                self.wfile.write(b"H")

    monkeypatch.setattr(_Answer, "do_POST", answer)
    watchdog = threading.Timer(20, over.set)
    watchdog.start()
    with pytest.raises(TimeoutError):
        notify._post(webhook.url, b"{}")  # noqa: SLF001
    over.set()
    watchdog.cancel()


def test_a_redirection_is_not_followed(webhook: Webhook) -> None:
    """It would go to another address, without what is to be told."""
    webhook.statuses = [302]
    with pytest.raises(urllib.error.HTTPError, match="302"):
        notify._post(webhook.url, b'{"state": "completed"}')  # noqa: SLF001
    assert webhook.received == [{"state": "completed"}]


def test_the_next_driver_sends_what_one_that_was_killed_has_not_sent(tmp_path: Path) -> None:
    out, directory = tmp_path / "told", ExperimentDirectory(finished(tmp_path / "experiment"))
    config = yaml.safe_load(directory.config_file.read_text())
    config["notify"] = {"command": f'echo "$DRAY_NOTIFY_ID $DRAY_NOTIFY_EVENT $DRAY_NOTIFY_TIME" >> {out}'}
    directory.config_file.write_text(yaml.safe_dump(config))
    with Journal(directory.journal) as journal:
        journal.append({**alert(0), "time": 1.5})
        journal.append({"event": "told", "id": 0})
        journal.append({**alert(1), "time": 2.5})
    for _ in range(2):
        resume(directory.path).run()
        *sent, end = out.read_text().splitlines()
        assert sent == ["1 trial_failed 2.5"]
        assert end.startswith("2 completed ")


def test_a_server_gets_the_alerts_that_it_can_not_know(tmp_path: Path) -> None:
    sent: list[Any] = []
    notifier = Notifier(Notify(), ExperimentDirectory(finished(tmp_path / "experiment")), sent.append)
    for record in (alert(0), alert(1, kind="completed"), alert(2, kind="no_gain", level=3)):
        notifier.send(record)
    assert [each["id"] for each in sent] == [0, 2]
