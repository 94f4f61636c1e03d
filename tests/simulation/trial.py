"""Worker processes, and the trials that they run: these count their batches in the real loop, and save real checkpoints
through the host and the saver that ship. Only what needs torch, or changes the process itself, is left out."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import IO, Any

from dray import core
from dray.code.factory import FromDirectory
from dray.core import DistributedContext
from dray.core import context as core_context
from dray.hosts import current_host
from dray.imports import is_installed
from dray.leases import failure
from dray.rpc.calls import PeerUnreachable
from dray.rpc.connection import Connection
from dray.script import Script
from dray.training.checkpoint.checkpointer import Saver
from dray.training.checkpoint.files import Contents, read_progress
from dray.training.host import Report
from dray.training.loop import Outcome, Publish, Train, Validate, drive
from dray.training.plan import Plan
from dray.training.progress import Progress
from dray.worker import hang, lease_loop
from dray.worker import trial as worker_trial
from dray.worker.host import RayHost, RayProgramHost
from dray.worker.log.trial_log import TrialLog
from dray.worker.ranks import Place, Ranks
from dray.worker.spec import WorkerSpec
from tests.simulation.kernel import Process

BIG = 1 << 30
"""A checkpoint of so many bytes is written in the background."""


class OwnProcess:
    """In place of `ProcessSnapshot`: a simulated process has nothing to restore."""

    def load(self, load: Callable[[], Any]) -> Any:
        return load()

    def run(self, trial: Callable[[], Any], *_: object) -> tuple[Any, list[str]]:
        return trial(), []


@contextlib.contextmanager
def _joined(ranks: Ranks, place: Place, meet: Callable[[tuple[str, int]], object]) -> Iterator[None]:
    """In place of `dray.worker.process_group.joined`, which changes the process."""
    meet((place.ip, 1))
    yield


@contextlib.contextmanager
def _logged(path: Path, secrets: object) -> Iterator[TrialLog]:
    """In place of `redirect_output`: simulated processes share their output."""
    yield TrialLog(path, -1, flush=lambda: None)


@contextlib.contextmanager
def _appending(path: Path, secrets: object) -> Iterator[IO[str]]:
    """In place of `appending`."""
    yield io.StringIO()


class Trials:
    """What the trials of a schedule do, and what is told about them.

    Attributes:
        batch_s: how long a batch takes.
    """

    batch_s: float

    def plan(self, host: RayHost) -> Plan:
        raise NotImplementedError

    def loss(self, host: RayHost, batches: int) -> float:
        return 1 / (1 + batches)

    def is_program(self, code: Path) -> bool:
        """Whether this directory contains a program, and no class."""
        return False

    def check(self, host: RayHost) -> None:
        """Raise an error for invalid hyperparameters."""

    def fail(self, host: RayHost, batch: int) -> None:
        """Raise the error of a trial in this batch, if it has one."""

    def begins(self, host: RayHost, at: Progress) -> None:
        """A trial begins, or goes on from a checkpoint."""

    def answered(self, host: RayHost, batches: int) -> None:
        """A trial knows the search's decision on its report."""

    def train(
        self,
        trial_class: object,
        config: Mapping[str, Any],
        *,
        max_length: object = None,
        latest_checkpoint: str | None = None,
    ) -> None:
        """In place of `dray.pytorch.trainer.train_class`."""
        host = current_host()
        assert isinstance(host, RayHost)
        _Training(self, host, latest_checkpoint).run()


class Program(Script):
    """A program with a loop of its own, written with the core API."""

    trials: Trials

    def run(self, directory: Path) -> None:
        trials, host = self.trials, current_host()
        assert isinstance(host, RayProgramHost)
        trials.check(host)
        with core.init(tensorboard_mode=core.TensorboardMode.MANUAL) as context:
            at = 0
            if host.latest_checkpoint is not None:
                with context.checkpoint.restore_path(host.latest_checkpoint) as path:
                    at = int((path / "weights").read_text())
            trials.begins(host, Progress(batches=at))
            saved = at
            for operation in context.searcher.operations():
                while at < operation.length and not context.preempt.should_preempt():
                    time.sleep(trials.batch_s)
                    trials.fail(host, at + 1)
                    at += 1
                    context.train.report_training_metrics(at, {"loss": 0.5})
                if at > saved:
                    with context.checkpoint.store_path({"steps_completed": at}) as (path, _):
                        (path / "weights").write_text(str(at))
                    saved = at
                if at < operation.length:
                    return
                operation.report_completed(trials.loss(host, at))
                trials.answered(host, at)


