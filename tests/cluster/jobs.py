"""What test_jobs.py runs in namespaces of its own: `python jobs.py <directory> <case>...`.

A head with two CPUs, a dashboard and a token, to which Ray's jobs are submitted; what was seen is written to
<directory>/seen.json.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml

from tests.cluster.namespaces import ROOT
from tests.ray.harness import lines, recorded, saved_batches, wait_for

GCS, DASHBOARD = "127.0.0.1:6379", "http://127.0.0.1:8265"
BATCHES = 100
DRIVER = """
import sys
import dray

name, path = sys.argv[1:]
if name == "resume":
    experiment = dray.Experiment.resume(path)
else:
    experiment = dray.Experiment(f"{name}.yaml", model_dir=".", path=path)
print("states:", *experiment.run().trials["state"])
"""


class Cases:
    """Args:
    directory: for all that they leave.
    """

    def __init__(self, directory: Path) -> None:
        self.directory, self.code = directory, directory / "code"
        self.seen: dict[str, Any] = {}
        shutil.copytree(ROOT / "tests" / "ray" / "trials", self.code, ignore=shutil.ignore_patterns("__pycache__"))
        (self.code / "driver.py").write_text(DRIVER)
        (directory / "nobody").mkdir()
        self.config("short", trials=1, batches=20)
        self.config("long", trials=1, batches=BATCHES, pause_s=0.1, min_validation_period=None)

    def config(self, name: str, **fields: Any) -> None:
        config = recorded(self.directory / f"record-{name}", **fields)
        (self.code / f"{name}.yaml").write_text(yaml.safe_dump(config))

    def run(self, name: str, *command: object, **environment: str | None) -> dict[str, Any]:
        """Run a command there, and note how it ended; a variable that is None is not there."""
        began = time.monotonic()
        variables = {**os.environ, **environment}
        ran = subprocess.run(
            list(map(str, command)),
            cwd=self.code,
            env={key: value for key, value in variables.items() if value is not None},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.seen[name] = {"rc": ran.returncode, "said": ran.stdout, "seconds": time.monotonic() - began}
        return self.seen[name]

    def submit(self, name: str, *entrypoint: object, options: tuple[str, ...] = (), **environment: str | None) -> str:
        command = ("ray", "job", "submit", "--address", DASHBOARD, "--working-dir", ".", *options, "--", *entrypoint)
        said = self.run(name, *command, **environment)["said"]
        found = re.search(r"raysubmit_\w+", said)
        return found[0] if found else ""

    # ------------------------------------------------------------------ the cases
    def token(self) -> None:
        """Who has the cluster's token runs a job, and who has none, or another, does not."""
        others: dict[str, dict[str, str | None]] = {
            "none": {"HOME": str(self.directory / "nobody"), "RAY_AUTH_MODE": None},
            "none, but asked for": {"HOME": str(self.directory / "nobody")},
            "wrong": {"RAY_AUTH_TOKEN": "0" * 64},
        }
        for name, environment in others.items():
            self.submit(f"job, {name}", "python", "driver.py", "short", self.directory / name, **environment)
            command = ("python", "driver.py", "short", self.directory / name)
            self.run(f"driver, {name}", *command, RAY_ADDRESS=GCS, **environment)
            self.run(f"command, {name}", "dray", "cluster", "status", RAY_ADDRESS=GCS, **environment)
        self.submit("job, right", "python", "driver.py", "short", self.directory / "right")
        self.run("jobs", "ray", "job", "list", "--address", DASHBOARD)

    def stopped(self) -> None:
        """`ray job stop`: the trial saves; another job goes on."""
        path, record = self.directory / "stopped", self.directory / "record-long"
        patience = ("--no-wait", "--runtime-env-json", json.dumps({"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "60"}}))
        job = self.submit("submitted", "python", "driver.py", "long", path, options=patience)
        wait_for(lambda: len(lines(record)) > BATCHES // 5, "a trial trains")
        self.run("stop", "ray", "job", "stop", "--address", DASHBOARD, job)
        self.run("stopped", "ray", "job", "status", "--address", DASHBOARD, job)
        self.run("log", "ray", "job", "logs", "--address", DASHBOARD, job)
        self.seen["saved"] = saved_batches(path, 0)
        self.seen["trained"] = [line["batch"] for line in lines(record) if "batch" in line]
        self.submit("resumed", "python", "driver.py", "resume", path)
        self.seen["all"] = [line["batch"] for line in lines(record) if "batch" in line]


def main(directory: Path, cases: list[str]) -> None:
    them = Cases(directory)
    subprocess.run(["ray", "get-auth-token", "--generate"], check=True, capture_output=True)
    os.environ["RAY_AUTH_MODE"] = "token"
    options = ("--num-cpus=2", "--port=6379", "--dashboard-host=127.0.0.1", "--disable-usage-stats")
    subprocess.run(["ray", "start", "--head", *options], check=True, capture_output=True)
    for case in cases:
        getattr(them, case)()
    (directory / "seen.json").write_text(json.dumps(them.seen))


def serve_as_init() -> None:
    """Go on as a child of the namespace's first process, which then does what it is for: takes leave of the dead.

    `ray job stop` waits for a driver whose parent has ended until the driver is not even a zombie.
    """
    if child := os.fork():
        while True:
            process, status = os.wait()
            if process == child:
                os._exit(os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    serve_as_init()
    main(Path(sys.argv[1]), sys.argv[2:])
