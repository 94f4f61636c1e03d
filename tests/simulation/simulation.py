"""Runs a schedule, and checks what must hold at the end."""

from __future__ import annotations

import traceback
from dataclasses import replace
from functools import partial
from pathlib import Path

from tests.simulation import faults
from tests.simulation.cluster import Cluster
from tests.simulation.driver import DriverProcess
from tests.simulation.experiment import Experiment
from tests.simulation.schedule import Schedule
from tests.simulation.server import LOOK_S, Results, ServerProcess
from tests.simulation.world import Failed, World


class Simulation:
    """A world in which a schedule happens.

    Args:
        lines: gets a line for each step.
    """

    def __init__(self, schedule: Schedule, lines: list[str] | None = None) -> None:
        self.schedule = schedule
        self.world = World(schedule.seed, lines, wire=schedule.wire, slow_s=schedule.slow_s)
        self.cluster = Cluster(self.world, schedule.nodes)
        self.experiments = [
            Experiment(self.world, f"experiment-{number}", setup) for number, setup in enumerate(schedule.setups)
        ]
        self.finished: set[str] = set()
        self._runs: list[DriverProcess] = []
        self.server: ServerProcess | None = None
        self.results = Results(self.world, self.experiments)
        self._is_done = False
        self.world.faults = [
            (fault.step, partial(faults.happen, self, fault))
            for fault in sorted(schedule.faults, key=lambda each: -each.step)
        ]

    def run(self) -> None:
        """Let everything happen.

        Raises:
            Failed: an invariant does not hold.
        """
        if self.schedule.server:
            self._serve()
            self._look()
        else:
            for experiment in self.experiments:
                self.start(experiment)
        self.world.run(self._waits)
        self.world.drain()
        for experiment in self.experiments:
            self._check(experiment)
        for node in self.cluster.nodes:
            if node.free != node.slots:
                raise Failed(f"{node.name} has {node.slots - node.free} slots that nobody has freed")

    def start(self, experiment: Experiment) -> None:
        """The user runs an experiment, or resumes it."""
        process = DriverProcess(self.world, experiment, self.cluster, self._ended)
        process.own_cluster = self.schedule.own_cluster
        self._runs = [process]
        process.start()

    @property
    def drivers(self) -> list[DriverProcess]:
        """The processes of experiments that run."""
        found = self._runs if self.server is None else self.server.processes.values()
        return [each for each in found if each.alive and each.driver is not None]

    def _serve(self) -> None:
        self.server = ServerProcess(self.world, self.cluster, self.results, self._server_ended)

    def _server_ended(self) -> None:
        if self._is_done:
            self.world.is_over = True
        else:
            self.world.at(self.world.random.uniform(2.0, 20.0), self._serve)

    def _look(self) -> None:
        assert self.server is not None
        if self.server.alive and not self.server.scheduler.closing and self.server.look():
            self._is_done = True
            self.server.ask(self.server.scheduler.close)
        else:
            self.world.at(LOOK_S * self.world.random.random(), self._look)

    def _ended(self, process: DriverProcess, how: str) -> None:
        experiment = process.experiment
        if self.world.lines is not None:
            self.world.note(f"{process.name} has ended: {how}")
        if how.startswith("failed"):
            raise Failed(f"{process.name} {how}")
        if how == "done":
            if not experiment.extensions:
                self.finished.add(experiment.name)
                self.world.is_over = len(self.finished) == len(self.experiments)
                return
            experiment.extension.update(experiment.extensions.pop(0))
        self.world.at(self.world.random.uniform(0.0, 20.0), self.start, experiment)

    def _waits(self) -> str:
        return "; ".join(f"{each.name}: {dict(each.driver.search.states)}" for each in self.drivers if each.driver)

    def _check(self, experiment: Experiment) -> None:
        facts = experiment.facts
        if left := facts.created - facts.ended.keys():
            raise Failed(f"{experiment.name}: trials {sorted(left)} have never ended")


def failure_of(schedule: Schedule, lines: list[str] | None = None) -> str:
    """Run a schedule; returns what fails, or ""."""
    try:
        run = Simulation(schedule, lines)
        run.run()
        if schedule.seed % 8 == 0 and schedule.faults and any(map(is_determined, run.experiments)):
            check_same(run, schedule)
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__} at {Path(where.filename).name}:{where.lineno}: {error}"
    return ""


def is_determined(experiment: Experiment) -> bool:
    """Whether its method does not compare trials: faults change nothing."""
    return experiment.config.searcher.name in ("random", "grid", "single")


def check_same(run: Simulation, schedule: Schedule) -> None:
    """Without faults, each trial starts, reports and ends in the same way, unless it has failed too often."""
    sound = Simulation(replace(schedule, faults=()))
    sound.run()
    for one, other in zip(run.experiments, sound.experiments, strict=True):
        if is_determined(one):
            given_up = one.facts.given_up | other.facts.given_up
            found, expected = one.facts.trials(given_up), other.facts.trials(given_up)
            if repr(found) != repr(expected):  # a NaN is not itself
                raise Failed(f"{one.name}: without faults its trials are {expected}, in place of {found}")


def shrunk(schedule: Schedule, *, at_most: int = 300) -> Schedule:
    """A smaller schedule that fails as well: fewer trials, and without the faults that don't matter.

    Args:
        at_most: how many schedules to try.
    """
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