class _Training:
    """One trial's training in one lease, like `Trainer.fit` and `Executor`."""

    def __init__(self, trials: Trials, host: RayHost, checkpoint: str | None) -> None:
        self._trials, self._host = trials, host
        self._random = Random(f"trial:{host.lease.trial_id}:{host.lease.number}")
        trials.check(host)
        at = Progress()
        if checkpoint is not None:
            directory = host.open_checkpoint(checkpoint)
            at = read_progress(directory)
            assert int((directory / "weights").read_text()) == at.batches, "the weights are of another batch"
        self._at, self._trained = at, at.batches
        trials.begins(host, at)
        self._saver = Saver(host, on_gpu=Random(f"gpu:{host.lease.trial_id}:{host.lease.number}").random() < 0.5)
        self._validation: dict[str, object] | None = None

    def run(self) -> None:
        steps, outcome = drive(self._trials.plan(self._host), self._at), None
        self._host.watch(lambda: (self._trained, 0))
        while True:
            try:
                command = next(steps) if outcome is None else steps.send(outcome)
            except StopIteration:
                self._saver.finish()
                return
            try:
                match command:
                    case Train():
                        outcome = self._train(command)
                    case Validate():
                        outcome = self._validate(command)
                    case Publish():
                        outcome = self._publish(command)
            except BaseException:
                self._saver.abandon()
                raise

    def _train(self, command: Train) -> Outcome:
        began = self._trained
        while self._trained < command.until and not (self._saver.stops() or self._host.stop_requested()):
            time.sleep(self._trials.batch_s)
            self._trials.fail(self._host, self._trained + 1)
            self._trained += 1
        if self._saver.answer():
            self._trained = began
            self._trials.answered(self._host, began)
            return Outcome(stop=True)
        leaves = self._trained < command.until
        return Outcome(batches=self._trained, leave=leaves, interrupted=leaves)

    def _validate(self, command: Validate) -> Outcome:
        time.sleep(self._trials.batch_s)
        self._validation = {"loss": self._trials.loss(self._host, self._trained)}
        return Outcome(is_best=command.compare and self._host.is_best(self._validation))

    def _publish(self, command: Publish) -> Outcome:
        report = Report(
            batches=command.at.batches,
            training={"loss": 0.5},
            validation=self._validation,
            decides=command.decides,
            final=command.final,
            interrupted=command.interrupted,
        )
        self._validation = None
        if command.save:
            assert self._trained == command.at.batches, "what is saved is not what was trained"
            progress = json.dumps(asdict(command.at)).encode()
            contents = Contents(
                texts={"progress.json": progress, "weights": str(self._trained).encode()},
                nbytes=BIG if self._random.random() < 0.5 else 0,
            )
            saved = self._saver.save(contents, report)
            if saved is not None:
                report = replace(report, checkpoint=saved)
        stop = self._saver.publish(report)
        if command.decides:
            self._trials.answered(self._host, report.batches)
        return Outcome(stop=stop)


def work(spec: WorkerSpec, *, machine: str, lost: Callable[[Process, Exception], None]) -> None:
    """The main thread of a worker process, like `dray.worker.entry`.

    Args:
        machine: where it runs.
        lost: called if the desk can't be reached.
    """
    process = _current()
    try:
        desk = Connection(spec.desk)
        desk.tell("arrived", spec.owner, spec.group, spec.start, machine, "", "CPU")
        alone = Ranks(world_rank=0, world_size=1, local_rank=0, local_world_size=1, node_rank=0, num_nodes=1)
        lease_loop.serve(spec, alone, Place(machine, machine), desk)
        desk.close()
        time.sleep(5.0)  # what is sent arrives
    except PeerUnreachable as error:
        lost(process, error)


def _current() -> Process:
    from tests.simulation.primitives import Primitive

    assert Primitive.kernel.current is not None
    return Primitive.kernel.current.process


def replaced(trials: Trials, root: Path) -> dict[Any, dict[str, Any]]:
    """What a schedule replaces in dray, by module. `root`: of the simulated disk. Ray's
    directory is on another one, which is never full."""

    def nothing(*_: Any, **__: Any) -> None:
        """It changes the process."""

    @contextlib.contextmanager
    def use_info(info: core.ClusterInfo) -> Iterator[None]:
        """Simulated processes share modules."""
        infos[_current().pid] = info
        yield

    program = type("OfTrials", (Program,), {"trials": trials})(command="python train.py", file="train.py")
    infos: dict[int, core.ClusterInfo] = {}
    watchdog = SimpleNamespace(dump_traceback_later=nothing, cancel_dump_traceback_later=nothing)
    here = SimpleNamespace(get_temp_dir=lambda: root.with_name("ray"), get_session_name=lambda: "session")
    ranks = SimpleNamespace(from_torch_distributed=lambda address: DistributedContext())
    return {
        worker_trial: {
            "train_class": trials.train,
            "redirect_output": _logged,
            "appending": _appending,
            "use_cluster_info": use_info,
        },
        lease_loop: {
            "os": SimpleNamespace(chdir=nothing, environ={"MASTER_ADDR": ""}),
            "gc": SimpleNamespace(enable=nothing),
            "ray": SimpleNamespace(get_runtime_context=lambda: here),
            "core": SimpleNamespace(DistributedContext=ranks),
            "joined": _joined,
            "settings_now": nothing,
            "ProcessSnapshot": lambda **_: OwnProcess(),
        },
        core_context: {"get_cluster_info": lambda: infos.get(_current().pid)},
        FromDirectory: {
            "place": lambda self: root if trials.is_program(Path(self.directory)) else None,
            "__call__": lambda self: program if trials.is_program(Path(self.directory)) else Trials,
        },
        failure: {"is_installed": functools.cache(is_installed)},
        hang: {"faulthandler": watchdog},
    }
