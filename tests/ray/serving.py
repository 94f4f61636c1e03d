"""A server in a process of its own, for tests on a real Ray."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

from dray.code.archive import pack
from dray.serve.client import Server, Unreachable
from dray.serve.control import ExperimentState, Submitted
from tests.ray.harness import ROOT, TRIALS, descendants, recorded, wait_for

SERVE = """
from pathlib import Path
from dray.config.server_settings import server_notify
from dray.serve.server import serve
settings = {settings!r}
notify = server_notify(Path(settings)) if settings else None
serve("127.0.0.1", 18265, None, {idle_s}, lambda line: print(line, flush=True), notify)
"""


class Served:
    """``dray serve`` on the results directory ``home``, with the Ray cluster that RAY_ADDRESS names.

    Args:
        home: the results directory.
        idle_s: after this time, groups end that no experiment needs.
        settings: a file with the server's settings.
    """

    def __init__(self, home: Path, *, idle_s: float = 60, settings: Path | None = None, **environment: str) -> None:
        self.home, self.log = home, home.with_suffix(".txt")
        self._idle_s, self._environment = idle_s, environment
        self._settings = "" if settings is None else str(settings)
        home.mkdir(parents=True, exist_ok=True)
        self.process = self._start()
        self.client = self._find()

    def _start(self) -> subprocess.Popen[bytes]:
        with self.log.open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-c", SERVE.format(idle_s=self._idle_s, settings=self._settings)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env={**os.environ, "DRAY_HOME": str(self.home), **self._environment},
                start_new_session=True,
            )

    def _find(self) -> Server:
        def found() -> Server | None:
            assert self.process.poll() is None, self.log.read_text()
            server = Server.find(self.home)
            with contextlib.suppress(Unreachable):
                if server is not None:
                    server.status()
                    return server
            return None

        return wait_for(found, "the server")

    def submit(self, name: str, *, code: Path = TRIALS, **fields: Any) -> Submitted:
        """Submit a `recorded` experiment, whose trials write to ``<home>/../<name>``."""
        options: dict[str, Any] = {"trials": 1, "batches": 20, **fields}
        config = recorded(self.record(name), **options)
        return self.client.submit(yaml.safe_dump({**config, "name": name}), pack(code))

    def record(self, name: str) -> Path:
        """What the trials of an experiment of this name have noted."""
        return self.home.parent / f"{name}.record"

    def path(self, submitted: Submitted) -> Path:
        """An experiment's directory."""
        return self.home / submitted.name

    def wait_for(self, condition: Callable[[], Any], what: str) -> Any:
        """As of the harness; shows the logs if it takes too long."""
        try:
            return wait_for(condition, what)
        except TimeoutError as error:
            logs = [self.log, *self.home.glob("*/driver.log")]
            raise AssertionError("\n".join([str(error), *(f"---- {log}\n{log.read_text()}" for log in logs)])) from None

    def wait_until(self, submitted: Submitted, *states: ExperimentState) -> Submitted:
        """Wait until an experiment is in one of these states."""

        def reached() -> Submitted | None:
            now = self.client.experiment(submitted.name)
            return now if now.state in states else None

        found: Submitted = self.wait_for(reached, f"{submitted.name} to be {' or '.join(states)}")
        return found

    def drivers(self) -> list[int]:
        """Process ids of experiments' processes, and of the spare one."""
        table = descendants(self.process.pid)
        return [pid for pid in table if _is_driver(pid)]

    def driver_of(self, submitted: Submitted) -> int | None:
        """The process id of an experiment's process: the one that has its journal open."""
        journal = str(self.path(submitted) / "journal.jsonl")
        for pid in self.drivers():
            with contextlib.suppress(OSError):
                if any(os.readlink(each) == journal for each in Path(f"/proc/{pid}/fd").iterdir()):
                    return pid
        return None

    def kill(self) -> None:
        """kill -9."""
        self.process.kill()
        self.process.wait()

    def restart(self) -> None:
        """Start it again."""
        self.process = self._start()
        self.client = self._find()

    def close(self) -> None:
        """End it: it has its trials save first."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
                raise AssertionError(f"the server has not ended:\n{self.log.read_text()}") from None


def _is_driver(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return b"forkserver" in Path(f"/proc/{pid}/cmdline").read_bytes() and _parent_is_forkserver(pid)
    return False


def _parent_is_forkserver(pid: int) -> bool:
    parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]
    return b"forkserver" in Path(f"/proc/{parent}/cmdline").read_bytes()


@contextlib.contextmanager
def served(home: Path, **options: Any) -> Iterator[Served]:
    """A server within the block."""
    server = Served(home, **options)
    try:
        yield server
    finally:
        server.close()


def copy_of(code: Path, to: Path, **changes: tuple[str, str]) -> Path:
    """A copy of a model directory in which texts of some files are replaced: ``module=(old, new)``."""
    shutil.copytree(code, to, ignore=shutil.ignore_patterns("__pycache__"))
    for module, (old, new) in changes.items():
        file = to / f"{module}.py"
        text = file.read_text()
        assert old in text, (file, old)
        file.write_text(text.replace(old, new))
    return to
