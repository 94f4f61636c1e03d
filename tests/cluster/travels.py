"""What test_code_travels.py runs in namespaces of its own: `python travels.py <directory> <case>...`.

A head without CPUs, where the drivers are, and a node with one CPU, which sees nothing of what the drivers have: no
project, and no dray. Neither node has dray installed. What each driver said, and what its trials found, is written to
<directory>/seen.json.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray
import yaml
from ray.cluster_utils import Cluster

from tests.cluster.bad_nodes import node
from tests.cluster.namespaces import ROOT
from tests.ray.harness import lines, wait_for

PROJECT = ROOT / "tests" / "cluster" / "travelling"
LONGEST_S = 240
"""A driver may take."""


def uninstall(packages: Path) -> None:
    """Hide what of dray is installed, in this mount namespace."""
    for file in packages.glob("*.pth"):
        if str(ROOT) in file.read_text():
            subprocess.run(["mount", "--bind", "/dev/null", file], check=True)
    for name in ("dray", "searchers"):
        if (packages / name).is_dir():
            subprocess.run(["mount", "-t", "tmpfs", "none", packages / name], check=True)
    command = [sys.executable, "-c", "import importlib.util as u; print(u.find_spec('dray'), u.find_spec('searchers'))"]
    found = subprocess.run(command, cwd="/", capture_output=True, text=True, check=True).stdout
    assert found == "None None\n", found


class Drivers:
    """Drivers on the head.

    Args:
        directory: which every node sees.
        address: of the cluster.
    """

    def __init__(self, directory: Path, address: str) -> None:
        self.directory, self.address = directory, address
        self.project, self.dray = directory / "mine" / "project", directory / "lib"
        self.seen: dict[str, Any] = {}

    def prepare(self) -> None:
        for name in ("dray", "searchers"):
            shutil.copytree(ROOT / name, self.dray / name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copytree(PROJECT, self.project, ignore=shutil.ignore_patterns("__pycache__"))
        (self.project / "points.csv").write_text("1,2,3,4")
        (self.project / "secret.txt").write_text("no code")
        (self.project / ".env").write_text("PASSWORD=x")
        (self.project / ".drayignore").write_text("secret.txt\n")
        (self.directory / "shared").mkdir()
        (self.directory / "shared" / "large.csv").write_text("1")
        (self.project / "shared").symlink_to("../../shared")

    def run(self, case: str, *command: str | Path, cwd: Path = Path("/"), stdin: Path | None = None) -> None:
        """Run a driver to its end."""
        began, said = time.time(), self.directory / f"{case}.txt"
        with (stdin or Path("/dev/null")).open() as file, said.open("w") as output:
            ran = subprocess.run(
                ["timeout", str(LONGEST_S), *map(str, command)],
                cwd=cwd,
                stdin=file,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self._environment(),
            )
        self.seen[case] = {
            "rc": ran.returncode,
            "said": said.read_text(),
            "found": lines(self.directory / f"{case}.jsonl"),
            "seconds": time.time() - began,
        }

    def _config(self, case: str) -> tuple[Path, Path]:
        """The file that the case's trials write to, in a config; and the experiment's directory."""
        config = {
            "name": case,
            "entrypoint": "beside:Travelled",
            "hyperparameters": {"global_batch_size": 2, "record": str(self.directory / f"{case}.jsonl")},
            "searcher": {"name": "random", "metric": "error", "max_length": {"batches": 4}, "max_trials": 1},
        }
        path = self.directory / f"{case}.yaml"
        path.write_text(yaml.safe_dump(config))
        return path, self.directory / f"{case}-experiment"

    def _environment(self) -> dict[str, str]:
        home = str(self.directory / "results")
        return {**os.environ, "PYTHONPATH": str(self.dray), "RAY_ADDRESS": self.address, "DRAY_HOME": home}

    def served(self) -> None:
        """Two experiments, one after the other, on a server beside the head; the second with other code."""
        config, _ = self._config("served")
        with (self.directory / "server.txt").open("w") as said:
            serve = [sys.executable, "-m", "dray.cli", "serve"]
            server = subprocess.Popen(serve, cwd="/", env=self._environment(), stdout=said, stderr=said)
        try:
            wait_for((self.directory / "results" / ".server.json").exists, "the server")
            command = (sys.executable, "-m", "dray.cli", "experiment", "create", config, self.project)
            self.run("served", *command)
            with self._second_edition():
                self.run("served", *command)
        finally:
            server.terminate()
            server.wait()

    @contextlib.contextmanager
    def _second_edition(self) -> Iterator[None]:
        beside = self.project / "beside.py"
        before = beside.read_text()
        beside.write_text(before.replace('EDITION = "first"', 'EDITION = "second"'))
        yield
        beside.write_text(before)

    def notebook(self) -> None:
        """No file has the class; the process runs where the notebook lies."""
        script = self.project / "driver.py"
        self.run("notebook", sys.executable, "-", *self._config("notebook"), cwd=self.project, stdin=script)

    def resumed(self) -> None:
        """With code beside the script that is another by now."""
        command = (sys.executable, self.project / "driver.py", *self._config("resumed"))
        self.run("created", *command)
        with self._second_edition():
            self.run("resumed", *command, "2")


def main(directory: Path, *cases: str) -> None:
    os.chdir("/")
    del os.environ["PYTHONPATH"]
    uninstall(Path(sysconfig.get_path("purelib")))
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    drivers = Drivers(directory, cluster.address)
    drivers.prepare()
    try:
        ray.init(cluster.address, log_to_driver=False)
        # Not the whole repository: Python's environment may lie in it.
        hidden = (directory / "mine", drivers.dray, ROOT / "dray", ROOT / "searchers")
        hide = " && ".join(f"mount -t tmpfs none {place}" for place in hidden)
        with node(cluster.address, "127.0.0.2", prepare=hide):
            for case in cases:
                getattr(drivers, case)()
                (directory / "seen.json").write_text(json.dumps(drivers.seen))
    finally:
        shutil.copytree("/tmp/ray/session_latest/logs", directory / "ray-logs", symlinks=True)
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
