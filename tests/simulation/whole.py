"""Whole experiments on the shells that ship, on a simulated Ray: drivers that are killed and resumed, and faults."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
import time
import urllib.error
import urllib.request
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from email.message import Message
from functools import partial
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import torch
import yaml

from dray import pytorch
from dray.cluster import connection, ray_output
from dray.config.custom import Custom
from dray.errors import ConfigError, ExperimentError
from dray.experiment import experiment as experiments
from dray.experiment import prometheus, requests, run
from dray.experiment.limits import NEARLY_SPENT
from dray.experiment.request_files import DIRECTORY as REQUESTS
from dray.groups import lender_shell, on_ray
from dray.leases import messages
from dray.records import metrics
from dray.records.directory import CODE_ID_LENGTH, ExperimentDirectory
from dray.records.metrics import MetricsLog
from dray.records.result import Result
from dray.records.spending import ALIVE_S
from dray.storage.errors import is_full
from dray.training.plan import Plan, Schedule
from dray.training.progress import Progress
from dray.worker.host import RayHost
from dray.worker.lease import REPORT_FILE
from searchers.errors import JournalError
from searchers.events import Requested, Source
from tests.simulation.facts import DUPLICATED, Facts
from tests.simulation.files import Disk
from tests.simulation.kernel import Kernel, Process
from tests.simulation.net import Net
from tests.simulation.primitives import installed
from tests.simulation.ray import HEAD, Nodes, Ray
from tests.simulation.schedule import Fault
from tests.simulation.schedule import Schedule as Drawn
from tests.simulation.setup import Setup, TrialError, in_config
from tests.simulation.trial import Trials, replaced

_CHECKPOINT = re.compile(r".*/([^/]+)/trial_(\d+)/checkpoint_(\d+)(/manifest\.json)?")
VARIANTS = ("a" * CODE_ID_LENGTH, "b" * CODE_ID_LENGTH)
"""The variants of the code that a person has added."""
SLOW_S = 8.0
"""How late a driver may notice what it has spent: it looks every two seconds here."""
STOPPED_S = 100.0
"""How long a driver may take to end after a signal, if its connections last."""
CONNECT_S = 60.0
"""How long after the end of a partition a worker may give up connecting."""
MAX_RUNS = 100
GROWTH = 3
"""The factor by which a user extends a budget that is spent."""


class Quiet:
    """In place of a `Display`, and of metrics for Prometheus."""

    stopped_at_once = ""

    def __init__(self, *_: Any, **__: Any) -> None:
        """Nothing is shown."""

    def __enter__(self) -> Quiet:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing is shown."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


class Experiment:
    """An experiment, independent of the processes that drive it."""

    def __init__(self, world: World, name: str, setup: Setup) -> None:
        self.world, self.name, self.setup, self.config = world, name, setup, setup.config()
        self.path = world.root / name
        self.facts = Facts(self.path, setup, self.config, world.kernel.fail, lambda: world.kernel.now)
        self.extensions = [dict(each) for each in setup.extensions]
        self.extension: dict[str, Any] = {}
        self.budget = dict(setup.budget)
        self.runs = 0
        self.process: Process | None = None
        self.is_over = False
        self._left = {each: each.times for each in setup.errors}
        self._ran_s = self._began = 0.0
        if world.accounts:
            self.facts.spent = self._check_spent  # type: ignore[method-assign]

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.is_alive

    def spent(self, unit: str) -> float:
        """What has been spent by an account of its own: seconds, or slot-hours."""
        if unit == "slot_hours":
            return self.world.nodes.slot_s(self.name) / 3600
        return self._ran_s + (self.world.kernel.now - self._began if self.is_running else 0.0)

    def _check_spent(self, reason: str) -> None:
        """Check that its budget is spent: by this account, except for the last seconds of killed drivers, and groups
        that a driver can't reach."""
        kernel, slots, is_spent = self.world.kernel, sum(self.world.nodes.slots), False
        late_s = SLOW_S + self.facts.kills * (ALIVE_S + SLOW_S) + self.world.cut_s
        for unit, total in self.budget.items():
            per_s, spent = 1.0 if unit == "time" else slots / 3600, self.spent(unit)
            # A run that begins may find that the run before has spent more while it closed.
            is_late = kernel.now > self._began + SLOW_S
            if is_late and spent > 1.01 * total + late_s * per_s:
                kernel.fail(f"{spent:.4f} {unit} are spent, of {total:.4f}")
            least = NEARLY_SPENT if reason.startswith("the rest of") else 1.0
            is_spent = is_spent or spent > 0.99 * least * total - SLOW_S / 2 * per_s
        if not is_spent:
            kernel.fail(f"the budget {self.budget} is not spent: {[self.spent(unit) for unit in self.budget]}")

    def begins(self) -> None:
        """A process drives it."""
        current = self.world.kernel.current
        assert current is not None
        if self.is_running:
            self.world.kernel.fail(f"{current.process.name} drives {self.name}, as {self.process} does")
        self.runs += 1
        if self.runs > MAX_RUNS:
            self.world.kernel.fail(f"{self.name} is not done after {MAX_RUNS} runs")
        self.process, self._began = current.process, self.world.kernel.now
        current.process.on_end.append(self._ends)

    def _ends(self) -> None:
        self._ran_s += self.world.kernel.now - self._began

    def heard(self, message: messages.Message) -> None:
        """Take a message of a trial or a worker group to the driver."""
        run_name = f"{self.name}-{self.runs}"
        match message:
            case messages.LeaseGranted(trial=trial, lease=lease):
                self.facts.granted(run_name, trial, lease)
            case messages.LeaseOver(lease=lease):
                self.facts.over(run_name, lease)

    def waiting(self) -> list[str]:
        """The requests that have no answer, by id."""
        folder = self.path / REQUESTS
        return [path.stem for path in sorted(folder.glob("*.json"))] if folder.is_dir() else []

    def error(self, trial: int, batch: int) -> TrialError | None:
        """The error of a trial in this batch; it is raised only so many times."""
        found = next(
            (each for each, left in self._left.items() if left and (each.trial, each.batch) == (trial, batch)), None
        )
        if found is not None:
            self._left[found] -= 1
        return found


