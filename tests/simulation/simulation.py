"""Run a schedule with its faults, and check the invariants at the end."""

from __future__ import annotations

import traceback
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from tests.simulation.cluster import Cluster, Rank
from tests.simulation.driver import DriverProcess
from tests.simulation.experiment import Experiment
from tests.simulation.schedule import Fault, Schedule
from tests.simulation.server import LOOK_S, Results, ServerProcess
from tests.simulation.world import Failed, World

T = TypeVar("T")


class Simulation:
    """A world that runs a schedule. `lines` gets a line for each step."""

    def __init__(self, schedule: Schedule, lines: list[str] | None = None) -> None:
        self.schedule = schedule
        self.world = World(schedule.seed, lines, wire=schedule.wire, slow_s=schedule.slow_s)
        self._cluster = Cluster(self.world, schedule.nodes)
        self.experiments = [
            Experiment(self.world, f"experiment-{number}", setup) for number, setup in enumerate(schedule.setups)
        ]
        self._run: DriverProcess | None = None
        self._server: ServerProcess | None = None
        self._results = Results(self.world, self.experiments, schedule.token_slots)
        self._is_done = False
        self._late_requests = schedule.late_requests
        self.world.faults = [(fault.step, partial(self._happen, fault)) for fault in reversed(schedule.faults)]

    def run(self) -> None:
        """Run the schedule to its end.

        Raises:
            Failed: an invariant is violated.
        """
        if self.schedule.server:
            self._serve()
            self._look()
        else:
            self._start(*self.experiments)
        self.world.run(self._waits)
        for experiment in self.experiments:
            experiment.facts.check_end()
        for node in self._cluster.nodes:
            if node.free != node.slots:
                raise Failed(f"{node.name} has {node.slots - node.free} slots that nobody has freed")

    def _waits(self) -> str:
        return "; ".join(f"{each.name}: {dict(each.driver.search.states)}" for each in self._drivers)

    @property
    def _drivers(self) -> list[DriverProcess]:
        """Return the running processes of experiments."""
        found = [self._run] if self._server is None else self._server.processes.values()
        return [each for each in found if each is not None and each.alive and each.core is not None]

    # ------------------------------------------------------------------ users, and restarts
    def _start(self, experiment: Experiment) -> None:
        """Run or resume the only experiment, as its user."""
        own = self.schedule.own_cluster
        self._run = DriverProcess(experiment, self._cluster, self._ended, own_cluster=own)
        self._run.start()

    def _ended(self, process: DriverProcess, how: str) -> None:
        experiment = process.experiment
        if self.world.lines is not None:
            self.world.note(f"{process.name} has ended: {how}")
        if how.startswith("failed"):
            raise Failed(f"{process.name} {how}")
        if how == "spent":
            experiment.extension.update(experiment.extensions.pop(0))
        elif how == "done" and not experiment.requests.waiting():
            if self._late_requests:
                self._late_requests -= 1
                experiment.requests.place_random((), self.world.random.random())
            elif not experiment.extensions:
                self.world.is_over = True
                return
            else:
                experiment.extension.update(experiment.extensions.pop(0))
        self.world.at(self.world.random.uniform(0.0, 20.0), self._start, experiment)

    def _serve(self) -> None:
        self._server = ServerProcess(self._cluster, self._results, self._server_ended)

    def _server_ended(self) -> None:
        if self._is_done:
            self.world.is_over = True
        else:
            self.world.at(self.world.random.uniform(2.0, 20.0), self._serve)

    def _look(self) -> None:
        assert self._server is not None
        if self._server.alive and not self._server.scheduler.closing and self._server.look():
            self._is_done = True
            self._server.ask(self._server.scheduler.close)
        else:
            self.world.at(LOOK_S * self.world.random.random(), self._look)

    # ------------------------------------------------------------------ faults
    def _happen(self, fault: Fault) -> None:
        """Inject a fault, if it has a target."""
        world, which, drivers = self.world, fault.which, self._drivers
        if world.lines is not None:
            world.note(f"-- {fault}")
        server = self._server if self._server is not None and self._server.alive else None
        experiment = _one(self.experiments, which * 7 % 1)
        name = experiment.name
        rank = _one([each for each in world.processes if isinstance(each, Rank) and each.alive], which)
        driver, node = _one(drivers, which), _one(self._cluster.nodes, which)
        match fault.kind:
            case "cut":
                links = [each for each in world.links if each.is_open]
                theirs = [each for each in links if each.client.process in drivers]  # the server's connection
                if link := _one(theirs if theirs and which < 0.5 else links, 2 * which % 1):
                    link.cut()
            case "rank":
                if found := world.waiting if which < 0.5 and world.waiting is not None else rank:
                    found.end()
            case "group" if rank:
                for each in list(rank.group.ranks):
                    each.end()
            case "node" if node:
                self._cluster.kill(node)
                for experiment in self.experiments:
                    experiment.store.lose_power()
            case "drain" if node and not node.is_draining:
                node.is_draining = True
                for owner in drivers if server is None else [server]:
                    owner.post(owner.lender.nodes_drain, [node.name])
                world.at(30.0, lambda: node.is_alive and self._cluster.kill(node))
            case "driver" | "server":
                if process := driver if fault.kind == "driver" else server:
                    process.fuse = int(which * 1000) % 5 - 1
                    if process.fuse < 0:
                        process.end()
            case "torn":
                _one([self._results, *self.experiments] if server else self.experiments, which).disk.kills_writer = True
            case "handle" if driver:
                driver.tune.kill_handle()
            case "full":
                for each in (self._results, *self.experiments):
                    each.disk.full_until = world.now + 30 * which
            case "away":
                for experiment in self.experiments:
                    experiment.store.away_until = world.now + 60 * which
            case "stop" if driver:
                driver.interrupt()
            case "request" if experiment.facts.created:
                experiment.requests.place_random(experiment.facts.live, which)
                if which * 13 % 1 < 0.5 and experiment.process is not None:
                    experiment.process.post(experiment.process.look)
            case "pause" if server:
                server.ask(server.want, name, "pause", server.scheduler.act, "pause")
            case "kill" if server:
                server.ask(server.want, name, "stop", server.scheduler.act, "kill")
            case "share" if server:
                server.ask(server.scheduler.change, name, {"priority": 1 + int(which * 60), "weight": 0.5 + which})
            case "close" if server:
                server.ask(server.scheduler.close)


