"""What test_code_travels.py runs in namespaces of its own: `python travels.py <directory>`.

A head without CPUs, where the drivers are, and a node with one CPU, which sees nothing of what the drivers have: no
project, and no dray. Neither node has dray installed. What the drivers said is written to <directory>/said.txt,
and what their trials found to <directory>/found.jsonl.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import ray
import yaml
from ray.cluster_utils import Cluster

from tests.cluster.bad_nodes import node
from tests.cluster.namespaces import ROOT

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
    # What is left of a folder with clusters' templates, which an editable installation makes, has no origin.
    looks = (
        "from importlib.util import find_spec; print([find_spec(name) and find_spec(name).origin for name in names])"
    )
    command = [sys.executable, "-c", f"names = 'dray', 'searchers'; {looks}"]
    found = subprocess.run(command, cwd="/", capture_output=True, text=True, check=True).stdout
    assert found == "[None, None]\n", found


def prepare(directory: Path, project: Path, library: Path) -> None:
    for name in ("dray", "searchers"):
        shutil.copytree(ROOT / name, library / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(PROJECT, project, ignore=shutil.ignore_patterns("__pycache__"))
    (project / "points.csv").write_text("1,2,3,4")
    (project / "secret.txt").write_text("no code")
    (project / ".env").write_text("PASSWORD=x")
    (project / ".drayignore").write_text("secret.txt\n")
    (directory / "shared").mkdir()
    (directory / "shared" / "large.csv").write_text("1")
    (project / "shared").symlink_to("../../shared")
    config = {
        "name": "travels",
        "hyperparameters": {"global_batch_size": 2, "record": str(directory / "found.jsonl")},
        "searcher": {"name": "random", "metric": "error", "max_length": {"batches": 4}, "max_trials": 1},
    }
    (directory / "config.yaml").write_text(yaml.safe_dump(config))


def main(directory: Path) -> None:
    os.chdir("/")
    del os.environ["PYTHONPATH"]
    uninstall(Path(sysconfig.get_path("purelib")))
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    project, library = directory / "mine" / "project", directory / "lib"
    prepare(directory, project, library)

    def run(*command: str | Path, cwd: Path = Path("/"), stdin: Path = Path("/dev/null")) -> None:
        environment = {**os.environ, "PYTHONPATH": str(library), "RAY_ADDRESS": cluster.address}
        with stdin.open() as file, (directory / "said.txt").open("a") as said:
            subprocess.run(
                [sys.executable, *command, directory / "config.yaml", directory / "experiment"],
                cwd=cwd,
                stdin=file,
                stdout=said,
                stderr=subprocess.STDOUT,
                env=environment,
                timeout=LONGEST_S,
                check=True,
            )

    try:
        ray.init(cluster.address, log_to_driver=False)
        # Not the whole repository: Python's environment may lie in it.
        hidden = (directory / "mine", library, ROOT / "dray", ROOT / "searchers")
        with node(
            cluster.address, "127.0.0.2", prepare=" && ".join(f"mount -t tmpfs none {place}" for place in hidden)
        ):
            # As from a notebook: no file has the class, and the process runs where the notebook lies.
            run("-", cwd=project, stdin=project / "driver.py")
            beside = project / "beside.py"
            beside.write_text(beside.read_text().replace('EDITION = "first"', 'EDITION = "second"'))
            run(project / "driver.py", "--resume")
    finally:
        shutil.copytree("/tmp/ray/session_latest/logs", directory / "ray-logs", symlinks=True)
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
