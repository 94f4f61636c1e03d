"""Experiments on a server: the manager and the processes of experiments that ship, and the server's users."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from dray.errors import ConfigError, ExperimentError
from dray.serve import manager, processes
from dray.serve.control import NotSubmitted, WrongState
from dray.serve.core import ServerCore
from dray.serve.draft import Read
from dray.serve.lanes import Lanes
from dray.serve.manager import Manager
from dray.serve.queue import Queue
from dray.serve.quota import Quota
from tests.simulation.kernel import Process
from tests.simulation.pipes import Context
from tests.simulation.primitives import EPOCH, installed
from tests.simulation.ray import HEAD, Ray
from tests.simulation.schedule import Fault
from tests.simulation.setup import in_config
from tests.simulation.whole import GROWTH, Experiment, Simulated, World, with_clock

LOOK_S = 15.0
"""How often users look at what they have submitted."""
FOR_GOOD = ("COMPLETED", "ERROR")


class Tokens:
    """In place of the file of tokens: one, with a quota."""

    def __init__(self, slots: int | None) -> None:
        self._quota = Quota(slots=slots)

    def quota(self, owner: str) -> Quota:
        return self._quota if owner else Quota()


class CheckedCore(ServerCore):
    """The server's decisions, checked after each burst of them."""

    served: Served

    def settle(self) -> None:
        super().settle()
        fail, clients = self.served.kernel.fail, self.lender.desk.clients.values()
        leases = {number for client in clients for number in client.leases}
        if (live := self.lanes.live.keys()) != leases:
            fail(f"the lanes show leases {sorted(live)}, and there are {sorted(leases)}")
        training = [each for each in self.lanes.live.values() if each.ended is None]
        places = [(each.kind, lane, each.part) for each in training for lane in each.lanes]
        if len(places) != len(set(places)):
            fail(f"two trials are on the same lane: {sorted(places)}")
        for client in clients:
            trials = Counter(lease.trial for lease in client.leases.values() if lease.state != "failed")
            if more := [trial for trial, count in trials.items() if count > 1]:
                fail(f"{client.name}: trials {more} have several leases")
        most = self.served.token_slots
        if most is not None and (held := sum(client.slots / client.unit for client in clients)) > most:
            fail(f"the token has {held} slots, of {most}")


