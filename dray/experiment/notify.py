"""Sends alerts to the receivers that a section ``notify`` names, in a thread that nothing waits for but the end."""

from __future__ import annotations

import contextlib
import functools
import http.client
import json
import logging
import os
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, get_args
from urllib.parse import quote

from dray.config.notify import Notify, Outcome
from dray.experiment.alerts import end_text
from dray.records.directory import ExperimentDirectory
from dray.records.listing import StoredExperiment
from dray.records.numbering import number_of
from dray.text import cut, one_line, printable
from searchers.errors import DamagedFile, JournalError
from searchers.journal import Journal

TIMEOUT_S = 10.0  # of each request to the webhook, and of the command
PAUSES_S = (1.0, 4.0)  # before the webhook is tried again
END_S = 40.0  # how long the end of an experiment waits for its alerts
MAX_WAITING = 1000  # alerts that wait while a receiver is slow; further ones are dropped
MAX_TEXT = 2000  # most letters of an alert
SERVED_AT = "DRAY_SERVED_AT"
"""The environment variable with the address of the page, in the processes of a server."""
_AGAIN = (408, 425, 429)  # HTTP's statuses, besides 5xx, after which another try may succeed

log = logging.getLogger(__name__)


def message(where: ExperimentDirectory, kind: str, text: str, **more: Any) -> dict[str, Any]:
    """What receivers get about an experiment."""
    number, name = number_of(where.path), where.path.name
    label = name if number is None else f"{number}: {name}"
    words = f"experiment {label}{'' if kind in get_args(Outcome) else ':'} {text}"
    told = {"experiment": name, "event": kind, "text": cut(printable(words), MAX_TEXT), "time": time.time()}
    if server := os.environ.get(SERVED_AT):
        more["url"] = f"{server}/#/e/{quote(name)}"
    return {**told, **{field: value for field, value in more.items() if value is not None}}


def deliver(wanted: Notify, told: Mapping[str, Any]) -> str:
    """Call the webhook and the command. Returns what failed, in words without the webhook's URL; "" if nothing did."""
    faults = []
    if wanted.url is not None and (fault := _posted(wanted.url, json.dumps(_for_chat(told)).encode())):
        faults.append(fault)
    if wanted.command is not None:
        try:
            _run(wanted.command, told)
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            faults.append(f"notify.command failed: {one_line(error)}")
    return "; ".join(faults)


def _for_chat(told: Mapping[str, Any]) -> dict[str, Any]:
    """With a text as Slack wants it: the page's address is a link, an error's <pad> is none, and its <!channel> calls
    nobody."""
    text = "\n".join([str(told["text"]), *([told["url"]] if "url" in told else [])])
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return {**told, "text": text}


def _posted(url: str, body: bytes) -> str:
    """Post to a webhook, again after a passing fault. Returns the last fault, in words."""
    fault = ""
    for pause_s in (0.0, *PAUSES_S):
        time.sleep(pause_s)
        try:
            _post(url, body)
        except urllib.error.HTTPError as error:
            fault = f"notify.url answers with HTTP status {error.code}"
            if error.code < 500 and error.code not in _AGAIN:
                return fault
        except (OSError, http.client.HTTPException) as error:
            why = one_line(getattr(error, "reason", "")) or type(error).__name__
            fault = f"notify.url can't be reached: {why.replace(url, '...')}"
            if isinstance(error, http.client.InvalidURL):
                return fault
        except ValueError as error:
            return f"notify.url can't be reached: {type(error).__name__}"
        else:
            return ""
    return f"{fault}; tried {1 + len(PAUSES_S)} times"


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Refuses redirections: a redirected POST would become a GET without content, to a URL of the server's choice."""

    def redirect_request(self, *_: object) -> None:
        return None


def _post(url: str, body: bytes) -> None:
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    faults: list[Exception] = []

    def post() -> None:
        try:
            # The response is not read: it may be endless.
            urllib.request.build_opener(_NoRedirects).open(request, timeout=TIMEOUT_S).close()
        except Exception as error:
            faults.append(error)

    # The timeout is that of each single read; a name, or headers byte by byte, may take forever.
    thread = threading.Thread(target=post, name="dray-notify-post", daemon=True)
    thread.start()
    thread.join(TIMEOUT_S)
    if thread.is_alive():
        raise TimeoutError
    if faults:
        raise faults[0]


def _run(command: str, told: Mapping[str, Any]) -> None:
    fields = {f"DRAY_NOTIFY_{name.upper()}": str(value) for name, value in told.items()}
    with subprocess.Popen(
        command, shell=True, env={**os.environ, **fields}, stdin=subprocess.PIPE, start_new_session=True
    ) as process:
        try:
            process.communicate(json.dumps(told).encode(), TIMEOUT_S)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)  # the shell and its child processes
            raise
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)


