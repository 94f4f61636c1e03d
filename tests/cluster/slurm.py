"""What test_slurm.py runs in namespaces of its own: `python slurm.py <directory>`.

clusters/slurm.sh as a batch job of two nodes, with a `srun` and a `scontrol` of ours. It is preempted in the two ways
that Slurm has, and each time it runs again on other nodes. What was seen is written to <directory>/seen.json.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml

from tests.cluster.hosts import SHARED, Host
from tests.cluster.machines import make_network
from tests.cluster.namespaces import ROOT
from tests.ray.harness import TRIALS, lines, recorded, saved_batches, wait_for

BATCHES, TRIAL_COUNT = 240, 2
GRACE_S = 60.0
"""GraceTime of the partition: from the signal to SIGKILL."""
JOB = "4711"

# The nodes' processes are in one namespace, so a node can enter another by the number of its first process.
SRUN = f"""#!/bin/bash
set -e
echo "srun $*" >> {SHARED}/slurm.txt
nodes=$SLURM_JOB_NODELIST
while [[ $1 == --* ]]; do
    case $1 in
        --nodelist=*) nodes=${{1#*=}} ;;
        --exclude=*) nodes=$(tr , '\\n' <<< "$nodes" | grep -vx "${{1#*=}}") ;;
        --nodes=* | --ntasks=*) ;;
        *) echo "srun: unrecognized option $1" >&2; exit 1 ;;
    esac
    shift
done
[[ $nodes != *,* ]] || {{ echo "more than one node: $nodes" >&2; exit 1; }}
exec nsenter --target="$(cat "{SHARED}/nodes/$nodes")" --mount --uts --ipc --net --wdns="$PWD" -- "$@"
"""
SCONTROL = f"""#!/bin/bash
echo "scontrol $*" >> {SHARED}/slurm.txt
[[ "$1 $2" != "show hostnames" ]] || tr , '\\n' <<< "$3"
"""


class Nodes:
    """Two nodes, on which the job runs.

    Args:
        number: how often it ran before.
        directory: which all nodes see.
    """

    def __init__(self, number: int, directory: Path) -> None:
        first = 2 * number + 2
        names = {f"node{number}": f"10.77.0.{number}" for number in (first, first + 1)}
        idle = ["bash", "-c", "sleep infinity & wait"]
        self._hosts = [Host(name, address, directory, idle, own_processes=False) for name, address in names.items()]
        for host in self._hosts:
            (directory / "nodes" / host.name).write_text(str(host.first))
        self._log = directory / "job.log"
        with self._log.open("ab") as log:
            self.batch = self._hosts[0].start(
                ["bash", f"{SHARED}/slurm.sh"],
                {
                    "PATH": f"{SHARED}/bin:{Path(sys.executable).parent}:/usr/bin:/bin:/usr/sbin:/sbin",
                    "SLURM_JOB_ID": JOB,
                    "SLURM_JOB_NAME": "digits",
                    "SLURM_JOB_NODELIST": ",".join(names),
                },
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def end_tasks(self) -> None:
        """SIGTERM for the tasks of the job's steps, as at a preemption by default."""
        for process in _processes(self._hosts):
            if "ray.scripts" in (command := _command(process)) or "bin/ray\0start" in command:
                os.kill(process, signal.SIGTERM)

    def power_off(self) -> None:
        for process in _processes(self._hosts):
            os.kill(process, signal.SIGKILL)
        for host in self._hosts:
            host.power_off()
        self.batch.wait()


def _processes(hosts: list[Host]) -> list[int]:
    """The processes that are on these hosts."""
    networks = {os.readlink(f"/proc/{host.first}/ns/net") for host in hosts}
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            if os.readlink(place / "ns" / "net") in networks:
                found.append(int(place.name))
        except OSError:  # it has ended
            continue
    return found


def _command(process: int) -> str:
    try:
        return Path(f"/proc/{process}/cmdline").read_text()
    except OSError:
        return ""


def prepare(directory: Path) -> None:
    """What the nodes share: the script, filled in, the search, and the commands of Slurm."""
    places = {
        "source FILL_IN_ENVIRONMENT/bin/activate": ":",
        "FILL_IN_CONFIG": f"{SHARED}/model/search.yaml",
        "FILL_IN_RESULTS": f"{SHARED}/results",
    }
    text = (ROOT / "clusters" / "slurm.sh").read_text()
    for place, filling in places.items():
        assert text.count(place) == 1, place
        text = text.replace(place, filling)
    (directory / "slurm.sh").write_text(text)
    shutil.copytree(TRIALS, directory / "model", ignore=shutil.ignore_patterns("__pycache__"))
    config = recorded(SHARED / "record", trials=TRIAL_COUNT, batches=BATCHES, pause_s=0.2, min_validation_period=None)
    (directory / "model" / "search.yaml").write_text(yaml.safe_dump(config))
    for name in ("bin", "nodes"):
        (directory / name).mkdir()
    for name, script in (("srun", SRUN), ("scontrol", SCONTROL)):
        (directory / "bin" / name).write_text(script)
        (directory / "bin" / name).chmod(0o755)


def main(directory: Path) -> None:
    make_network()
    prepare(directory)
    seen: dict[str, Any] = {"codes": [], "took_s": [], "saved": [], "trained": []}

    def trained() -> list[int]:
        batches = [line["trial"] for line in lines(directory / "record") if "batch" in line]
        return [batches.count(trial) for trial in range(TRIAL_COUNT)]

    def preempted(number: int, *, batch: bool) -> None:
        """Run the job until all trials train, and preempt it.

        Args:
            batch: whether its script gets the signal (`send_user_signal`), or only the processes that srun has started.
        """
        nodes, before = Nodes(number, directory), trained()
        try:
            wait_for(lambda: all(now > then + 10 for now, then in zip(trained(), before, strict=True)), "training", 300)
            began = time.monotonic()
            nodes.batch.send_signal(signal.SIGTERM) if batch else nodes.end_tasks()
            try:
                seen["codes"].append(nodes.batch.wait(GRACE_S))
            except subprocess.TimeoutExpired:
                seen["codes"].append(None)
            seen["took_s"].append(time.monotonic() - began)
        finally:
            nodes.power_off()
        place = directory / "results" / f"digits-{JOB}"
        seen["saved"].append([saved_batches(place, trial) for trial in range(TRIAL_COUNT)])
        seen["trained"].append(trained())

    try:
        preempted(0, batch=True)
        preempted(1, batch=False)
        nodes = Nodes(2, directory)
        try:
            seen["codes"].append(nodes.batch.wait(300))
        finally:
            nodes.power_off()
    finally:
        print((directory / "job.log").read_text(), (directory / "slurm.txt").read_text(), sep="\n", flush=True)
    seen["slurm"] = (directory / "slurm.txt").read_text().splitlines()
    (directory / "seen.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
