"""What carries a server's decisions out, with processes that end when a test says so, and no Ray."""

from __future__ import annotations

import errno
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dray.cluster.connection import Cluster
from dray.config.load import load_config
from dray.config.yaml_file import mapping_in
from dray.errors import ConfigError
from dray.records.directory import ExperimentDirectory
from dray.records.spending import ALIVE_S
from dray.serve import creations, manager
from dray.serve.control import Share
from dray.serve.draft import Draft
from dray.serve.manager import Manager
from dray.serve.processes import FULL, STOPPED, Create, Failed, Open, Opened, Run
from dray.serve.queue import open_queue
from dray.serve.quota import Quota
from dray.serve.scheduler import MAX_DEATHS
from dray.serve.tokens import STATE, Tokens, create
from searchers.journal import Journal
from tests.groups.clusters import cluster
from tests.serve.conftest import TOKEN
from tests.serve.test_api import CONFIG
from tests.serve.test_processes import FakeDriver
from tests.serve.test_quota import RUN, item

RAY: Any = SimpleNamespace(
    cluster=Cluster(own=False, description="no cluster"),
    address=lambda: "head",
    host=lambda: "127.0.0.1",
    limits=lambda: None,
    look=lambda limits: cluster({"CPU": 1.0}),
    watch=lambda **told: SimpleNamespace(close=lambda: None, answers=lambda only_head: True),
)


@dataclass(eq=False)
class FakeProcess(FakeDriver):
    """As `dray.serve.processes.ExperimentProcess`; with `dies_at_once`, before it is assigned to an experiment."""

    ended: Callable[[Any], None] = print
    dies_at_once: bool = False
    received: list[object] = field(default_factory=list)

    def send(self, command: object) -> None:
        self.received.append(command)
        if isinstance(command, Create):
            path = command.link.parents[2] / f"created{len(command.imported) or ''}"
            creations.begin(command.link, path)
            ExperimentDirectory.create(path, command.read.config, None)
            self.opened, self.path = Opened(path, Share(), {}, {}, (), path.name), path
        if self.dies_at_once:
            self.exit_code = -9

    def signal(self, number: int) -> None:
        super().signal(number)
        self.exit_code = -number
        self.ended(self)


@dataclass
class Server:
    """A manager on one slot, or the one after a server that was killed, and the processes that it has started."""

    results: Path
    die_at_once: bool = False
    most: int = 99  # processes that fit into the memory
    processes: list[FakeProcess] = field(default_factory=list)

    def submitted(self, name: str, owner: str = "") -> None:
        """The last server has accepted an experiment."""
        journal = Journal(self.results / STATE / "queue.jsonl")
        open_queue(journal).add(self.results / name, Share(), owner=owner, budget={"slot_hours": 1000.0})
        journal.close()
        if not (self.results / name).exists():
            ExperimentDirectory.create(self.results / name, load_config(mapping_in(CONFIG, "")), None)

    def process(self, group: object, home: str, ended: Callable[[Any], None], **_: object) -> FakeProcess:
        if len(self.processes) == self.most:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        process = FakeProcess(ended=ended, dies_at_once=self.die_at_once)
        self.processes.append(process)
        return process

    def start(self) -> Manager:
        self.manager = Manager(RAY, Tokens(self.results, TOKEN), idle_s=60.0, say=lambda line: None)
        self.settle()
        return self.manager

    def settle(self) -> None:
        """Each question is answered after what is due already, and what follows from that is due before the next."""
        for _ in range(10):
            self.manager.experiments()


@pytest.fixture
def server(results: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    server = Server(results)
    (results / STATE).mkdir(mode=0o700)
    monkeypatch.setattr(manager, "ExperimentProcess", server.process)
    monkeypatch.setattr(manager, "outside", lambda read, *given: read(*given))
    yield server
    server.manager.close()


def test_a_token_has_used_what_its_experiments_spent_until_a_kill(server: Server) -> None:
    create(server.results, "agent", "submit", Quota(slot_hours=2000.0))
    item(server.results / "a", RUN, {})
    server.submitted("a", "agent")
    used = server.start().use("agent").used["slot_hours"] * 3600
    assert 20 < used < 20 + 3 * ALIVE_S, "two slots for ten seconds, and what may have followed the last sign of life"


def test_the_end_of_a_process_that_was_not_assigned_yet_counts(server: Server) -> None:
    server.submitted("a")
    server.die_at_once = True
    found = server.start().experiment("a")
    assert (found.state, found.restarts) == ("ERROR", MAX_DEATHS)
    created = server.manager.submit(Draft(config=CONFIG), Path("code"))
    server.settle()
    assert server.manager.experiment(created.name).state == "ERROR", "others were tried after the one that created it"


@pytest.mark.parametrize(
    ("code", "failure", "state", "restarts"),
    [
        (STOPPED, None, "QUEUED", 0),
        (FULL, Failed("can't write"), "RESTARTING", 1),
        (1, Failed("no such class"), "ERROR", 0),
        (1, None, "RESTARTING", 1),
    ],
)
def test_the_exit_code_says_how_it_ended(
    server: Server, code: int, failure: Failed | None, state: str, restarts: int
) -> None:
    server.submitted("a")
    server.start()
    process = server.processes[0]
    process.exit_code, process.failure = code, failure
    process.ended(process)
    server.settle()
    found = server.manager.experiment("a")
    assert (found.state, found.restarts) == (state, restarts)


def test_a_server_that_stops_lets_trials_save_and_keeps_its_queue(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manager, "STEP_S", 0.0)
    server.submitted("a")
    server.start().stop()
    assert [each.signals for each in server.processes] == [[signal.SIGTERM], [signal.SIGKILL]]
    found = server.manager.experiment("a")
    assert (found.state, found.restarts) == ("QUEUED", 0)


def test_the_process_that_created_an_experiment_ends_if_it_waits(server: Server) -> None:
    for name in ("a", "b"):
        server.submitted(name)
    created = server.start().submit(Draft(config=CONFIG), Path("code"))
    assert created.state == "QUEUED"
    assert [each.signals for each in server.processes if each.opened is not None] == [[9]]


def test_of_a_refused_experiment_neither_process_nor_directory_stays(server: Server) -> None:
    create(server.results, "agent", "submit", Quota(priority=50))
    with pytest.raises(ConfigError, match="must be 50 or more"):
        server.start().submit(Draft(config=CONFIG.replace("priority: 10", "priority: 60")), Path("code"), "agent")
    assert [each.signals for each in server.processes if each.opened is not None] == [[9]]
    assert not (server.results / "created").exists()


def test_without_memory_for_a_process_an_experiment_waits_for_it(server: Server) -> None:
    server.submitted("a")
    server.most = 1
    server.start()
    assert [each.received for each in server.processes] == [[]]
    server.most = 99
    server.settle()
    opens = Open(path=server.results / "a", extension={})
    assert [each.received for each in server.processes if each.received] == [[opens, Run("")]]


def test_a_process_that_ends_on_a_full_disk_has_not_died(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    server.submitted("a")
    server.start()
    monkeypatch.setattr(manager, "why_full", lambda results: "the disk is full")
    server.processes[0].signal(9)
    server.settle()
    found = server.manager.experiment("a")
    assert (found.restarts, found.error[:16]) == (0, "the disk is full")


def test_processes_are_told_what_others_have_imported(server: Server) -> None:
    server.start()
    for _ in range(3):
        server.manager.submit(Draft(config=CONFIG), Path("code"))
    told = [each.imported for process in server.processes for each in process.received if isinstance(each, Create)]
    assert told == [set(), {"created"}, {"created", "created1"}]
