"""The path of a commit: one trial on the shells that ship, and faults in the middle of its checkpoints.

`EventLoop` and `Desk` are in a driver's process; `Connection`, `serve`, `run_trial`, `RayHost`, `Reports`,
`TrialLink`, `Saver` and `CheckpointStore` in those of workers.
"""

from __future__ import annotations

import os
import pickle
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from dray.code.factory import FromDirectory
from dray.config.entrypoint import ClassName
from dray.leases.desk import CALLS as DESK_CALLS
from dray.leases.desk import Desk
from dray.leases.effects import After, Reply, Tell
from dray.leases.messages import DeskReport, GroupEnded, LeaseGranted, LeaseOver, TrialLeft
from dray.rpc.connection import Call, Session
from dray.rpc.event_loop import EventLoop
from dray.storage.checkpoints import CheckpointStore
from dray.training.plan import Plan, Schedule
from dray.training.progress import Progress
from dray.training.units import Batch
from dray.worker.host import RayHost
from dray.worker.lease import SharedSettings, TrialLease
from dray.worker.spec import ExperimentSpec, WorkerSpec
from tests.simulation.files import Disk
from tests.simulation.kernel import Kernel, Process
from tests.simulation.net import Net
from tests.simulation.primitives import installed
from tests.simulation.trial import Trials, replaced, work

LENGTH, RUNGS = 40, (10, 20, 40)
PLAN = Plan(
    length=LENGTH,
    rungs=RUNGS,
    policy="all",
    report=Schedule(period=1),
    validate=Schedule(period=5),
    checkpoint=Schedule(period=7),
)
VALIDATED = range(5, LENGTH + 1, 5)
STOP_S = 40.0
"""How long a trial may take to leave when it is asked to."""
LATE_S = 10.0
"""How long a commit may take that was permitted while its lease was valid."""
CODE = FromDirectory(entrypoint=ClassName("model", "Trial"), directory="code")
SETTINGS = SharedSettings(
    config={"data": {}},
    metric="loss",
    smaller_is_better=True,
    max_length=Batch(LENGTH),
    rungs=tuple(map(Batch, RUNGS)),
    validation_period=None,
    checkpoint_period=None,
)
KINDS = ("reset", "reset", "partition", "partition", "partition", "kill", "retire", "dead", "full", "clock")


class OwnScratch(CheckpointStore):
    """Staged on the machine's own disk, as for an object store, and then moved to the shared place."""

    def stage(self, batches: int) -> Path:
        staging = self.trial_dir.parent / f"scratch-{os.getpid()}" / f"{batches}-{os.urandom(4).hex()}"
        staging.mkdir(parents=True)
        return staging

    def sweep(self) -> None:
        """No-op: other machines' files are out of reach."""


