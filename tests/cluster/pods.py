"""What test_pods.py runs in namespaces of its own: `python pods.py <directory>`.

Pods as clusters/kuberay.yaml describes them and KubeRay starts and ends them; the bucket is moto's. What was seen is
written to <directory>/seen.json.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import yaml

from dray.storage import Location, store_at
from tests.cluster.hosts import HERE, SHARED, Host, make_network
from tests.cluster.namespaces import ROOT
from tests.ray.harness import TRIALS, lines, recorded, wait_for
from tests.storage.s3 import LocalS3

BATCHES, TRIAL_COUNT = 240, 2
TOKEN = "0123456789abcdef" * 4
KEYS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}


class Cluster:
    """The pods of a RayJob, from the time that KubeRay creates its RayCluster.

    Args:
        manifest: the RayJob.
        number: how many clusters it had before.
        directory: which all pods see.
    """

    def __init__(self, manifest: dict[str, Any], number: int, directory: Path) -> None:
        self._job = manifest["spec"]
        cluster = self._job["rayClusterSpec"]
        head, worker = cluster["headGroupSpec"], cluster["workerGroupSpecs"][0]
        address = f"10.77.0.{2 * number + 2}"
        self._url = f"http://{address}:8265/api/jobs/"
        starts = "--head --dashboard-host=0.0.0.0"
        self._pods = [(self._pod(f"head-{number}", address, head, directory, address, starts), head)]
        # KubeRay has workers wait for the head.
        self._wait_for_ray()
        starts = f"--address={address}:6379 --num-cpus={TRIAL_COUNT}"
        beside = f"10.77.0.{2 * number + 3}"
        self._pods.append((self._pod(f"worker-{number}", beside, worker, directory, address, starts), worker))
        self._wait_for_ray()

    def _wait_for_ray(self) -> None:
        pod = self._pods[-1][0]
        wait_for(lambda: "Ray runtime started" in pod.log.read_text(), f"Ray on {pod.name}", 200)

    def _pod(self, name: str, address: str, group: dict[str, Any], directory: Path, head: str, options: str) -> Host:
        """As KubeRay 1.7 starts its container: the variables that it adds, and its command."""
        [container] = group["template"]["spec"]["containers"]
        variables = {
            **{each["name"]: each["value"] for each in container["env"]},
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": TOKEN,
            "RAY_ADDRESS": f"{'127.0.0.1' if head == address else head}:6379",
            **KEYS,
        }
        parameters = " ".join(f"--{key}={value}" for key, value in group["rayStartParams"].items())
        command = f"ulimit -n 65536; ray start {options} --block --dashboard-agent-listen-port=52365 {parameters}"
        return Host(name, address, directory, ["/bin/bash", "-c", "--", command], variables)

    def _ask(self, path: str = "", body: dict[str, Any] | None = None) -> dict[str, Any] | None:
        """Ray's answer to the operator; None if there is none."""
        request = urllib.request.Request(self._url + path, headers={"Authorization": f"Bearer {TOKEN}"})
        if body is not None:
            request.data = json.dumps(body).encode()
            request.add_header("Content-Type", "application/json")
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return dict(json.load(answer))
        except OSError:
            return None

    def submit(self) -> None:
        """As in HTTPMode."""
        body = {"entrypoint": self._job["entrypoint"], "submission_id": self._job["jobId"]}
        wait_for(lambda: self._ask(body=body), "the job is submitted", 120)

    def status(self) -> str:
        about = self._ask(self._job["jobId"])
        return str(about and about["status"])

    def stop_job(self) -> None:
        """As when a RayJob is deleted."""
        assert self._ask(f"{self._job['jobId']}/stop", {}) is not None

    def delete(self) -> dict[str, Any]:
        """All pods at a time, as when a RayJob is suspended."""
        with ThreadPoolExecutor() as pool:
            ends = {}
            for pod, group in self._pods:
                spec = group["template"]["spec"]
                hook = spec["containers"][0].get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", [])
                ends[pod.name] = pool.submit(pod.delete, spec["terminationGracePeriodSeconds"], hook)
        return {name: end.result() for name, end in ends.items()}

    def log(self) -> str:
        about = self._ask(f"{self._job['jobId']}/logs")
        return str(about and about["logs"])

    def power_off(self) -> None:
        for pod, _ in self._pods:
            pod.power_off()


def filled_in(s3: LocalS3) -> dict[str, Any]:
    """The RayJob as its user leaves it, with places that a pod here has."""
    places = {
        "FILL_IN_CONFIG": f"{SHARED}/model/search.yaml",
        "s3://FILL_IN_BUCKET/dray": s3.uri("dray"),
        "/results": "/mnt/results",
    }
    text = (ROOT / "clusters" / "kuberay.yaml").read_text()
    for place, filling in places.items():
        assert place in text, place
        text = text.replace(place, filling)
    return dict(yaml.safe_load(text))


def main(directory: Path) -> None:
    make_network()
    s3 = LocalS3(host=HERE)
    os.environ.update(KEYS)
    manifest = filled_in(s3)
    record = directory / "record"
    config = recorded(SHARED / "record", trials=TRIAL_COUNT, batches=BATCHES, pause_s=0.2, min_validation_period=None)
    del config["reproducibility"]  # the seed that the first driver draws is to count
    shutil.copytree(TRIALS, directory / "model", ignore=shutil.ignore_patterns("__pycache__"))
    (directory / "model" / "search.yaml").write_text(yaml.safe_dump(config))
    seen: dict[str, Any] = {"ends": {}, "saved": [], "trained": [], "log": []}

    def trained() -> dict[int, int]:
        batches = [line["trial"] for line in lines(record) if "batch" in line]
        return {trial: batches.count(trial) for trial in range(TRIAL_COUNT)}

    def ended(number: int, by: str) -> None:
        """Run the job in new pods, until its trials have trained for a while."""
        cluster = Cluster(manifest, number, directory)
        try:
            cluster.submit()
            before = trained()
            wait_for(lambda: all(trained()[trial] > before[trial] + 10 for trial in before), "all trials train", 300)
            if by == "deletion":
                cluster.stop_job()
                time.sleep(2)  # until Kubernetes has found that nobody owns the pods
            seen["ends"].update(cluster.delete())
        finally:
            seen["log"].append(cluster.log())
            cluster.power_off()
        place = s3.place("dray", "digits")
        stores = [store_at(place.child(f"trial_{trial}"), directory / "scratch") for trial in range(TRIAL_COUNT)]
        seen["saved"].append([int(Location.of(store.latest() or "_0").name.rpartition("_")[2]) for store in stores])
        seen["trained"].append(list(trained().values()))

    try:
        ended(0, by="suspension")
        ended(1, by="deletion")
        last = Cluster(manifest, 2, directory)
        try:
            last.submit()
            wait_for(lambda: last.status() not in ("PENDING", "RUNNING", "None"), "the job ends", 300)
            seen["status"] = last.status()
            seen["ends"].update(last.delete())
        finally:
            seen["log"].append(last.log())
            last.power_off()
    finally:
        print(*seen["log"], sep="\n--------\n", flush=True)
    (directory / "seen.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
