"""clusters/slurm.sh with commands of ours for Slurm's, Ray's and dray's: what it runs where, and how it ends."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.namespaces import ROOT

COMMANDS = {
    "activate": "",
    "sleep": "",
    "hostname": "echo 10.7.0.2 fd00::2",
    "scontrol": '[[ $1 != show ]] || tr , "\\n" <<< $3',
    "srun": 'while [[ $1 == --* ]]; do shift; done; "$@"',
    # A node stays, unless it can't start; the head answers once it is there.
    "ray": "[[ $1 == start ]] || exec test -e up; [[ ! -e broken ]] && touch -- up $2 && exec tail -f /dev/null",
    # Once all nodes are there.
    "dray": """until [[ -e --address=10.7.0.2:6379 ]]; do :; done
        trap 'touch saving; read < saved; echo saves >> calls.txt; exit 143' TERM
        [[ ! -e short ]] || exit 0; touch trains; tail -f /dev/null & wait""",
}


class Job:
    """The script as a batch job of three nodes, in a directory that all of them see."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        text = (ROOT / "clusters" / "slurm.sh").read_text()
        for place in ("FILL_IN_ENVIRONMENT", "FILL_IN_CONFIG", "FILL_IN_RESULTS"):
            assert text.count(place) == 1
        (directory / "slurm.sh").write_text(re.sub("FILL_IN_[A-Z]+", str(directory), text))
        (directory / "bin").mkdir()
        for name, script in COMMANDS.items():
            note = f'echo "{name} $* [${{RAY_ADDRESS-}} ${{RAY_AUTH_TOKEN-}}]" >> calls.txt'
            (directory / "bin" / name).write_text(f"#!/bin/bash\n{note}\n{script}\n")
            (directory / "bin" / name).chmod(0o755)
        os.mkfifo(directory / "saved")

    def start(self) -> None:
        self.batch = subprocess.Popen(
            ["bash", "slurm.sh"],
            cwd=self.directory,
            start_new_session=True,
            env={
                "PATH": f"{self.directory / 'bin'}:{os.environ['PATH']}",
                "SLURM_JOB_ID": "4711",
                "SLURM_JOB_NAME": "digits",
                "SLURM_JOB_NODELIST": "node2,node3,node4",
            },
        )

    def wait_for(self, sign: str) -> None:
        while not (self.directory / sign).exists():
            assert self.batch.poll() is None
            os.sched_yield()

    def calls(self) -> list[str]:
        return (self.directory / "calls.txt").read_text().splitlines()


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    job = Job(tmp_path)
    yield job
    with contextlib.suppress(ProcessLookupError):
        os.killpg(job.batch.pid, signal.SIGKILL)  # as Slurm ends what a job has left
    job.batch.wait()


def test_ray_starts_on_each_node_and_dray_beside_its_head(job: Job) -> None:
    (job.directory / "short").touch()
    job.start()
    assert job.batch.wait(60) == 0
    calls = [call.partition(" [")[0] for call in job.calls() if call.startswith(("srun", "scontrol", "dray"))]
    options = "--block --disable-usage-stats --object-store-memory=104857600"
    on_head = "srun --nodes=1 --ntasks=1 --nodelist=node2"
    results = f"{job.directory}/digits-4711"
    start = f"{on_head} ray start --head --node-ip-address=10.7.0.2 --port=6379 --temp-dir=/tmp/ray-4711"
    assert sorted(calls) == sorted(
        [
            "scontrol show hostnames node2,node3,node4",
            f"{on_head} hostname --ip-address",
            f"{start} --include-dashboard=false {options}",
            f"srun --nodes=2 --ntasks=2 --exclude=node2 ray start --address=10.7.0.2:6379 {options}",
            f"dray experiment create {job.directory} --path {results}",
        ]
    )
    tokens = {re.findall(r"\[10\.7\.0\.2:6379 (\w+)\]", call)[0] for call in job.calls() if "ray start" in call}
    assert [len(token) for token in tokens] == [64], "one for all"


def test_a_signal_saves_the_trials_once_and_queues_the_job_again(job: Job) -> None:
    job.start()
    job.wait_for("trains")
    job.batch.terminate()
    job.wait_for("saving")
    ignored = re.findall(r"SigIgn:\s*(\w+)", Path(f"/proc/{job.batch.pid}/status").read_text())
    assert int(ignored[0], 16) >> (signal.SIGTERM - 1) & 1, "a second one would end dray before it has saved"
    assert not [call for call in job.calls() if "requeue" in call]
    (job.directory / "saved").write_text("\n")
    assert job.batch.wait(60) == 128 + signal.SIGTERM
    last = job.calls()[-2:]
    assert [call.partition(" [")[0] for call in last] == ["saves", "scontrol requeue 4711"]


def test_a_head_that_does_not_start_ends_the_job(job: Job) -> None:
    (job.directory / "broken").touch()
    job.start()
    assert job.batch.wait(60) != 0
    assert not [call for call in job.calls() if call.startswith("dray")]
