"""cluster.yaml on a false AWS: who may what, spot machines on demand, others while there are none, `ray down`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cluster.namespaces import isolated, run_isolated

pytestmark = [pytest.mark.slow, *isolated]

AWS = Path(__file__).with_name("aws.py")
"""Not imported here: moto, which it imports, takes the fast tests, too, two seconds to collect."""


@pytest.mark.long
def test_the_autoscaler_of_cluster_yaml_starts_spot_machines_first_and_ray_down_ends_all(tmp_path: Path) -> None:
    ran = run_isolated(AWS, tmp_path, home=tmp_path / "home")
    assert ran.returncode == 0, f"{ran.stdout}\n{ran.stderr}"
    seen = json.loads((tmp_path / "seen.json").read_text())
    for what in ("bootstrap", "spot", "on_demand"):
        print(f"{what}: {seen[f'{what}_s']:.1f} s")

    # The file, filled in, and what clusters/aws_access.py made, also when it ran a second time.
    assert seen["faults"] == []
    first, again = seen["twice"]
    assert first == again
    profiles, policies, closed, region = first
    assert profiles == {"dray-head": ["dray-head"], "dray-worker": ["dray-worker"]}
    assert set(closed.values()) == {True}
    assert region == "us-west-2"
    handed_on = [rule for rule in policies["dray-head"]["Statement"] if rule["Action"] == ["iam:PassRole"]]
    assert [rule["Resource"][0].rpartition("/")[2] for rule in handed_on] == ["dray-worker"]

    # Ray asks AWS what the machines have.
    assert seen["resources"]["head"] == {"CPU": 4, "GPU": 0}
    for kind in ("gpu_spot", "gpu_on_demand"):
        found = seen["resources"][kind]
        assert (found["CPU"], found["GPU"], found["accelerator_type:A10G"]) == (8, 1, 1)

    # A worker keeps checkpoints in the bucket, and can do nothing else.
    worker = seen["worker"]
    assert worker["stored"].startswith("s3://results-of-ours/dray/trial_1/checkpoint_352?")
    assert (worker["bytes"], worker["left"]) == (100, [])
    for what in ("another bucket", "a machine", "the end of one"):
        assert worker[what] == "AccessDenied", what

    # The head's autoscaler, with the rights of dray-head, for two slots and then two more.
    assert seen["gpus_at_most"] == 10, "8 spot ones and 2 others: what an experiment finds that the cluster can grow to"
    machines = {machine["kind"]: machine for machine in seen["machines"]}
    kinds = sorted(machine["kind"] for machine in seen["machines"])
    assert kinds == ["gpu_on_demand", "gpu_on_demand", "gpu_spot", "gpu_spot", "head"]
    assert {kind: machine["is_spot"] for kind, machine in machines.items()} == {
        "head": False,
        "gpu_spot": True,
        "gpu_on_demand": False,
    }
    assert {machine["type"] for kind, machine in machines.items() if kind != "head"} == {"g5.2xlarge"}
    assert {kind: machine["profile"] for kind, machine in machines.items()} == {
        "head": "dray-head",
        "gpu_spot": "dray-worker",
        "gpu_on_demand": "dray-worker",
    }

    # `ray down`: all of the cluster, and nothing else of the account.
    code, out, err = seen["down"]
    assert code == 0, f"{out}\n{err}"
    assert seen["left"] == [True]
