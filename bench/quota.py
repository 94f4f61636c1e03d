"""Whether a token's quota of slot-hours holds while the server, the experiment's process and workers are killed.

A token submits an experiment of two trials on two slots, which are never done. In turn, one of these processes is
killed with -9 every few seconds, until the quota is spent. Prints what the server knows to be spent, and the time that
the trials' own notes show: from the making of a trial to its last batch, in each process.

    python bench/quota.py [--slot-seconds 180] [--every 8]
"""

from __future__ import annotations

import argparse
import itertools
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import yaml  # noqa: E402
from ray.cluster_utils import Cluster  # noqa: E402

from dray.code.archive import pack  # noqa: E402
from dray.serve import tokens  # noqa: E402
from dray.serve.client import Server  # noqa: E402
from dray.serve.control import ACTIVE, Submitted  # noqa: E402
from dray.serve.quota import Quota  # noqa: E402
from tests.ray.harness import TRIALS, lines, recorded  # noqa: E402
from tests.ray.serving import Served  # noqa: E402

BATCH_S = 0.02


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slot-seconds", type=float, default=180.0, help="the quota")
    parser.add_argument("--every", type=float, default=8.0, help="seconds between two kills")
    options = parser.parse_args()
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
    os.environ["RAY_ADDRESS"] = cluster.address
    try:
        with tempfile.TemporaryDirectory(prefix="dq-") as directory:
            measure(Path(directory) / "results", options.slot_seconds, options.every)
    finally:
        cluster.shutdown()


def measure(home: Path, quota_s: float, every: float) -> None:
    """Spend a quota, and print the result."""
    served = Served(home)
    try:
        secret = tokens.create(home, "agent", "submit", Quota(slots=2, slot_hours=quota_s / 3600))
        config = {**recorded(served.record("quota"), trials=2, batches=100_000, pause_s=BATCH_S), "name": "quota"}
        submitted = Server(served.client.url, secret).submit(yaml.safe_dump(config), pack(TRIALS))
        killed: Counter[str] = Counter()
        servers: list[float] = []  # when each was killed
        for victim in itertools.cycle(["experiment's process", "worker", "server"]):
            until = time.monotonic() + every
            while (now := served.client.experiment(submitted.name)).state in ACTIVE and time.monotonic() < until:
                time.sleep(0.1)
            if now.state not in ACTIVE:
                break
            servers += [time.time()] if victim == "server" else []
            killed[victim] += kill(served, victim, submitted)
        served.wait_for(lambda: served.client.status().busy == 0, "its slots to be free")
        time.sleep(1)
        [known] = served.client.tokens()
        show(quota_s, known["used"]["slot_hours"] * 3600, trained_s(served.record("quota")), killed, now)
        after = [trained_after(served.record("quota"), at) for at in servers]
        print(f"trained after a server's death, in slot-seconds: {', '.join(f'{each:.2f}' for each in after)}")
    finally:
        served.close()


def kill(served: Served, victim: str, submitted: Submitted) -> bool:
    """Kill a process; returns whether there was one."""
    if victim == "server":
        served.kill()
        served.restart()
        return True
    found = served.driver_of(submitted)
    if victim == "worker":
        found = lines(served.record("quota"))[-1]["pid"]
    if found is None or not Path(f"/proc/{found}").exists():
        return False
    os.kill(found, signal.SIGKILL)
    return True


def trained_s(record: Path) -> float:
    """Seconds from the making of each trial to its last batch, of all processes."""
    first: dict[tuple[int, int], float] = {}
    total, last = 0.0, dict[tuple[int, int], float]()
    for line in lines(record):
        key = line["trial"], line["pid"]
        if "made" in line:  # a process may train the same trial again
            total += last.pop(key, line["time"]) - first.pop(key, line["time"])
            first[key] = line["time"]
        last[key] = line["time"] + BATCH_S * ("batch" in line)
    return total + sum(last[key] - first[key] for key in first)


def trained_after(record: Path, death: float) -> float:
    """Seconds for which the processes that trained at a server's death trained on, together."""
    last: dict[int, float] = {}
    known: set[int] = set()
    for line in lines(record):
        if line["time"] <= death:
            known.add(line["pid"])
        elif line["pid"] in known:
            last[line["pid"]] = line["time"]
    return sum(each - death for each in last.values())


def show(quota_s: float, known_s: float, real_s: float, killed: Counter[str], ended: Submitted) -> None:
    victims = ", ".join(f"{count} times the {victim}" for victim, count in killed.items())
    print(f"killed: {victims}")
    print(f"quota: {quota_s:.1f} slot-seconds")
    print(f"spent, by the server: {known_s:.2f} ({known_s / quota_s - 1:+.2%})")
    print(f"trained, by the trials' notes: {real_s:.2f} ({real_s / quota_s - 1:+.2%})")
    print(f"the experiment is {ended.state}{ended.error and f': {ended.error}'}")


if __name__ == "__main__":
    main()
