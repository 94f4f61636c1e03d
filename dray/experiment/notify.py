"""Notifications about an experiment's end, as configured in the section ``notify``."""

from __future__ import annotations

import http.client
import json
import logging
import os
import signal
import subprocess
import urllib.error
import urllib.request

from dray.config.sections import Notify, Outcome
from dray.records.directory import ExperimentDirectory
from dray.records.listing import StoredExperiment
from dray.text import counted, one_line

TIMEOUT_S = 10.0  # timeout of the webhook, and of the command

log = logging.getLogger(__name__)


def notify(wanted: Notify, directory: ExperimentDirectory, state: Outcome, error: str = "") -> None:
    """Call the webhook and the command of the config's section. Failures are warnings, which do not contain the
    webhook's URL."""
    if state not in wanted.states or not (wanted.url or wanted.command):
        return
    try:
        seen = StoredExperiment.here(directory).overview()
    except (OSError, ValueError) as fault:
        log.warning("nobody is notified, as the experiment can't be read: %s", one_line(fault))
        return
    parts = [f"experiment {seen.label} {state}", seen.reason, one_line(error)]
    if seen.best is not None:
        parts.append(f"best {seen.metric} {seen.best:g} (trial {seen.best_trial})")
    if seen.failed:
        parts.append(f"{seen.failed} of {counted(seen.trials, 'trial')} failed")
    told = {"experiment": seen.name, "state": state, "text": "; ".join(part for part in parts if part)}
    if wanted.url is not None:
        try:
            _post(wanted.url, json.dumps(told).encode())
        except urllib.error.HTTPError as error:
            log.warning("notify.url answers with HTTP status %d", error.code)
        except (OSError, ValueError, http.client.HTTPException) as error:
            why = one_line(getattr(error, "reason", "")) or type(error).__name__
            log.warning("notify.url can't be reached: %s", why.replace(wanted.url, "..."))
    if wanted.command is not None:
        environment = {**os.environ, **{f"DRAY_NOTIFY_{name.upper()}": value for name, value in told.items()}}
        try:
            _run(wanted.command, environment)
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            log.warning("notify.command failed: %s", one_line(error))


def _run(command: str, environment: dict[str, str]) -> None:
    with subprocess.Popen(
        command, shell=True, env=environment, stdin=subprocess.DEVNULL, start_new_session=True
    ) as process:
        try:
            code = process.wait(TIMEOUT_S)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)  # the shell and its child processes
            raise
    if code:
        raise subprocess.CalledProcessError(code, command)


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Refuses redirections: a redirected POST would become a GET without content, to a URL of the server's choice."""

    def redirect_request(self, *_: object) -> None:
        return None


def _post(url: str, body: bytes) -> None:
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    # The response is not read: it may be endless.
    urllib.request.build_opener(_NoRedirects).open(request, timeout=TIMEOUT_S).close()