class Courier:
    """Sends messages one after another, in a thread that is there while there are some."""

    def __init__(self, wanted: Notify) -> None:
        self._wanted = wanted
        self._waiting: deque[tuple[Callable[[], Mapping[str, Any]], Callable[[str], None]]] = deque()
        self._changed = threading.Condition()

    def send(self, make: Callable[[], Mapping[str, Any]], sent: Callable[[str], None] = lambda fault: None) -> None:
        """Send what ``make`` returns, and call ``sent`` with what failed, or "". Both happen in the thread."""
        with self._changed:
            if len(self._waiting) >= MAX_WAITING:
                log.warning("an alert is dropped, as %d others wait", len(self._waiting))
                return
            self._waiting.append((make, sent))
            if len(self._waiting) == 1:
                threading.Thread(target=self._work, name="dray-notify", daemon=True).start()

    def wait(self, at_most_s: float) -> bool:
        """Wait until all messages are sent. Returns whether they are."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting, at_most_s)

    def _work(self) -> None:
        while True:
            make, sent = self._waiting[0]
            try:
                if fault := deliver(self._wanted, make()):
                    log.warning("%s", fault)
                sent(fault)
            except Exception as error:  # whatever it is, the search goes on
                log.warning("nobody is notified: %s", one_line(error))
            with self._changed:
                self._waiting.popleft()
                self._changed.notify_all()
                if not self._waiting:
                    return


class Notifier:
    """The alerts of an experiment's driver: to the receivers of its config, and to a server.

    Args:
        also: called with each alert but those of the end, for the server's own receivers.
    """

    def __init__(
        self,
        wanted: Notify,
        directory: ExperimentDirectory,
        also: Callable[[Mapping[str, Any]], None] = lambda alert: None,
    ) -> None:
        self._wanted, self._directory, self._also = wanted, directory, also
        self._courier = Courier(wanted)
        self._lock = threading.Lock()
        self._told: list[dict[str, Any]] | None = None  # None: nobody has the journal open

    def send(self, alert: Mapping[str, Any]) -> None:
        """Send an alert of the journal, and note that. Returns at once."""
        number, kind, at = alert["id"], alert["kind"], alert.get("time")
        if kind not in get_args(Outcome):  # a server knows the ends of its experiments
            self._also(alert)
        if self._wanted.wants(kind, alert["level"]):
            make = functools.partial(message, self._directory, kind, alert["text"], id=number, time=at)
            self._courier.send(make, functools.partial(self._sent, number))
        else:
            self._sent(number, "")

    def told(self) -> list[dict[str, Any]]:
        """New records about what was sent, for the journal that is open."""
        with self._lock:
            found, self._told = self._told or [], []
        return found

    @contextlib.contextmanager
    def writing(self, journal: Journal) -> Iterator[None]:
        """Keep the records about what was sent for `told` within the block. Then wait for what is being sent, and write
        the others."""
        self._told = []
        try:
            yield
        finally:
            self._courier.wait(END_S)
            with self._lock:
                left, self._told = self._told, None
            with contextlib.suppress(OSError):  # a full disk
                for record in left:
                    journal.append(record)

    def ended(self, state: Outcome, error: str = "") -> None:
        """Tell how the experiment has ended, unless that was told before. The journal must not be open."""
        if not self._wanted.wants(state):
            return
        here = StoredExperiment.here(self._directory, number_of(self._directory.path))
        try:
            with contextlib.closing(here.read()) as reader:
                seen, alerts, is_told = reader.overview(), reader.alerts, reader.is_end_told
        except (OSError, ValueError) as fault:
            log.warning("nobody is notified, as the experiment can't be read: %s", one_line(fault))
            return
        if is_told and alerts[-1]["event"] == state != "stopped":
            return
        text, number = cut(end_text(seen, state, error), MAX_TEXT), 1 + max((each["id"] for each in alerts), default=-1)
        self._note({"event": "alert", "id": number, "kind": state, "level": None, "key": "", "text": text})
        make = functools.partial(message, self._directory, state, text, id=number)
        self._courier.send(make, functools.partial(self._sent, number))
        self._courier.wait(END_S)

    def _sent(self, number: int, fault: str) -> None:
        self._note({"event": "told", "id": number, **({"error": fault} if fault else {})})

    def _note(self, record: Mapping[str, Any]) -> None:
        stamped = {**record, "time": time.time()}
        with self._lock:
            if self._told is not None:
                self._told.append(stamped)
                return
        with contextlib.suppress(OSError, DamagedFile, JournalError), Journal(self._directory.journal) as journal:
            journal.append(stamped)  # suppressed: a full disk, a damaged journal, or another driver
