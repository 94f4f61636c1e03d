"""A node that dies and that no other replaces: its group has no room any more, its trial has."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import ray
from ray.cluster_utils import Cluster

import dray
from tests.ray.harness import TRIALS, descendants, journal, lines, recorded, wait_for
from tests.ray.test_elastic import HEALTH, kill

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(300)]


def test_a_trial_whose_node_is_gone_for_good_goes_on_when_another_group_is_free(tmp_path: Path) -> None:
    assert not ray.is_initialized(), "another test left its connection to Ray"
    record, until, longer = (tmp_path / name for name in ("record", "until", "longer"))
    config = recorded(record, trials=2, batches=20, entrypoint="recorded:Held")
    config["max_restarts"] = 0  # for which a lost node does not count
    config["hyperparameters"] |= {"until": str(until), "longer": str(longer)}
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False, "_system_config": HEALTH}
    )
    try:
        nodes = [cluster.add_node(num_cpus=1) for _ in range(2)]
        ray.init(address=cluster.address, log_to_driver=False)
        running = ThreadPoolExecutor(1).submit(
            dray.Experiment(config, model_dir=TRIALS, path=tmp_path / "experiment").run
        )
        wait_for(lambda: {line.get("batch") for line in lines(record) if line["trial"] == 0} >= {4}, "trial 0")
        wait_for(lambda: {line.get("batch") for line in lines(record) if line["trial"] == 1} >= {4}, "trial 1")
        pid = next(line["pid"] for line in lines(record) if line["trial"] == 0)
        kill(next(node for node in nodes if pid in descendants(node.all_processes["raylet"][0].process.pid)))
        for file in (until, longer):
            file.touch()
        result = running.result(150)
    finally:
        ray.shutdown()
        cluster.shutdown()
    assert result.trials[["state", "restarts"]].values.tolist() == [["COMPLETED", 1], ["COMPLETED", 0]]
    [restart] = [record for record in journal(tmp_path / "experiment") if record["event"] == "restarted"]
    assert restart["kind"] == "node"
    assert "Ray has lost the node" in restart["error"]
    processes = {trial: [line["pid"] for line in lines(record) if line["trial"] == trial] for trial in (0, 1)}
    assert processes[0][-1] == processes[1][-1], "in the group that was left"
