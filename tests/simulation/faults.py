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
    drivers, server = sim.drivers, sim.server
    if server is not None and not server.alive:
        server = None
    name = _one(sim.experiments, which * 7 % 1).name
    ranks = [each for each in world.processes if isinstance(each, Rank) and each.alive]
    match fault.kind:
        case "cut":
            links = [each for each in world.links if each.is_open]
            theirs = [each for each in links if each.client.process in drivers]  # to the server
            if link := _one(theirs if theirs and which < 0.5 else links, 2 * which % 1):
                link.cut()
        case "rank":
            if rank := world.waiting if which < 0.5 and world.waiting is not None else _one(ranks, which):
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
                for owner in drivers if server is None else [server]:
                    owner.post(owner.lending.nodes_drain, [node.name])
                world.at(30.0, lambda: node.is_alive and sim.cluster.kill(node))
        case "driver" | "server":
            if process := _one(drivers, which) if fault.kind == "driver" else server:
                process.fuse = int(which * 1000) % 5 - 1
                if process.fuse < 0:
                    process.end()
        case "torn":
            _one([sim.results, *sim.experiments] if server else sim.experiments, which).disk.kills_writer = True
        case "handle":
            if (driver := _one(drivers, which)) and driver.tune is not None:
                driver.tune.kill_handle()
        case "full":
            for each in [sim.results, *sim.experiments]:
                each.disk.full_until = world.now + 30 * which
        case "away":
            for experiment in sim.experiments:
                experiment.store.away_until = world.now + 60 * which
        case "stop":
            if driver := _one(drivers, which):
                driver.interrupt()
        case "pause" if server:
            server.ask(server.want, name, "pause", server.scheduler.act, "pause")
        case "kill" if server:
            server.ask(server.want, name, "stop", server.scheduler.act, "kill")
        case "share" if server:
            server.ask(server.scheduler.change, name, {"priority": 1 + int(which * 60), "weight": 0.5 + which})
        case "close" if server:
            server.ask(server.scheduler.close)


def _one(several: list[T], which: float) -> T | Any:
    """One of several; None if there is none."""
    return several[int(which * len(several))] if several else None
