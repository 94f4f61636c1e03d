"""What test_autoscaler.py runs in namespaces of its own: `python autoscaled.py <directory>`.

A head without CPUs, and Ray's autoscaler with nodes of one CPU each, one of them there from the beginning, which this
machine pretends to be. An elastic trial runs there; what it saw is written to <directory>/seen.json.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import ray

import dray
from tests.cluster.autoscaling import Nodes, nodes
from tests.ray.harness import TRIALS, Meanwhile, lines, wait_for
from tests.ray.test_elastic import config


def main(directory: Path) -> None:
    record = directory / "record"
    worker = {"resources": {"CPU": 1}, "node_config": {}, "min_workers": 1, "max_workers": 2}
    cluster = Nodes({"CPU": 0}, {"worker": worker})
    cluster.start()
    try:
        ray.init("auto", log_to_driver=False)
        wait_for(lambda: nodes() == 1, "the first node")
        seen: dict[str, Any] = {}

        def look() -> None:
            started = time.monotonic()
            wait_for(lambda: nodes() == 2, "another node", 180)
            seen["node_after_s"] = time.monotonic() - started
            wait_for(lambda: [line for line in lines(record) if line["size"] == 2], "a batch of two workers", 180)
            (directory / "enough").touch()

        with Meanwhile(look):
            result = dray.Experiment(
                config(directory, pause_s=0.1), model_dir=TRIALS, path=directory / "experiment"
            ).run()
        seen["trials"] = result.trials[["state", "restarts"]].values.tolist()
        wait_for(lambda: nodes() == 1, "one node to be given back", 60)
        seen["nodes"] = nodes()
        (directory / "seen.json").write_text(json.dumps(seen))
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
