"""What test_nodes.py runs in namespaces of its own: `python misnamed.py <directory>`.

Two nodes that take the address of their name for 127.0.1.1, as Debian and Ubuntu set it up: the cluster check, and a
trial with a slot on each. What came of it is written to <directory>/seen.json.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import yaml

from tests.cluster.hosts import SHARED, Host, shell
from tests.cluster.machines import make_network
from tests.ray.harness import TRIALS, recorded, wait_for

HEAD = "10.77.0.2"


def node(name: str, address: str, directory: Path, options: str) -> Host:
    command = shell(f"ray start {options} --num-cpus=1 --block & wait")
    variables = {"RAY_AUTH_MODE": "disabled", "RAY_ADDRESS": f"{HEAD}:6379"}
    host = Host(name, address, directory, command, variables, calls_itself="127.0.1.1")
    wait_for(lambda: "Ray runtime started" in host.log.read_text(), f"Ray on {name}", 200)
    return host


def main(directory: Path) -> None:
    make_network()
    shutil.copytree(TRIALS, directory / "model", ignore=shutil.ignore_patterns("__pycache__"))
    resources = {"slot": "cpu", "slots_per_trial": 2}
    config = recorded(SHARED / "record", trials=1, batches=10, resources=resources, max_restarts=0)
    (directory / "model" / "search.yaml").write_text(yaml.safe_dump(config))
    seen: dict[str, Any] = {}
    hosts: list[Host] = []
    try:
        hosts.append(node("one", HEAD, directory, "--head --port=6379"))
        hosts.append(node("two", "10.77.0.3", directory, f"--address={HEAD}:6379"))
        for what, command in {
            "check": f"dray cluster check --storage {SHARED}/results --json",
            "trial": f"dray experiment create {SHARED}/model/search.yaml --path {SHARED}/results",
        }.items():
            ran = hosts[0].run(shell(f"{command} 2>{SHARED}/{what}.err"), timeout=300)
            seen[what] = {"code": ran.returncode, "out": ran.stdout, "err": (directory / f"{what}.err").read_text()}
    finally:
        for host in hosts:
            host.power_off()
    (directory / "seen.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
