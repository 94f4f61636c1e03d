"""The TorchTrainer of docs/tune.md, on a cluster of its own: without a dashboard, Ray does not remove its workers."""

from __future__ import annotations

from pathlib import Path

import pytest
import ray
from ray.cluster_utils import Cluster

from tests.forks.process import forked_workers
from tests.ray.test_tune_page import program

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(600)]


def test_a_torch_trainer_is_stopped(tmp_path: Path) -> None:
    assert not ray.is_initialized(), "another test left its connection to Ray"
    node = {"num_cpus": 6, "include_dashboard": False, "include_log_monitor": False, "no_monitor": True}
    cluster = Cluster(initialize_head=True, head_node_args={**node, **forked_workers()})
    try:
        ray.init(cluster.address, log_to_driver=False)
        results = program("trainer.py").new_tuner(tmp_path / "run").fit()
    finally:
        ray.shutdown()
        cluster.shutdown()
    assert len(results.errors) == 0
    lengths = sorted(result.metrics["epoch"] for result in results)
    assert lengths[0] == 1
    assert lengths[-1] == 3
