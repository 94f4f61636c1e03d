"""Four trials on one slot, a GPU or CPUs: one runs out of memory, and the other three do not notice."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster

import dray
from tests.cluster.scaling import FALSE_GPUS
from tests.forks.process import forked_workers
from tests.ray.harness import TRIALS, attempts, journal, recorded

pytestmark = [pytest.mark.ray, pytest.mark.slow]

CPUS = 16  # more than there are, so that four groups start at the same time


@pytest.fixture(scope="module", autouse=True)
def ray_is_up() -> Iterator[None]:
    """With one GPU, which is false."""
    assert not ray.is_initialized(), "another test left its connection to Ray"
    has = {"num_cpus": CPUS, "num_gpus": 1, "include_dashboard": False}
    few = {"_system_config": {"prestart_worker_first_driver": False}}  # else a process for each CPU
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", FALSE_GPUS)
        # Not by ray.init(): after that, Ray can't use the shared cluster from this process any more.
        cluster = Cluster(initialize_head=True, head_node_args={**has, **few, **forked_workers()})
    try:
        ray.init(cluster.address, log_to_driver=False)
        yield
    finally:
        ray.shutdown()
        cluster.shutdown()


@pytest.mark.parametrize(
    ("slot", "cpus_per_slot", "fault", "kind", "has"),
    [
        ("gpu", 1, "as if out of memory", "oom", {"GPU": 0.25, "CPU": 0.25}),
        pytest.param("cpu", CPUS, "killed", "died", {"CPU": CPUS / 4}, marks=pytest.mark.long),
    ],
)
def test_one_of_four_trials_on_a_slot_runs_out_of_memory_and_three_go_on(
    slot: str, cpus_per_slot: int, fault: str, kind: str, has: dict[str, float], tmp_path: Path
) -> None:
    met = check_that_three_go_on(tmp_path, fault, kind, slot=slot, cpus_per_slot=cpus_per_slot)
    assert [each["has"] for each in met] == [has] * 4
    assert {each["gpus"] for each in met} == ({"0"} if slot == "gpu" else {os.environ.get("CUDA_VISIBLE_DEVICES", "")})


def check_that_three_go_on(directory: Path, fault: str, kind: str, **resources: Any) -> list[dict[str, Any]]:
    """Run four trials at the same time, one of which ends by this fault; what each had of the machine."""
    record, meeting = directory / "record", directory / "meeting"
    meeting.mkdir()
    config = recorded(
        record,
        trials=4,
        batches=10,
        entrypoint="sharing:Sharing",
        resources={"slots_per_trial": 0.25, "max_slots": 1, **resources},
    )
    config["hyperparameters"] |= {"meeting": str(meeting), "fault": fault}
    result = dray.Experiment(config, model_dir=TRIALS, path=directory / "experiment").run()

    assert result.trials["state"].tolist() == ["COMPLETED"] * 4
    assert result.trials["restarts"].tolist() == [0, 1, 0, 0]
    tried = attempts(record)
    assert {trial: [each.batches for each in tried[trial]] for trial in range(4)} == {
        0: [tuple(range(10))],
        1: [tuple(range(5)), tuple(range(10))],
        2: [tuple(range(10))],
        3: [tuple(range(10))],
    }
    [restarted] = [each for each in journal(result.path) if each["event"] == "restarted"]
    assert (restarted["trial"], restarted["kind"]) == (1, kind)

    met = [json.loads((meeting / f"trial_{trial}.json").read_text()) for trial in range(4)]
    assert len({each["pid"] for each in met}) == 4
    timeline = result.timeline
    assert set(timeline["slots"]) == {0.25}
    replaced = 1 if kind == "died" else 0  # a process that is out of memory on the GPU goes on with the next trial
    assert timeline["group"].nunique() <= 4 + replaced
    return met