class Simulated(experiments.Experiment):
    """The experiment that ships, with its config at hand."""

    def __init__(self, experiment: Experiment, extension: Mapping[str, Any]) -> None:
        self._of = experiment
        self.path, self._config, self._extension = experiment.path, experiment.config, dict(extension)
        self._custom, self._trial, self._code = Custom(), None, None
        self._server = self._address = None
        self._resumes, self._must_go_on, self._links = True, False, False

    def prepare(self) -> ExperimentDirectory:
        if not (self.path / "experiment.yaml").exists():
            ExperimentDirectory.create(self.path, self._config, None)
        directory = ExperimentDirectory(self.path)
        directory.code.mkdir(exist_ok=True)
        for variant in VARIANTS:
            (directory.variant(variant) / "code").mkdir(parents=True, exist_ok=True)
        return super().prepare()

    def run(self, **_: Any) -> Result:
        self._of.begins()
        return super().run(on_message=self._of.heard)


class World(Trials):
    """A cluster, experiments and their users, and what must hold of them."""

    def __init__(self, drawn: Drawn, root: Path, **options: Any) -> None:
        self.kernel = Kernel(drawn.seed, **options)
        self.random = Random(f"whole:{drawn.seed}")
        self.root, self._drawn = root / f"whole-{drawn.seed}", drawn
        self.net = Net(self.kernel, slow_s=drawn.slow_s)
        self.cut_s = 0.0  # how long machines are out of reach, in all
        self.nodes = Nodes(self.kernel, self.random, drawn.nodes)
        self._kinds = {fault.kind for fault in drawn.faults}
        has_power = "power" in self._kinds
        self.disk = Disk(self.kernel, self.root, changed=self._on_change, synced=self._on_sync, forgets=has_power)
        # Budgets are measured by the machine's clock.
        self.accounts = not drawn.server and "clock" not in self._kinds
        self.experiments = {
            f"experiment-{number}": Experiment(self, f"experiment-{number}", setup)
            for number, setup in enumerate(drawn.setups)
        }
        self.batch_s = drawn.setups[0].batch_s
        self._cluster = connection.Cluster(own=drawn.own_cluster, local=True, description="the simulated cluster")
        self._runs: dict[str, dict[str, str]] = {}
        self._leases: dict[int, tuple[Experiment, RayHost]] = {}  # by worker process
        self._trials_of: Counter[int] = Counter()  # by worker process
        self._late_requests = drawn.late_requests
        self._unsent: dict[tuple[str, int], list[OSError]] = defaultdict(_faults)
        """For each alert, what goes wrong before the webhook takes it."""

    def run(self) -> None:
        """Run the schedule. Raises `Failed`, or an exception of dray's."""
        self.clean()
        self.root.mkdir(parents=True)
        for each in self.experiments.values():
            self._start(each)
        self._schedule_faults()
        with installed(self.kernel, self.disk, self._replaced()):
            self.kernel.run()

    def _schedule_faults(self) -> None:
        for fault in self._drawn.faults:
            self.kernel.at(self._time_of(fault), self._happen, fault)

    def clean(self) -> None:
        """Remove its files."""
        shutil.rmtree(self.root, ignore_errors=True)

    def _time_of(self, fault: Fault) -> float:
        setups = [dict(each.searcher) for each in self._drawn.setups]
        trials = sum(each.get("max_trials", 6) for each in setups)
        longest = self.batch_s * max(each["max_length"] for each in setups) * trials / sum(self._drawn.nodes)
        return fault.step / (50 + 35 * trials) * (longest + 4 * trials + 10)

    def _replaced(self) -> dict[Any, dict[str, Any]]:
        return {
            **replaced(self, self.root),
            experiments: {"Display": Quiet},
            ray_output: {"redirect_ray_output": lambda path: contextlib.nullcontext()},
            connection: {"connect": lambda address: contextlib.nullcontext(self._cluster)},
            on_ray: {"OnRay": lambda cluster: Ray(self.nodes, cluster, lost=self._lost)},
            prometheus: {"_made": Quiet},
            urllib.request: {"build_opener": lambda *_: SimpleNamespace(open=self._post)},
            run: {"POLL_S": 2.0},
            metrics: {"PACK_EVERY_S": 30.0},
            yaml: {"safe_dump": partial(yaml.dump, Dumper=yaml.CSafeDumper)},  # the same, and faster
            **with_clock(lambda: self.kernel.now, MetricsLog),
            lender_shell: {"POLL_S": 0.1},
        }

    # ------------------------------------------------------------------ processes
    def _start(self, experiment: Experiment) -> None:
        if experiment.is_over:
            return
        assert not experiment.is_running
        name = f"{experiment.name}/driver-{experiment.runs + 1}"
        process = self.kernel.process(name, partial(self._drive, experiment), HEAD)
        process.on_end.append(lambda: self._has_ended(experiment, process))

    def _drive(self, experiment: Experiment) -> None:
        """The main thread of a driver's process."""
        try:
            Simulated(experiment, experiment.extension).run()
        except KeyboardInterrupt:
            raise SystemExit(130) from None
        except Exception as error:
            # All nodes have failed, and no other is there yet.
            is_expected = isinstance(error, JournalError) or (
                isinstance(error, ConfigError) and "0 nodes" in str(error)
            )
            if isinstance(error, ExperimentError) and experiment.facts.done in (
                "errored",
                "invalid_hp",
                "out_of_memory",
            ):
                return  # all trials have failed
            if is_full(error) is None and not is_expected:
                raise
            raise SystemExit(74) from None

    def _has_ended(self, experiment: Experiment, process: Process) -> None:
        facts, how = experiment.facts, process.exit_code
        self.kernel.note(f"{process.name} has ended: {how} {facts.done}")
        began, cut_off = self.nodes.began, self.nodes.cut_off
        if how == 0 and (left := [each.name for each in began if each.owner is process and each.name not in cut_off]):
            self.kernel.fail(f"{process.name} has ended before its groups {left}")
        if how == 0 and (answered := facts.answers.keys() & {*experiment.waiting()}) and "full" not in self._kinds:
            self.kernel.fail(f"{process.name} has left the requests {sorted(answered)}, which have an answer")
        if how != 0:
            facts.kills += 1
        elif facts.done and not experiment.waiting():
            if self._late_requests:
                self._late_requests -= 1
                self._request(experiment, self.random.random())
            elif experiment.extensions:
                experiment.extension |= experiment.extensions[0]
                facts.extended(experiment.extensions.pop(0))
            else:
                self._end(experiment)
                return
        elif not facts.done:
            if not experiment.budget:
                self.kernel.fail(f"{process.name} has returned, and its search is not done")
            experiment.budget = {unit: GROWTH * total for unit, total in experiment.budget.items()}
            experiment.extension["budget"] = in_config(experiment.budget)
        self.kernel.at(self.random.uniform(1.0, 20.0), self._start, experiment)

    def _end(self, experiment: Experiment) -> None:
        experiment.is_over = True
        if all(each.is_over for each in self.experiments.values()):
            self.kernel.at(300.0, self._check_end)

    def _lost(self, process: Process, error: Exception) -> None:
        """A worker has lost the session with its desk for good: because that ends, or is cut off from it."""
        group = self.nodes.groups[process.name]

        def check() -> None:
            if group.owner.is_alive:
                self.kernel.fail(f"{process.name} has lost its session, and no packet was lost: {error}")

        is_cut = self.net.cut_until(process, group.owner) > self.kernel.now - CONNECT_S
        if process.name not in self.nodes.cut_off and not is_cut:
            self.kernel.at(300.0, check)

    def _post(self, request: urllib.request.Request, *, timeout: float) -> Any:
        """The webhook, which may be busy or out of reach once or twice."""
        assert isinstance(request.data, bytes)
        told = json.loads(request.data)
        experiment, unsent = self.experiments[told["experiment"]], self._unsent[told["experiment"], told["id"]]
        # The end of a run waits for it, which is no part of a budget.
        time.sleep(self.random.uniform(0.0, 0.5 if experiment.budget else 5.0))
        if unsent and not experiment.budget and self.random.random() < 0.5:
            raise unsent.pop()
        experiment.facts.sent[told["id"]] += 1
        return io.BytesIO()

    # ------------------------------------------------------------------ trials
    def _experiment_of(self, host: RayHost) -> Experiment:
        return self.experiments[host.lease.trial_dir.parent.name]

    def is_program(self, code: Path) -> bool:
        return self.experiments[code.relative_to(self.root).parts[0]].setup.program

    def plan(self, host: RayHost) -> Plan:
        setup, length = self._experiment_of(host).setup, host.max_length
        assert length is not None
        report, validate, checkpoint = (
            None if each is None else Schedule(period=each) for each in (setup.report, setup.validate, setup.checkpoint)
        )
        return Plan(
            length=int(length.value),  # type: ignore[arg-type]
            rungs=tuple(sorted({int(rung.value) for rung in host.rungs})),  # type: ignore[arg-type]
            policy=setup.policy,
            report=report,
            validate=validate,
            checkpoint=checkpoint,
        )

    def loss(self, host: RayHost, batches: int) -> float:
        return self._experiment_of(host).setup.loss(host.lease.hparams, batches)

    def check(self, host: RayHost) -> None:
        current = self.kernel.current
        assert current is not None
        self._trials_of[current.process.pid] += 1
        if self._experiment_of(host).setup.once and self._trials_of[current.process.pid] > 1:
            raise ValueError(DUPLICATED)
        if self._experiment_of(host).setup.is_invalid(host.lease.hparams):
            raise pytorch.InvalidHP("these hyperparameters")

    def fail(self, host: RayHost, batch: int) -> None:
        error = self._experiment_of(host).error(host.trial_id, batch)
        match None if error is None else error.kind:
            case None:
                return
            case "oom":
                raise torch.cuda.OutOfMemoryError("CUDA out of memory")
            case "device":
                raise RuntimeError("CUDA error: an illegal memory access was encountered")
            case _:
                raise ValueError(f"the error of trial {host.trial_id}")

    def begins(self, host: RayHost, at: Progress) -> None:
        experiment, current, source = self._experiment_of(host), self.kernel.current, None
        assert current is not None
        self._leases[current.process.pid] = experiment, host
        found = _CHECKPOINT.fullmatch(host.latest_checkpoint or "")
        if found is not None and int(found[2]) != host.trial_id:
            source = int(found[2]), int(found[3])
        run_name, code = self._run_of(experiment, host), host.lease.code
        experiment.facts.begins(run_name, code, host.trial_id, at.batches, source)

    def _run_of(self, experiment: Experiment, host: RayHost) -> str:
        """The name of the run that has granted a lease."""
        runs = self._runs.setdefault(experiment.name, {})
        return runs.setdefault(host.lease.client, f"{experiment.name}-{experiment.runs}")

    def answered(self, host: RayHost, batches: int) -> None:
        self._experiment_of(host).facts.answered(host.trial_id, batches, host.reports.life.outcome == "stopped")

    # ------------------------------------------------------------------ files
    def _on_change(self, what: str, *paths: str) -> None:
        if (found := _CHECKPOINT.fullmatch(paths[-1])) is None:
            return
        name, trial, batches = found[1], int(found[2]), int(found[3])
        facts, current = self.experiments[name].facts, self.kernel.current
        assert current is not None
        if what == "rename" and found[4] is None:
            experiment, host = self._leases[current.process.pid]
            self.kernel.note(f"commits checkpoint {batches} of trial {trial} under lease {host.lease.number}")
            metric = json.loads(Path(paths[-1], REPORT_FILE).read_text())["metric"]
            facts.commits(self._run_of(experiment, host), trial, host.lease.number, batches, metric)
        elif what == "unlink" and found[4] is not None:
            self.kernel.note(f"deletes checkpoint {batches} of trial {trial}")
            facts.deleted(trial, batches)

    def _on_sync(self, path: str) -> None:
        name = os.path.basename(path)
        if name == "journal.jsonl":
            if (found := self.experiments.get(os.path.basename(os.path.dirname(path)))) is not None:
                found.facts.read()
        elif (checkpoint := _CHECKPOINT.fullmatch(path)) is not None and checkpoint[4] is None:
            self.experiments[checkpoint[1]].facts.synced(int(checkpoint[2]), int(checkpoint[3]))

    # ------------------------------------------------------------------ faults and users
    def _happen(self, fault: Fault) -> None:
        """Inject a fault, if it has a target."""
        kernel, which = self.kernel, fault.which
        kernel.note(f"-- {fault}")
        alive = [each for each in self.experiments.values() if each.is_running]
        workers = [each.process for each in self.nodes.groups.values() if each.process is not None]
        worker = _one(workers, which)
        experiment = _one(alive, which * 7 % 1)
        driver = None if experiment is None else experiment.process
        node = _one([each for each in self.nodes.nodes if each.is_alive], which)
        match fault.kind:
            case "cut" if worker:
                self.net.reset(worker if which < 0.7 or driver is None else driver)
            case "rank" | "group" if worker:
                worker.kill()
            case "node" if node:
                self.nodes.kill(node)
            case "drain" if node and not node.is_draining:
                self.nodes.drain(node)
                kernel.at(30.0, lambda: node.is_alive and self.nodes.kill(node))
            case "driver" if driver:
                driver.kill()
            case "torn" if driver:
                driver.kill_at = driver.file_operations + 1 + int(which * 40)
            case "handle" if experiment:
                for each in kernel.processes:
                    if "/tune-" in each.name and each.is_alive:
                        each.kill()
            case "full":
                for machine in kernel.machines.values():
                    machine.full_until = kernel.now + 30 * which
            case "stop" if driver:
                kernel.deliver(driver, 2)
                if not self._kinds & {"cut", "dead"}:
                    kernel.at(STOPPED_S, self._check_stopped, driver)
            case "dead" if worker:
                self._declare_dead(worker, which)
            case "clock":
                kernel.machine(HEAD).skew_s += _one([-3600.0, -1.0, 1.0, 3600.0], which)
            case "power" if alive:
                self._lose_power()
            case "request":
                target = _one([each for each in self.experiments.values() if not each.is_over], which)
                if target is not None and target.facts.created:
                    self._request(target, which)

    def _check_stopped(self, driver: Process) -> None:
        if driver.is_alive:
            self.kernel.fail(f"{driver.name} has not ended {STOPPED_S:.0f} s after a signal")

    def _declare_dead(self, worker: Process, which: float) -> None:
        """Ray loses a machine, whose processes live on, perhaps cut off from the others for minutes."""
        group = self.nodes.groups[worker.name]
        self.nodes.cut_off.add(worker.name)
        if which < 0.7:
            seconds = _one([5.0, 30.0, 100.0, 400.0], which / 0.7)
            self.cut_s += seconds
            self.net.cut(HEAD, worker.machine.name, seconds)
        group.declare_dead()
        self.kernel.at(600.0, worker.kill)

    def _lose_power(self) -> None:
        """All processes end at once, and the disk loses what was not synced."""
        for process in self.kernel.processes:
            process.kill()
        for experiment in self.experiments.values():
            experiment.facts.lose_power()
        self.disk.lose_power()

    def _request(self, experiment: Experiment, which: float) -> None:
        """Let a person request the end of a trial, a fork, or a new trial."""
        random, facts = Random(f"request:{which}"), experiment.facts
        checkpoints = [(trial, batches) for trial, each in facts.committed.items() for batches in sorted(each)]
        hparams = {"lr": 10 ** random.uniform(-4, -1)} if random.random() < 0.7 else None
        kind = random.choice(("stop", "fork", "fork", "add"))
        number = f"request-{len(facts.requests):02d}"
        if kind == "stop":
            live = facts.live
            request = Requested(id=number, trial=random.choice(live) if live and random.random() < 0.9 else 0)
        elif kind == "fork" and checkpoints:
            trial, batches = random.choice(checkpoints)
            source = Source(trial=trial, step=batches, batches=batches)
            request = Requested(id=number, source=source, hparams=hparams)
        else:
            request = Requested(id=number, hparams=hparams, code=random.choice((None, None, *VARIANTS)))

        def place() -> None:
            with contextlib.suppress(OSError):  # the disk is full
                requests.place(experiment.path, request)
                facts.requests[request.id] = request

        self.kernel.process(f"{experiment.name}/person-{number}", place, HEAD)

    # ------------------------------------------------------------------ the end
    def _check_end(self) -> None:
        for experiment in self.experiments.values():
            setup = experiment.setup
            is_exact = not (self._drawn.faults or experiment.facts.requests or setup.extensions or setup.program)
            if not experiment.facts.given_up and "power" not in self._kinds:
                experiment.facts.check_checkpoints(is_exact=is_exact)
            experiment.facts.check_end(experiment.waiting(), is_extended=bool(experiment.setup.extensions))
        for node in self.nodes.nodes:
            if node.is_alive and node.free != node.slots:
                self.kernel.fail(f"{node.name} has {node.slots - node.free} slots that nobody has freed")
        self.kernel.stop()


def with_clock(clock: Callable[[], float], *classes: type) -> dict[Any, dict[str, Any]]:
    """Replacements of the default clocks of these classes, which are bound when they are defined."""
    makers = [vars(each)["__init__"] for each in classes]
    return {make: {"__kwdefaults__": {**make.__kwdefaults__, "clock": clock}} for make in makers}


def _one(several: list[Any], which: float) -> Any:
    """Select one of several; None if there is none."""
    return several[int(which * len(several))] if several else None


def _faults() -> list[OSError]:
    return [urllib.error.HTTPError("https://hooks", 503, "busy", Message(), None), TimeoutError()]
