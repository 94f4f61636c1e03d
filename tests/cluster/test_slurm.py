"""A search as a job of clusters/slurm.sh: preempted in the middle, it continues on other nodes."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path

import pytest

from tests.cluster import slurm
from tests.cluster.namespaces import isolated, run_isolated
from tests.ray.harness import attempts

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.long, *isolated]


def test_a_preempted_job_is_queued_again_and_trains_no_batch_twice(tmp_path: Path) -> None:
    ran = run_isolated(slurm.__file__, tmp_path, home=tmp_path / "home")
    assert ran.returncode == 0, f"{ran.stdout[-9000:]}\n{ran.stderr[-9000:]}"
    seen = json.loads((tmp_path / "seen.json").read_text())
    print(f"exit codes {seen['codes']}, {', '.join(f'{took:.1f} s' for took in seen['took_s'])} from signal to end")
    # By the signal to the script, it ends by itself and queues itself; by the one to Ray, Slurm does both.
    assert seen["codes"][0] == 128 + 15
    assert [line for line in seen["slurm"] if "requeue" in line] == [f"scontrol requeue {slurm.JOB}"]
    assert seen["saved"] == seen["trained"], "at each end, all that was trained was saved"
    assert all(0 < before <= after < slurm.BATCHES for before, after in zip(*seen["saved"], strict=True))

    assert seen["codes"][-1] == 0, ran.stdout[-9000:]
    found = attempts(tmp_path / "record")
    assert set(found) == set(range(slurm.TRIAL_COUNT)), "no trial is lost, and none is new"
    for mine in found.values():
        assert list(chain.from_iterable(each.batches for each in mine)) == list(range(slurm.BATCHES))
