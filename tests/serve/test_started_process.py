"""How a server notices the end of a process that was to open an experiment, whenever it comes."""

from __future__ import annotations

import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dray.config.load import load_config
from dray.records.directory import ExperimentDirectory
from dray.serve.control import Share
from dray.serve.core import ServerCore
from dray.serve.driver import Failed
from dray.serve.manager import Manager
from dray.serve.processes import Driver
from dray.serve.queue import Queue
from dray.serve.scheduler import SignalProcess

CONFIG: dict[str, Any] = {
    "name": "run",
    "entrypoint": "python3 train.py",
    "searcher": {"name": "single", "metric": "loss", "max_length": {"batches": 2}},
}


class Process(Driver):
    """One that has not started."""

    def __init__(self) -> None:
        self.path = self.failure = self.opened = self.exit_code = None
        self.met_full_disk = False

    def send(self, command: object) -> None:
        pass


class Spares:
    def __init__(self) -> None:
        self.process: Process | None = Process()

    def take(self) -> Process:
        if self.process is None:
            raise OSError("no memory")
        return self.process


@pytest.fixture
def server(tmp_path: Path) -> Any:
    """Without a cluster; its loop calls at once. An experiment waits."""
    manager = Manager.__new__(Manager)
    code = tmp_path / "code"
    code.mkdir()
    (code / "train.py").write_text("import dray\n")
    path = ExperimentDirectory.create(tmp_path / "run", load_config(CONFIG), code).path
    lender: Any = SimpleNamespace(step=lambda: None, demands={}, slots=lambda: 1.0, is_preempted=lambda demand: False)
    core = ServerCore(Queue([], lambda record: None), lambda emit: lender, manager._perform)  # noqa: SLF001
    vars(manager).update(
        _results=tmp_path,
        _core=core,
        _processes={},
        _scheduler=core.scheduler,
        _spares=Spares(),
        _fault="",
        _say=print,
    )
    manager._loop = SimpleNamespace(post=lambda call, *args: call(*args))  # type: ignore[assignment]  # noqa: SLF001
    manager._directory = tmp_path  # noqa: SLF001
    core.scheduler.submit(path, Share(), has_process=False)
    return manager


@pytest.mark.parametrize(("failure", "state"), [(Failed("its model can't be imported"), "ERROR"), (None, "RESTARTING")])
def test_one_that_ends_before_it_has_opened_its_experiment(server: Any, failure: Failed | None, state: str) -> None:
    server.settle()
    process = server._spares.process  # noqa: SLF001
    process.failure, process.exit_code, server._spares.process = failure, 1, Process()  # noqa: SLF001
    server._ended(process)  # noqa: SLF001 - called by the process's thread
    assert server._scheduler.experiment("run").state == state  # noqa: SLF001
    assert not server._processes, "or a server that ends would wait for it"  # noqa: SLF001


def test_one_that_ended_before_the_server_took_it(server: Any) -> None:
    server._spares.process.exit_code = -9  # noqa: SLF001
    server.settle()
    assert server._scheduler.experiment("run").state == "RESTARTING"  # noqa: SLF001


def test_one_that_could_not_be_started_is_tried_again_and_holds_up_nobody(server: Any) -> None:
    waiting, server._spares.process = server._spares.process, None  # noqa: SLF001
    server._core._effects.append(SignalProcess("run", signal.SIGTERM))  # noqa: SLF001 - to one that has just ended
    with pytest.raises(OSError, match="no memory"):
        server.settle()
    assert not server._processes  # noqa: SLF001
    server._spares.process = waiting  # noqa: SLF001
    server.settle()
    assert server._processes == {"run": waiting}  # noqa: SLF001
