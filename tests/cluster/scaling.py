"""What test_scaling.py runs in namespaces of its own: `python scaling.py <what> <directory> <nodes>`.

A head without CPUs, and Ray's autoscaler that may start so many nodes of one false GPU each, none of which is there at
the beginning. What was seen is written to <directory>/seen.json.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import placement_group_table

import dray
from dray.cluster.view import GPU_TYPE, NODE_TYPE
from dray.groups import node_choice
from tests.cluster.autoscaling import OUT_OF, Nodes, nodes
from tests.cluster.no_capacity import WHY
from tests.ray.harness import ROOT, TRIALS, Driver, Meanwhile, lines, recorded, wait_for, write_config

FALSE_GPUS = f"{ROOT / 'tests' / 'cluster' / 'false_gpus'}{os.pathsep}{ROOT}"
"""PYTHONPATH of all processes."""


TYPES: dict[str, dict[str, Any]] = {
    "spot_first": {
        "on_demand": {"priority": 0, "labels": {NODE_TYPE: "on_demand"}},
        "spot": {"priority": 1, "labels": {NODE_TYPE: "spot"}},
    },
    "gpu_types": {
        "t4": {"priority": 2, "labels": {NODE_TYPE: "t4", GPU_TYPE: "T4"}},
        "l4": {"priority": 1, "labels": {NODE_TYPE: "l4", GPU_TYPE: "L4"}},
        "a100": {"max_workers": 1, "labels": {NODE_TYPE: "a100", GPU_TYPE: "A100"}},
    },
}
"""Types of machines, by what is run; otherwise there is one."""


def node_type(most: int) -> dict[str, Any]:
    return {"resources": {"CPU": 1, "GPU": 1}, "node_config": {}, "min_workers": 0, "max_workers": most}


def config(directory: Path, *, trials: int, at_once: int, **resources: Any) -> dict[str, Any]:
    """A config whose trials wait for a file, so that the number of nodes does not depend on the trials' speed."""
    made = recorded(directory / "record", trials=trials, batches=20, entrypoint="recorded:Held")
    made["hyperparameters"] |= {"until": str(directory / "until"), "longer": str(directory / "longer")}
    made["searcher"]["max_concurrent_trials"] = at_once
    # What a slot is, is found out: there is not one GPU yet.
    made["resources"] = resources
    return made


class Timeline:
    """What changed, and when, in seconds since its making."""

    def __init__(self) -> None:
        self.changes: list[tuple[float, str, int]] = []
        self._began, self._closed = time.monotonic(), False

    def watch(self, **values: Callable[[], int]) -> None:
        """Until `close`."""
        known: dict[str, int] = {}
        while not self._closed:
            for name, value in values.items():
                if (now := value()) != known.get(name):
                    known[name] = now
                    self.note(name, now)
            time.sleep(0.1)

    def note(self, name: str, value: int) -> None:
        self.changes.append((round(time.monotonic() - self._began, 1), name, value))

    def last(self, name: str) -> int:
        return [value for _, each, value in self.changes if each == name][-1]

    def close(self) -> None:
        self._closed = True


def groups(state: str | None = None) -> int:
    """Worker groups that have resources, or ask for some; of this state."""
    table = placement_group_table().values()
    states = [group["state"] for group in table if any("GPU" in bundle for bundle in group["bundles"].values())]
    return states.count(state) if state else len(states) - states.count("REMOVED")


def sweep(directory: Path, most: int) -> dict[str, Any]:
    """Trials of two slots, more at once than there is ever room for: from no node to all of use, and back."""
    wanted = most // 2
    timeline = Timeline()
    (directory / "longer").touch()

    def look() -> None:
        wait_for(lambda: groups("CREATED") == wanted, "all groups that there can be", 120)
        wait_for(lambda: len({line["trial"] for line in lines(directory / "record")}) == wanted, "their trials", 120)
        (directory / "until").touch()

    watch = {"nodes": lambda: nodes("GPU"), "groups": lambda: groups("CREATED"), "waiting": lambda: groups("PENDING")}
    with Meanwhile(lambda: timeline.watch(**watch)):
        try:
            made = config(directory, trials=6, at_once=3, slots_per_trial=2)
            with Meanwhile(look):
                result = dray.Experiment(made, model_dir=TRIALS, path=directory / "experiment").run()
            timeline.note("done", 1)
            left = groups()
            wait_for(lambda: not nodes("GPU"), "all nodes to be given back", 90)
            wait_for(lambda: timeline.last("nodes") == 0, "that to be noted")
        finally:
            timeline.close()
    states = result.trials[["state", "restarts"]].values.tolist()
    return {"trials": states, "timeline": timeline.changes, "left": left}


