"""The alerts of a server: to the receivers of its settings, and of experiments that can't tell of their end."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dray.config.notify import ServerNotify, Watched
from dray.experiment.alerts import end_text
from dray.experiment.notify import Courier, Notifier, message
from dray.records.directory import ExperimentDirectory
from dray.records.listing import StoredExperiment
from dray.records.numbering import number_of
from dray.records.secrets import with_secrets
from dray.serve.effects import Ended
from dray.serve.idle import IdleSlots
from dray.text import one_line, seconds_of

END_S = 10.0  # how long the end of a server waits for its alerts

log = logging.getLogger(__name__)


class ServerAlerts:
    """Sends the alerts of a server. No method waits.

    Args:
        wanted: the server's settings.
        say: called with what the server tells its terminal.
    """

    def __init__(self, wanted: ServerNotify, say: Callable[[str], None]) -> None:
        self._wanted, self._say = wanted, say
        self.watched = Watched.by(wanted)
        self._courier = Courier(wanted)
        self._telling: list[threading.Thread] = []  # experiments' own receivers
        self._raised: set[tuple[Path, int, str]] = set()
        self._idle = None if wanted.idle is None else IdleSlots(seconds_of(wanted.idle))

    def raised(self, path: Path, alert: Mapping[str, Any]) -> None:
        """An experiment's driver has raised an alert."""
        kind, text, this = alert["kind"], alert["text"], (path, alert["id"], alert["key"])
        if this in self._raised:  # before, by a driver that was killed before it noted that
            return
        self._raised.add(this)
        if self._wanted.wants(kind, alert["level"]):
            more = {"id": alert["id"], "time": alert.get("time")}
            self._courier.send(lambda: message(ExperimentDirectory(path), kind, text, **more))

    def ended(self, path: Path, end: Ended) -> None:
        """An experiment has ended."""
        if self._wanted.wants(end.outcome):
            self._courier.send(lambda: _end_message(path, end))
        if end.by_server:
            self._telling = [each for each in self._telling if each.is_alive()]
            self._telling.append(threading.Thread(target=_tell_own, args=(path, end), name="dray-notify", daemon=True))
            self._telling[-1].start()

    @property
    def watches_slots(self) -> bool:
        return self._idle is not None

    def look(self, slots: float, free: float, kind: str, waiting: Sequence[str]) -> None:
        """Note which slots have no trial, see `IdleSlots.look`. Call it periodically."""
        if self._idle is not None and (text := self._idle.look(time.monotonic(), slots, free, kind, waiting)):
            self._say(text)
            told = {"event": "idle", "text": f"server on {socket.gethostname()}: {text}", "time": time.time()}
            self._courier.send(lambda: told)

    def close(self) -> None:
        """Wait a little for what is being sent."""
        until = time.monotonic() + END_S
        self._courier.wait(END_S)
        for each in self._telling:
            each.join(max(until - time.monotonic(), 0))


def _end_message(path: Path, end: Ended) -> dict[str, Any]:
    directory = ExperimentDirectory(path)
    seen = StoredExperiment.here(directory, number_of(path)).overview()
    return message(directory, end.outcome, end_text(seen, end.outcome, end.error))


def _tell_own(path: Path, end: Ended) -> None:
    """Tell an experiment's own receivers of its end, as its process has died too often to do so."""
    directory = ExperimentDirectory(path)
    try:
        config = with_secrets(directory.config(), directory.secrets_file)
        Notifier(config.notify, directory).ended(end.outcome, end.error)
    except (OSError, ValueError) as error:
        log.warning("nobody is notified of the end of %s: %s", path.name, one_line(error))