def _one(several: list[T], which: float) -> T | Any:
    """Select one of several; None if there is none."""
    return several[int(which * len(several))] if several else None


def failure_of(schedule: Schedule) -> str:
    """Run a schedule, and return the failure, or ""."""
    return outcome_of(schedule)[0]


def outcome_of(schedule: Schedule) -> tuple[str, int]:
    """Run a schedule, and return the failure, or "", and the number of steps."""
    simulation = Simulation(schedule)
    try:
        simulation.run()
        is_due = schedule.seed % 8 == 0
        if schedule.setups[0].is_population:  # a trial on a node that drains may go before others
            is_due = all(fault.kind != "drain" for fault in schedule.faults)
        if is_due and schedule.faults and any(map(_is_determined, simulation.experiments)):
            _check_same(simulation)
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__} at {Path(where.filename).name}:{where.lineno}: {error}", simulation.world.steps
    return "", simulation.world.steps


def _is_determined(experiment: Experiment) -> bool:
    """Whether faults change no results. They change none if the method does not compare trials; requests then change
    only the numbers of the trials that fail."""
    setup, name = experiment.setup, experiment.config.searcher.name
    if setup.is_population:
        # Trials that run one at a time are compared in the same order, whatever happens. PB2 learns also from the last
        # report of a trial that completes, which may come after the next trial has started.
        has_failed = setup.errors or setup.extensions or experiment.facts.lost or experiment.facts.given_up
        is_alone = setup.max_slots == setup.ranks and dict(setup.searcher)["sampler"] != "pb2"
        return is_alone and not (has_failed or experiment.requests.sent)
    has_moved = experiment.requests.sent and setup.errors
    return name in ("random", "grid", "single") and not has_moved


def _check_same(simulation: Simulation) -> None:
    """Check that each trial starts, reports and ends as without faults, unless it has failed too often."""
    sound = Simulation(replace(simulation.schedule, faults=()))
    sound.run()
    for one, other in zip(simulation.experiments, sound.experiments, strict=True):
        found, expected = one.facts.trials, other.facts.trials
        both = found.keys() & expected.keys()
        if _is_determined(one) and any(found[trial] != expected[trial] for trial in both):
            raise Failed(f"{one.name}: without faults its trials are {expected}, in place of {found}")


def shrunk(schedule: Schedule, *, at_most: int = 300) -> Schedule:
    """Return a smaller failing schedule, with fewer trials, and without irrelevant faults. `at_most` is the number of
    schedules to try."""
    found = True
    while found and at_most > 0:
        found = False
        for smaller in schedule.smaller():
            at_most -= 1
            if failure_of(smaller):
                schedule, found = smaller, True
                break
            if at_most <= 0:
                break
    return schedule
