"""What goes wrong in a simulation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from tests.simulation.cluster import Rank
from tests.simulation.schedule import Fault

if TYPE_CHECKING:
    from tests.simulation.simulation import Simulation

T = TypeVar("T")


def happen(sim: Simulation, fault: Fault) -> None:
    """Let a fault happen, if there is anything that it can happen to."""
    world, which = sim.world, fault.which
    if world.lines is not None:
        world.note(f"-- {fault}")
    drivers = [each for each in sim.drivers if each.alive and each.driver is not None]
    ranks = [each for each in world.processes if isinstance(each, Rank) and each.alive]
    match fault.kind:
        case "cut":
            if link := _one([each for each in world.links if each.is_open], which):
                link.cut()
        case "rank":
            if rank := _one(ranks, which):
                rank.end()
        case "group":
            if rank := _one(ranks, which):
                for each in list(rank.group.ranks):
                    each.end()
        case "node":
            if node := _one(sim.cluster.nodes, which):
                sim.cluster.kill(node)
                for experiment in sim.experiments:
                    experiment.store.lose_power()
        case "drain":
            if (node := _one(sim.cluster.nodes, which)) and not node.is_draining:
                node.is_draining = True
                for driver in drivers:
                    driver.post(driver.lending.nodes_drain, [node.name])
                world.at(30.0, lambda: node.is_alive and sim.cluster.kill(node))
        case "driver":
            if driver := _one(drivers, which):
                driver.fuse = int(which * 1000) % 5 - 1
                if driver.fuse < 0:
                    driver.end()
        case "torn":
            if experiment := _one(sim.experiments, which):
                experiment.disk.kills_writer = True
        case "handle":
            if (driver := _one(drivers, which)) and driver.tune is not None:
                driver.tune.kill_handle()
        case "full":
            if experiment := _one(sim.experiments, which):
                experiment.disk.full_until = world.now + 30 * which
        case "away":
            if experiment := _one(sim.experiments, which):
                experiment.store.away_until = world.now + 60 * which
        case "stop":
            if driver := _one(drivers, which):
                driver.interrupt()
        case _:
            raise AssertionError(fault)


def _one(several: list[T], which: float) -> T | Any:
    """One of several; None if there is none."""
    return several[int(which * len(several))] if several else None