class World(Trials):
    """A driver, its workers, and what must hold of them."""

    def __init__(self, seed: int, root: Path, **options: Any) -> None:
        self.kernel = Kernel(seed, **options)
        self.random = Random(f"commit:{seed}")
        self.net = Net(self.kernel)
        self.root = root / f"commit-{seed}"
        self.trial_dir = self.root / "trial_1"
        self.disk = Disk(self.kernel, self.root, changed=self._on_change)
        self.batch_s = self.random.choice((0.1, 0.1, 0.2, 0.2, 8.0))
        self.store = self.random.choice((CheckpointStore, OwnScratch))
        self.decider: Decider
        self.workers: dict[str, Process] = {}
        self._cut_off: set[str] = set()
        self._reset: set[str] = set()
        self.cut_at_permission: dict[str, float] = {}
        """Workers that are cut off, for so long, when they may commit next."""
        self.is_full = self._has_killed = False
        self.ended: dict[int, float] = {}
        """When leases have ended."""
        self.commits = 0
        self.rows: dict[tuple[int, str, str], float] = {}
        self.saved: list[str] = []
        self._driver = self.kernel.process("driver", self._drive)

    def run(self) -> None:
        """Run the schedule. Raises `Failed`, or an exception of dray's."""
        self.clean()
        (self.trial_dir / "logs").mkdir(parents=True)
        for _ in range(self.random.choice((0, 1, 2, 3))):
            self.kernel.at(self.random.uniform(1.0, 70.0 * self.batch_s), self._fault)
        with installed(self.kernel, self.disk, replaced(self, self.root)):
            self.kernel.run()

    def clean(self) -> None:
        """Remove its files."""
        shutil.rmtree(self.root, ignore_errors=True)

    # ------------------------------------------------------------------ processes
    def _drive(self) -> None:
        loop = EventLoop("dray-driver")
        loop.listen("driver")
        self.decider = Decider(self, loop)
        loop.attach(self.decider)
        self._start_group()
        time.sleep(1e6)

    def _start_group(self) -> None:
        if self.decider.is_done:
            return
        number = len(self.workers) + 1
        name = f"group-{number}"
        spec = WorkerSpec(
            desk=self.decider.loop.endpoint,
            owner="groups",
            group=name,
            start=number,
            environment={},
            experiment=ExperimentSpec(run="run", settings=SETTINGS, load_trial=CODE, log_format=""),
            shared_by=1,
        )
        process = self.workers[name] = self.kernel.process(name, lambda: work(spec, machine=name, lost=self._lost))
        if number <= 3 and self.random.random() < 0.6:
            process.kill_at = self.random.randrange(1, 60)
        process.on_end.append(lambda: self._has_ended(name, number))

    def _has_ended(self, name: str, number: int) -> None:
        self._has_killed = True
        if not self.decider.is_done:
            self._in_driver(self.random.uniform(0.1, 5.0), self.decider.loop.post, self.decider.dead, name, number)
            self.kernel.at(self.random.uniform(0.1, 3.0), self._start_group)

    def _in_driver(self, delay: float, call: Callable[..., Any], *args: Any) -> None:
        """Call this in a thread of the driver's, as Ray does."""

        def spawn() -> None:
            if self._driver.is_alive:
                self.kernel.spawn(self._driver, "ray", lambda: call(*args))

        self.kernel.at(delay, spawn)

    def _lost(self, process: Process, error: Exception) -> None:
        # A connection that is lost before it was established is not made again.
        if process.name not in self._cut_off and not (process.name in self._reset and "can't connect" in str(error)):
            self.kernel.fail(f"{process.name} has lost its session, and no packet was lost: {error}")

    # ------------------------------------------------------------------ faults
    def _fault(self) -> None:
        alive = [each for each in self.workers.values() if each.is_alive]
        if not alive or self.decider.is_done:
            return
        victim, random, kernel = self.random.choice(alive), self.random, self.kernel
        number = int(victim.name.split("-")[1])
        kind = random.choice(KINDS)
        kernel.note(f"-- {kind} {victim.name}")
        match kind:
            case "reset":
                self._reset.add(victim.name)
                self.net.reset(victim)
            case "partition" | "dead":  # Ray takes it for dead; it lives on, perhaps cut off
                seconds = random.choice((5.0, 30.0, 100.0, 400.0))
                if kind == "partition":
                    self._cut_off.add(victim.name)
                    if random.random() < 0.5:
                        self.cut_at_permission[victim.name] = seconds
                    else:
                        self.net.cut("driver", victim.name, seconds)
                self._in_driver(
                    random.uniform(2.0, 30.0), self.decider.loop.post, self.decider.dead, victim.name, number
                )
                kernel.at(random.uniform(0.1, 3.0), self._start_group)
            case "kill":
                victim.kill()
            case "retire":
                self._in_driver(0.0, self.decider.loop.post, self.decider.desk.drain, victim.name)
                kernel.at(STOP_S, self._check_stopped, victim, self.decider.lease_of.get(victim.name, -1))
                kernel.at(random.uniform(0.1, 3.0), self._start_group)
            case "full":
                self.is_full = True
                victim.machine.full_until = kernel.now + random.choice((1.0, 20.0))
            case "clock":
                victim.machine.skew_s += random.choice((-3600.0, 3600.0))

    def _check_stopped(self, victim: Process, lease: int) -> None:
        if lease not in self.ended and victim.name not in self._cut_off | self._reset and victim.is_alive:
            self.kernel.fail(f"lease {lease} goes on {STOP_S:.0f} s after it was asked to stop")

    # ------------------------------------------------------------------ what must hold
    def _on_change(self, what: str, *paths: str) -> None:
        name = os.path.basename(paths[-1])
        if what != "rename" or not name.startswith("checkpoint_"):
            return
        current = self.kernel.current
        assert current is not None
        lease = self.decider.lease_of.get(current.process.name, -1)
        self.kernel.note(f"{name} is committed under lease {lease}")
        self.commits += 1
        if lease not in self.decider.permitted:
            self.kernel.fail(f"lease {lease} commits {name} without a permission")
        elif self.kernel.now > self.ended.get(lease, self.kernel.now) + LATE_S:
            self.kernel.fail(f"lease {lease} commits {name} {self.kernel.now - self.ended[lease]:.0f} s after its end")

    def plan(self, host: RayHost) -> Plan:
        return PLAN

    def begins(self, host: RayHost, at: Progress) -> None:
        newest = max(self.decider.known, default=0)
        if at.batches < newest:
            self.kernel.fail(f"it goes on after {at.batches} batches, but was saved after {newest}")

    def check_end(self) -> None:
        """Check what must hold at the end."""
        store, fail = CheckpointStore(self.trial_dir), self.kernel.fail
        valid = {checkpoint for batches, checkpoint in store.listed() if store.find(batches) is not None}
        if store.id_of(LENGTH) not in valid:
            fail(f"the trial has completed, but its last checkpoint is invalid: {store.listed()}")
        expected = {(batches, "training", "loss") for batches in range(1, LENGTH + 1)}
        expected |= {(batches, "validation", "loss") for batches in VALIDATED}
        if missing := expected - self.rows.keys():
            fail(f"rows are missing: {sorted(missing)}")
        if valid != set(self.saved):
            fail(f"the valid checkpoints are {sorted(valid)}, and the driver knows {sorted(set(self.saved))}")
        if left := [each.name for each in self.workers.values() if each.is_alive]:
            fail(f"workers go on: {left}")
        staged = [name for name in os.listdir(self.trial_dir) if name.startswith(".")]
        if staged and not self._has_killed and not self.is_full:
            fail(f"files are left: {staged}")


