"""Kill processes of running searches, again and again: in a sweep of short trials, or by the fault matrix.

The sweep runs trials of examples/digits on an existing Ray cluster. Every 40 seconds on average, a random process is
killed with -9: a worker or a Tune handle. At the end, every trial must have ended once, and nothing may be left on the
cluster. Meanwhile, the memory of the driver and its workers is recorded.

The matrix runs each case of tests/ray/faults.py several times, each in the middle of a trial of two workers. The final
weights are compared, bit for bit, with those of a run without a fault. Prints a line for each case: how often it was
killed, how often it survived, and the time from the death to the next batch trained.

Exits with 1 if a check fails.

    python bench/soak.py [--trials 1000] [--every 40] [--seed 0]
    python bench/soak.py --matrix [--sharded] [--times 10] [--cases "Tune handle,driver"] [--seed 0]
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import ray  # noqa: E402
from ray.cluster_utils import Cluster  # noqa: E402

import dray  # noqa: E402
from tests.ray.faults import OF_RANKS, ON_A_CLUSTER, ON_THIS_MACHINE, Play, faults_of, weights_of  # noqa: E402
from tests.ray.harness import DIGITS, Driver, descendants, ends, write_config  # noqa: E402

VICTIMS = {"ray::RayTrainWo": "worker", "ray::ResourceTr": "handle"}
RAYS_OWN = ("ray::IDLE", "ray::DashboardA", "ray::RuntimeEnv", "raylet", "gcs_server", "log_monitor")
SAMPLE_S = 2.0
LEFT_AFTER_S = 60.0
"""Time that Ray may take to clean up after the search."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--matrix", action="store_true")
    parser.add_argument("--sharded", action="store_true", help="shard the models of the matrix's trials")
    parser.add_argument("--cases", help="cases of the matrix (default: all, of plain or of sharded trials)")
    parser.add_argument("--times", type=int, default=10, help="repetitions of each case of the matrix")
    parser.add_argument("--trials", type=int, default=1000, help="trials of the sweep")
    parser.add_argument("--every", type=float, default=40.0, help="mean seconds between two kills of the sweep")
    parser.add_argument("--seed", type=int, default=0, help="seed of the times and the victims")
    options = parser.parse_args()
    rng = random.Random(options.seed)
    # A short path: Ray puts sockets below it.
    with tempfile.TemporaryDirectory(prefix="ds-") as directory:
        if options.matrix:
            cases = (*(OF_RANKS if options.sharded else ON_THIS_MACHINE), *ON_A_CLUSTER)
            if options.cases:
                cases = tuple(options.cases.split(","))
            return matrix(Path(directory), cases, options.times, rng, sharded=options.sharded)
        return sweep(Path(directory), options.trials, options.every, rng)


# ---------------------------------------------------------------------------------------------------------- the matrix
def matrix(directory: Path, cases: Sequence[str], times: int, rng: random.Random, *, sharded: bool) -> int:
    which = range(times if sharded else 0)
    with Play(directory / "undisturbed", trials=times, sharded=which) as play:
        expected = weights_of(play.run())
    print(f"{'case':18} {'killed':>7} {'survived':>9} {'recovery, median':>17} {'worst':>7}", flush=True)
    wrong: list[str] = []
    for case in cases:
        path, on_a_cluster = directory / case.replace(" ", "-"), case in ON_A_CLUSTER
        with Play(path, trials=times, sharded=which, on_a_cluster=on_a_cluster) as play:
            result = play.run([case] * times, rng)
        found = faults_of(result, expected) + [f"left behind: {left}" for left in play.left]
        wrong += [f"{case}: {what}" for what in found]
        recovered = [death.recovered_s for death in play.deaths if death.recovered_s is not None]
        shown = (
            f"{statistics.median(recovered):15.1f} s {max(recovered):5.1f} s" if recovered else f"{'-':>17} {'-':>7}"
        )
        print(f"{case:18} {len(play.deaths):7} {len(play.deaths) - len(found):9} {shown}", flush=True)
        without = len(play.deaths) - len(recovered)
        if without:
            print(f"{'':18} {without} of them had no batch left: the surviving processes ended the trial")
    print(*wrong, sep="\n")
    return 1 if wrong else 0


