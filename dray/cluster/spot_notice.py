"""Drains this node when its cloud announces to reclaim it: ``python -m dray.cluster.spot_notice aws HEAD:PORT``.

AWS announces the end of a spot machine two minutes ahead, in the machine's metadata. So does Google Cloud for machines
made with ``preemptionNoticeDuration``, otherwise half a minute ahead. Ray's launcher ignores these notices, so nodes of
its clusters die suddenly. The cluster files that dray ships start this program on each worker: it polls the metadata
every few seconds, and has Ray drain the node once there is a notice. Trials then save and continue elsewhere, and no
batch is lost.

Sources: https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html and
https://cloud.google.com/compute/docs/instances/create-use-spot.
"""

from __future__ import annotations

import argparse
import datetime
import fcntl
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

EVERY_S = 5.0  # what AWS recommends
ANSWER_S = 2.0  # how long the metadata service may take to answer
GCP_S = 25
"""The rest of Google's half minute after polling and draining. The notice does not say whether there is more time."""
_TOKEN = "X-aws-ec2-metadata-token"


def aws() -> int | None:
    """See `CLOUDS`. The service's address may be in ``AWS_EC2_METADATA_SERVICE_ENDPOINT``, as for AWS's own tools."""
    root = os.environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT", "http://169.254.169.254")
    root = root.rstrip("/") + "/latest"
    ask = urllib.request.Request(f"{root}/api/token", method="PUT")
    ask.add_header(f"{_TOKEN}-ttl-seconds", "60")
    token = _answer(ask)
    try:
        notice = _answer(urllib.request.Request(f"{root}/meta-data/spot/instance-action", headers={_TOKEN: token}))
    except urllib.error.HTTPError as error:
        if error.code == 404:  # there is no notice
            return None
        raise
    end = datetime.datetime.fromisoformat(json.loads(notice)["time"].replace("Z", "+00:00"))
    return max(0, round(end.timestamp() - time.time()))


def gcp() -> int | None:
    """See `CLOUDS`. The service's address may be in ``GCE_METADATA_HOST``, as for Google's own tools."""
    host = os.environ.get("GCE_METADATA_HOST", "metadata.google.internal")
    url = f"http://{host}/computeMetadata/v1/instance/preempted"
    preempted = _answer(urllib.request.Request(url, headers={"Metadata-Flavor": "Google"}))
    return GCP_S if preempted.strip() == "TRUE" else None


CLOUDS = {"aws": aws, "gcp": gcp}
"""Return the seconds that this machine has left, None without a notice; OSError if the metadata service is silent."""


def drain(head: str, left_s: int) -> bool:
    """Have Ray drain this node, which will be gone after ``left_s`` seconds; False if Ray refused."""
    command = [sys.executable, "-m", "ray.scripts.scripts", "drain-node", "--address", head]
    why = ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "the cloud takes this machine away"]
    return subprocess.run([*command, *why, "--deadline-remaining-seconds", str(left_s)]).returncode == 0


def main() -> None:
    """Poll until there is a notice, and drain the node."""
    parser = argparse.ArgumentParser(prog="python -m dray.cluster.spot_notice", description=__doc__.partition("\n")[0])
    parser.add_argument("cloud", choices=CLOUDS)
    parser.add_argument("head", help="its host and port, as for `ray start --address`")
    given = parser.parse_args()
    with (Path(tempfile.gettempdir()) / "dray-spot-notice").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return  # one from an earlier `ray up` is polling already
        while True:
            try:
                left_s = CLOUDS[given.cloud]()
            except (OSError, ValueError) as error:  # the metadata service may fail for a moment
                print(f"no answer from the metadata service of {given.cloud}: {error}", flush=True)
                left_s = None
            if left_s is not None and drain(given.head, left_s):
                return
            time.sleep(EVERY_S)


def _answer(request: urllib.request.Request) -> str:
    # No proxy in the environment has this machine's metadata.
    directly = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with directly.open(request, timeout=ANSWER_S) as answer:
        return str(answer.read().decode())


if __name__ == "__main__":
    main()