class Decider:
    """A small driver of one trial. The desk is real."""

    def __init__(self, world: World, loop: EventLoop) -> None:
        self._world, self.loop = world, loop
        self._effects: list[Any] = []
        self.desk = Desk(self._effects.append)
        self.desk.add("groups", is_owner=True)
        self.desk.add("run")
        self.desk.enqueue("run", [1], first=False)
        self.is_done = False
        self.permitted: set[int] = set()
        self.lease_of: dict[str, int] = {}
        self.known: set[int] = set()
        self._last_step: float | None = None
        self._valid: set[int] = set()
        self._numbers: dict[bytes, int] = {}

    def take(self, call: Call) -> None:
        if (number := call._number) is not None:
            if number <= self._numbers.get(call.session.id, -1):
                self._world.kernel.fail(f"call {number} of a session comes again: {call.method}")
            self._numbers[call.session.id] = number
        if call.method in DESK_CALLS:
            getattr(self.desk, call.method)(call, *call.args)
        else:
            call.answer(getattr(self, call.method)(*call.args))

    def lost(self, session: Session) -> None:
        """No-op: Ray reports the death."""

    def failed(self, error: BaseException) -> None:
        self._world.kernel.fail(repr(error))

    def settle(self) -> None:
        while self._effects:
            effects = self._effects.copy()
            self._effects.clear()
            for each in effects:
                match each:
                    case Reply():
                        each.send()
                    case After(seconds, method, args):
                        self.loop.later(seconds, getattr(self.desk, method), *args)
                    case Tell("run", message):
                        self._hear(message)

    def _hear(self, message: Any) -> None:
        world = self._world
        match message:
            case LeaseGranted(lease=lease, group=group):
                self._valid.add(lease)
                self.lease_of[group] = lease
                bound = TrialLease(
                    number=lease,
                    client="run",
                    trial_id=1,
                    trial_seed=0,
                    hparams={},
                    trial_dir=world.trial_dir,
                    store=world.store(world.trial_dir),
                    last_step=self._last_step,
                )
                self.desk.bind("run", lease, pickle.dumps(bound))
            case LeaseOver(lease=lease):
                self._valid.discard(lease)
                world.ended[lease] = world.kernel.now
                world.kernel.note(f"lease {lease} is over")
            case TrialLeft(outcome="completed"):
                self.is_done = True
                self.loop.later(5.0, self.desk.close, "groups")
                world.kernel.at(700.0, lambda: (world.check_end(), world.kernel.stop()))
            case TrialLeft(outcome=outcome, failure=failure):
                world.kernel.note(f"lease {message.lease} left: {outcome} {message.error[-200:]}")
                is_full = "No space left" in message.error
                if outcome == "errored" and failure is not None and failure.kind == "error" and not is_full:
                    world.kernel.fail(f"the trial failed: {message.error}")
                self.loop.post(self.desk.enqueue, "run", [1], False)

    def dead(self, group: str, start: int) -> None:
        """Handle Ray's report of a death."""
        self.desk.group_ended("groups", GroupEnded(group=group, start=start, dead={0: "killed"}))

    # ------------------------------------------------------------------ calls of the trial
    def report(self, lease: int, report: DeskReport, wait: bool) -> str:
        if lease not in self._valid:
            return "fenced"
        for row in report.rows:
            self._world.rows[row["batches"], row["kind"], row["name"]] = row["value"]
        world = self._world
        if wait and report.step in RUNGS and not world.is_full:
            is_saved = os.path.exists(world.trial_dir / f"checkpoint_{report.step:.0f}")
            if not is_saved:
                world.kernel.fail(f"the search is to decide after {report.step} batches, and nothing is saved there")
        if report.step is not None:
            self._last_step = max(self._last_step or 0, report.step)
        return "continue"

    def may_commit(self, lease: int) -> bool:
        self._world.kernel.note(f"lease {lease} may {'' if lease in self._valid else 'not '}commit")
        world = self._world
        if lease in self._valid:
            self.permitted.add(lease)
            group = next(group for group, each in self.lease_of.items() if each == lease)
            if (seconds := world.cut_at_permission.pop(group, None)) is not None:
                world.net.cut("driver", group, seconds)
        return lease in self._valid

    def saved(self, trial: int, checkpoint: str, batches: int, value: object, seconds: object) -> None:
        self._world.saved.append(checkpoint)
        self.known.add(batches)
        if not os.path.exists(f"{checkpoint}/manifest.json"):
            self._world.kernel.fail(f"{checkpoint} is reported as saved, and is not complete")

    def damaged(self, trial: int, checkpoint: str, why: str) -> None:
        self._world.kernel.fail(f"{checkpoint} is damaged: {why}")

    def improves(self, lease: int, score: float) -> bool:
        return True

    def best(self) -> None:
        """There is none."""