# ----------------------------------------------------------------------------------------------------------- the sweep
def sweep(directory: Path, trials: int, every_s: float, rng: random.Random) -> int:
    path, temporary = directory / "experiment", directory / "tmp"
    temporary.mkdir()
    model = directory / "model"
    model.mkdir()
    shutil.copy(DIGITS / "model_def.py", model)
    config = write_config(
        directory,
        {
            "name": "soak",
            "entrypoint": "model_def:DigitsTrial",
            "hyperparameters": {
                "global_batch_size": 64,
                "hidden": {"type": "categorical", "vals": [16, 32, 64]},
                "lr": {"type": "log", "base": 10, "minval": -4, "maxval": -1},
            },
            "searcher": {
                "name": "random",
                "metric": "validation_loss",
                "max_length": {"batches": 46},
                "max_trials": trials,
            },
            "resources": {"slot": "cpu"},
            "min_validation_period": {"batches": 23},
            # The same trial may lose more than five workers.
            "max_restarts": 20,
        },
    )
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    began = time.monotonic()
    driver: Driver | None = None
    try:
        log = directory / "output.txt"
        driver = Driver(
            "create", config, model, "--path", path, log=log, RAY_ADDRESS=cluster.address, TMPDIR=str(temporary)
        )
        kills, memory = play(driver, path, every_s, rng)
        code = driver.wait(60)
        took = time.monotonic() - began
        left = leftovers(cluster.address)
        files = sorted(str(found.relative_to(temporary)) for found in temporary.rglob("*") if found.is_file())
        if code:
            print(log.read_text()[-4000:])
        result = dray.Result(path)
        states = result.trials["state"].value_counts().to_dict()
        over = ends(path)
        restarts = int(result.trials["restarts"].sum())
        checks = [
            (code == 0, f"exit code {code}, after {took:.0f} s"),
            (True, f"kills: {dict(kills)}; {restarts} restarts of trials"),
            (states == {"COMPLETED": trials}, f"states of {len(result.trials)} trials: {states}"),
            (over == dict.fromkeys(range(trials), 1), f"{len(over)} trials ended, each once by the journal"),
            *((True, line) for line in slopes(memory)),
            (not left, f"left on the cluster after {LEFT_AFTER_S:.0f} s: {', '.join(left) or 'nothing'}"),
            (not files, f"temporary files of the driver: {', '.join(files) or 'none'}"),
        ]
        for holds, name in checks:
            print(f"  {'ok  ' if holds else 'FAIL'} {name}")
        return 0 if all(holds for holds, _ in checks) else 1
    finally:
        if driver is not None:
            driver.close()
        ray.shutdown()
        cluster.shutdown()


def play(
    driver: Driver, path: Path, every_s: float, rng: random.Random
) -> tuple[Counter[str], list[tuple[float, str, int, float]]]:
    """Kill processes from the first trial's end to the driver's; kills by kind, memory (time, kind, process, MB)."""
    kills: Counter[str] = Counter()
    memory: list[tuple[float, str, int, float]] = []
    began = time.monotonic()
    due = began + rng.expovariate(1 / every_s)
    while driver.process.poll() is None:
        time.sleep(SAMPLE_S)
        family = descendants(os.getpid())
        now = time.monotonic()
        for pid in (driver.process.pid, *(pid for pid, name in family.items() if name == "ray::RayTrainWo")):
            memory.append((now - began, "driver" if pid == driver.process.pid else "worker", pid, resident_mb(pid)))
        if now >= due and (kills or ends(path)):
            victims = {kind: [pid for pid, name in family.items() if VICTIMS.get(name) == kind]
                       for kind in VICTIMS.values()}  # fmt: skip
            kind = rng.choice(sorted(VICTIMS.values()))
            if victims[kind]:
                os.kill(rng.choice(victims[kind]), signal.SIGKILL)
                kills[kind] += 1
                due = now + rng.expovariate(1 / every_s)
    return kills, memory


def resident_mb(pid: int) -> float:
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError):  # it has just ended
        return 0.0
    return pages * os.sysconf("SC_PAGESIZE") / 1e6


def slopes(memory: list[tuple[float, str, int, float]]) -> list[str]:
    """The growth of memory over time, by least squares for each process, without its first half minute."""
    lines = []
    for kind in ("driver", "worker"):
        processes: dict[int, list[tuple[float, float]]] = {}
        for at, its, pid, size in memory:
            if its == kind and size:
                processes.setdefault(pid, []).append((at, size))
        found = []
        for samples in processes.values():
            steady = [(at, size) for at, size in samples if at > samples[0][0] + 30]
            if len(steady) > 5:
                found.append((len(steady), statistics.linear_regression(*zip(*steady, strict=True)).slope * 60))
        largest = max((size for samples in processes.values() for _, size in samples), default=0.0)
        if found:
            mean = sum(count * slope for count, slope in found) / sum(count for count, _ in found)
            lines.append(f"memory of {kind}s: at most {largest:.0f} MB, {mean:+.2f} MB a minute")
    return lines


def leftovers(address: str) -> list[str]:
    """The leftovers of the search: processes, placement groups, resources."""
    ray.init(address=address, log_to_driver=False)
    deadline = time.monotonic() + LEFT_AFTER_S
    while True:
        names = [name for name in descendants(os.getpid()).values() if name.startswith("ray::")]
        left = [name for name in names if name not in RAYS_OWN]
        groups = ray.util.placement_group_table().values()
        left += [f"placement group {group['placement_group_id']}" for group in groups if group["state"] != "REMOVED"]
        free = ray.available_resources().get("CPU", 0)
        left += [f"{2 - free} CPUs"] if free != 2 else []
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(1)


if __name__ == "__main__":
    sys.exit(main())