class Served(World):
    """A server, which may be killed and started again, and its users."""

    manager: Manager | None = None

    @property
    def token_slots(self) -> int | None:
        """The quota of the token that submits all experiments; None: they are the server's own."""
        return self._drawn.token_slots

    def run(self) -> None:
        self.clean()
        self.root.mkdir(parents=True)
        self._servers = 0
        self._is_done = False
        self._wanted: dict[str, set[str]] = {}
        """For each accepted experiment, the state that its user was promised last, and later ones that may have reached
        the disk."""
        self._submitting: set[str] = set()
        self._owner = "" if self.token_slots is None else "agent"
        self._start_server()
        self.kernel.at(1.0, self._look)
        self._schedule_faults()
        before = os.environ.get("DRAY_HOME")
        try:
            with installed(self.kernel, self.disk, self._replaced()):
                os.environ["DRAY_HOME"] = str(self.root)
                self.kernel.run()
        finally:
            os.environ.pop("DRAY_HOME", None)
            if before is not None:
                os.environ["DRAY_HOME"] = before

    def _replaced(self) -> dict[Any, dict[str, Any]]:
        def on_ray(cluster: Any) -> Ray:
            return Ray(self.nodes, cluster, lost=self._lost)

        def nothing(*_: Any) -> None:
            """It changes the process."""

        return {
            **super()._replaced(),
            **with_clock(lambda: EPOCH + self.kernel.now, Lanes, Queue),
            multiprocessing: {"get_context": lambda kind: Context(self.kernel, HEAD)},
            manager: {
                "ServerCore": type("Checked", (CheckedCore,), {"served": self}),
                "outside": lambda read, *given: read(*given),
                "why_full": lambda results: "the disk is full" if self._is_full else "",
                "STEP_S": 2.0,
            },
            processes: {
                "skip_ids": nothing,
                "join": nothing,
                "_print_to": nothing,
                "_leave_ray": nothing,
                "OnRay": on_ray,
                "Experiment": SimpleNamespace(resume=self._reopen),
                "create": self._create,
                "traceback": SimpleNamespace(print_exc=self._failed),
            },
        }

    @property
    def _is_full(self) -> bool:
        return self.kernel.machine(HEAD).full_until > self.kernel.now

    # ------------------------------------------------------------------ the server
    def _start_server(self) -> None:
        self._servers += 1
        server = self._server = self.kernel.process(f"server-{self._servers}", self._serve, HEAD)
        server.on_end.append(lambda: self._server_ended(server))

    def _serve(self) -> None:
        is_over = False

        def stop(number: int, frame: object) -> None:
            nonlocal is_over
            is_over = True

        signal.signal(signal.SIGINT, stop)
        try:
            self.manager = Manager(
                Ray(self.nodes, self._cluster, lost=self._lost),
                Tokens(self.token_slots),  # type: ignore[arg-type]
                idle_s=60.0,
                say=lambda line: self.kernel.note(f"the server says: {line}"),
            )
            self._check_accepted()
            self.manager.run(lambda: is_over)
            self.manager.stop()
            self.manager.close()
        except OSError as error:
            self.kernel.note(f"the server can't go on: {error}")
            raise SystemExit(1) from None

    def _server_ended(self, server: Process) -> None:
        self.kernel.note(f"{server.name} has ended: {server.exit_code}")
        self.manager = None
        if self._is_done and server.exit_code == 0:
            self.kernel.at(300.0, self._check_end)
        else:
            self.kernel.at(self.random.uniform(2.0, 20.0), self._start_server)

    def _check_accepted(self) -> None:
        """Check that no acknowledged request is lost."""
        assert self.manager is not None
        items = {item.name: item for item in self.manager._queue.items()}
        for name, wanted in self._wanted.items():
            if name not in items:
                self.kernel.fail(f"{name} was accepted, and is not in the queue")
            elif items[name].state not in (*FOR_GOOD, *wanted):
                self.kernel.fail(f"{name} is to {items[name].state}, in place of {sorted(wanted)}")

    # ------------------------------------------------------------------ processes of experiments
    def _failed(self) -> None:
        """An experiment's process ends because of an exception."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            self.kernel.fail(f"an experiment's process has failed: {error!r}")

    def _create(self, command: processes.Create) -> tuple[Read, Simulated, str]:
        experiment = self.experiments[command.code.name]
        processes.creations.begin(command.link, experiment.path)
        return command.read, self._simulated(experiment, {}), ""

    def _reopen(self, path: Path, **extension: Any) -> Simulated:
        return self._simulated(self.experiments[path.name], extension)

    def _simulated(self, experiment: Experiment, extension: Mapping[str, Any]) -> Simulated:
        current = self.kernel.current
        assert current is not None
        process = current.process
        if extension:
            experiment.facts.extended(extension)
        process.on_end.append(lambda: self._process_ended(experiment, process))
        return Simulated(experiment, extension)

    def _process_ended(self, experiment: Experiment, process: Process) -> None:
        if experiment.process is process and process.exit_code != 0:
            experiment.facts.kills += 1

    # ------------------------------------------------------------------ users
    def _ask(self, call: Callable[[Manager], object]) -> None:
        """Let a user ask the server, in a thread of its own."""
        server, served = self._server, self.manager

        def ask() -> None:
            with contextlib.suppress(OSError, NotSubmitted, WrongState, ExperimentError, ConfigError):
                assert served is not None
                call(served)

        if served is not None and server.is_alive:
            self.kernel.spawn(server, "http", ask)

    def _submit(self, experiment: Experiment) -> None:
        def submit(server: Manager) -> None:
            name, config = experiment.name, experiment.config
            if name in self._submitting:
                return  # its user waits for the answer
            self._submitting.add(name)
            try:
                draft = SimpleNamespace(read=lambda allowance: Read(config))
                server.submit(draft, Path(name), self._owner, request=name)  # type: ignore[arg-type]
                self._wanted[name] = {"run"}
            finally:
                self._submitting.remove(name)

        self._ask(submit)

    def _want(self, name: str, wanted: str, verb: Callable[[Manager], object]) -> None:
        """Have an experiment run, pause or stop."""

        def want(server: Manager) -> None:
            if name in self._wanted:
                self._wanted[name].add(wanted)
                verb(server)
                self._wanted[name] = {wanted}

        self._ask(want)

    def _look(self) -> None:
        """Submit what is left, restart what has stopped, and extend what has completed."""
        if not self._is_done:
            self.kernel.at(LOOK_S * self.random.random(), self._look)
        if self.manager is None or not self._server.is_alive:
            return
        self._ask(self._read)
        states = {item.name: item.state for item in self.manager._queue.items()}
        done = 0
        for name, experiment in self.experiments.items():
            state, facts = states.get(name), experiment.facts
            if name not in self._wanted:
                if self.random.random() < 0.7:
                    self._submit(experiment)
            elif state in ("pause", "stop", "ERROR"):
                if state == "ERROR" and facts.done not in ("", "completed"):
                    done += 1
                else:
                    self._want(name, "run", lambda server, name=name: server.act(name, "activate"))  # type: ignore[misc]
            elif state == "COMPLETED" and not facts.done:
                experiment.budget = {unit: GROWTH * total for unit, total in experiment.budget.items()}
                self._extend(experiment, {"budget": in_config(experiment.budget)})
            elif state == "COMPLETED" and experiment.extensions:
                self._extend(experiment, experiment.extensions[0])
            else:
                done += state == "COMPLETED"
        if done == len(self.experiments) and not self._is_done:
            self._is_done = True
        if self._is_done:
            self.kernel.deliver(self._server, signal.SIGINT)

    def _read(self, server: Manager) -> None:
        """Look at the server's page."""
        wanted = {*self._wanted}
        if lost := wanted - {each.name for each in server.experiments()}:
            self.kernel.fail(f"{sorted(lost)} are not shown")
        server.status()
        server.queue(60.0)
        server.use(self._owner)
        if wanted:
            name = max(wanted)
            server.foresee({name: replace(server.experiment(name).share, priority=1)})

    def _extend(self, experiment: Experiment, extension: Mapping[str, Any]) -> None:
        def extend(server: Manager) -> None:
            self._wanted[experiment.name].add("run")
            server.extend(experiment.name, extension)
            self._wanted[experiment.name] = {"run"}
            if extension in experiment.extensions:
                experiment.extensions.remove(dict(extension))

        self._ask(extend)

    def _happen(self, fault: Fault) -> None:
        names, which = list(self.experiments), fault.which
        name = names[int(which * 7 % 1 * len(names))]
        match fault.kind:
            case "server" if self._server.is_alive:
                self.kernel.note(f"-- {fault}")
                if which < 0.5:
                    self._server.kill()
                else:
                    self._server.kill_at = self._server.file_operations + 1 + int(which * 20)
            case "pause":
                self._want(name, "pause", lambda server: server.act(name, "pause"))
            case "kill":
                self._want(name, "stop", lambda server: server.act(name, "kill"))
            case "share":
                change = {"priority": 1 + int(which * 60), "weight": 0.5 + which}
                self._ask(lambda server: server.change(name, change))
            case "close":
                self.kernel.deliver(self._server, signal.SIGINT)
            case _:
                super()._happen(fault)