def in_vain(directory: Path, most: int) -> dict[str, Any]:
    """No node comes; then Ctrl-C."""
    OUT_OF.write_text("worker")
    file = write_config(directory, config(directory, trials=3, at_once=3, slots_per_trial=1))
    log = directory / "log"
    driver = Driver("create", file, TRIALS, "--path", directory / "run", log=log, RAY_ADDRESS="auto")
    try:
        driver.wait_for(lambda: "could not start" in log.read_text(), "word of why there are no nodes")
        waiting = groups("PENDING"), groups("REMOVED")
        driver.interrupt()
        began = time.monotonic()
        code = driver.wait()
        ended = time.monotonic() - began
        wait_for(lambda: not groups(), "the demand to end")
    finally:
        driver.close()
    autoscalers = Path("/tmp/ray/session_latest/logs/monitor.log").read_text()
    return {
        "code": code,
        "log": log.read_text(),
        "ended_s": ended,
        "waiting": waiting,
        "in the autoscaler's log": WHY in autoscalers,
    }


def spot_first(directory: Path, most: int) -> dict[str, Any]:
    """Two searches: while there are no spot machines, which the cloud does not say, and when there are."""
    timeline, found = Timeline(), {}
    node_choice.RETRY_S = 5.0
    (directory / "until").touch()
    (directory / "longer").touch()
    watch = {name: functools.partial(nodes, "GPU", name) for name in ("spot", "on_demand")}
    with Meanwhile(lambda: timeline.watch(**watch)):
        try:
            for name, out_of in (("sold out", "spot silently"), ("to be had", "")):
                OUT_OF.write_text(out_of)
                timeline.note(name, 1)
                made = config(directory, trials=2, at_once=2, slots_per_trial=1)
                result = dray.Experiment(made, model_dir=TRIALS, path=directory / name).run()
                found[name] = result.trials[["state", "restarts"]].values.tolist()
                timeline.note("done", 1)
                wait_for(lambda: not nodes("GPU"), "all nodes to be given back", 90)
        finally:
            timeline.close()
    return {"trials": found, "timeline": timeline.changes}


def gpu_types(directory: Path, most: int) -> dict[str, Any]:
    """Three trials at a time, on a machine with an A100 and others with L4s; T4s are not asked for."""
    (directory / "longer").touch()

    def look() -> None:
        wait_for(lambda: groups("CREATED") == 3, "three groups", 120)
        wait_for(lambda: len({line["trial"] for line in lines(directory / "record")}) == 3, "their trials", 120)
        (directory / "until").touch()

    made = config(directory, trials=3, at_once=3, slots_per_trial=1, slot_type=["A100", "L4"])
    with Meanwhile(look):
        result = dray.Experiment(made, model_dir=TRIALS, path=directory / "experiment").run()
    table = result.timeline
    spent = (table["end"] - table["start"]).groupby(table["gpu_type"]).sum()
    return {"types": sorted(result.trials["gpu_type"]), "spent": spent.to_dict()}


def main(what: str, directory: Path, most: int) -> None:
    types = {name: node_type(most) | more for name, more in TYPES.get(what, {"worker": {}}).items()}
    cluster = Nodes({"CPU": 0}, types, max_workers=most)
    cluster.start()
    try:
        ray.init("auto", log_to_driver=False)
        assert nodes("GPU") == 0
        seen = globals()[what](directory, most)
        seen["record"] = lines(directory / "record")
        (directory / "seen.json").write_text(json.dumps(seen))
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
