"""What test_aws.py runs in namespaces of its own: `python aws.py <directory>`.

cluster.yaml, filled in, on a false AWS (moto) that checks who may what. A head is made as `ray up` makes one. The Ray
that would run there, with its autoscaler, runs here, by the file's command and with the head's rights. What was seen is
written to <directory>/seen.json.
"""

from __future__ import annotations

import json
import logging
import os
import runpy
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import boto3
import yaml
from botocore.exceptions import ClientError
from moto.ec2.exceptions import EC2ClientError
from moto.ec2.models.instances import InstanceBackend
from moto.server import ThreadedMotoServer
from ray.autoscaler._private.commands import _bootstrap_config, _set_up_config_for_head_node
from ray.autoscaler._private.providers import _get_node_provider
from ray.autoscaler.tags import TAG_RAY_NODE_KIND, TAG_RAY_NODE_NAME, TAG_RAY_NODE_STATUS, TAG_RAY_USER_NODE_TYPE

from dray.cluster.autoscaler import limits_of
from dray.cluster.checks.launcher_file import faults
from dray.records.directory import check_storage
from dray.storage import Location, store_at
from tests.cluster.namespaces import ROOT
from tests.cluster.scaling import config
from tests.ray.harness import TRIALS, Driver, write_config

BUCKET = "results-of-ours"


def main(directory: Path) -> None:
    os.chdir(ROOT)  # where `ray up cluster.yaml` is given
    os.environ |= {"AWS_ACCESS_KEY_ID": "us", "AWS_SECRET_ACCESS_KEY": "us", "AWS_DEFAULT_REGION": "us-west-2"}
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server.start()
    _sold_out(directory / "sold-out")
    os.environ["AWS_ENDPOINT_URL"] = f"http://127.0.0.1:{server.get_host_and_port()[1]}"
    seen: dict[str, Any] = {}
    _become_somebody()
    filled = _filled(directory)
    seen["faults"] = faults(filled)
    seen["twice"] = [_access(), _access()]

    started = time.monotonic()
    resolved = _bootstrap_config(filled, no_config_cache=True)
    seen["bootstrap_s"] = time.monotonic() - started
    types = resolved["available_node_types"]
    seen["resources"] = {name: node["resources"] for name, node in types.items()}
    provider = _get_node_provider(resolved["provider"], resolved["cluster_name"])
    kind = {TAG_RAY_NODE_KIND: "head", TAG_RAY_NODE_NAME: "ray-dray-head", TAG_RAY_USER_NODE_TYPE: "head"}
    provider.create_node(types["head"]["node_config"], {**kind, TAG_RAY_NODE_STATUS: "up-to-date"}, 1)

    of_worker, of_head = _of("dray-worker"), _of("dray-head")
    _only_who_may()
    seen["worker"] = _as(of_worker, "work", directory)
    _set_up(resolved, provider)
    seen |= _as(of_head, "autoscale", directory)

    # `ray down`: the nodes of this cluster's tags, and no others.
    [other] = boto3.client("ec2").run_instances(ImageId="ami-12345678", MinCount=1, MaxCount=1)["Instances"]
    down = [sys.executable, "-m", "ray.scripts.scripts", "down", "-y", str(directory / "cluster.yaml")]
    said = subprocess.run(down, capture_output=True, text=True, cwd=ROOT)
    seen["down"] = [said.returncode, said.stdout[-2000:], said.stderr[-2000:]]
    seen["left"] = [machine["id"] == other["InstanceId"] for machine in _machines()]
    (directory / "seen.json").write_text(json.dumps(seen))
    server.stop()


# ------------------------------------------------------------------------------------------------------------- the user
def _become_somebody() -> None:
    """An administrator, whom the false AWS lets do all when it checks."""
    iam = boto3.client("iam")
    iam.create_user(UserName="us")
    everything = {"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Action": "*", "Resource": "*"}]}
    iam.put_user_policy(UserName="us", PolicyName="all", PolicyDocument=json.dumps(everything))
    key = iam.create_access_key(UserName="us")["AccessKey"]
    os.environ |= {"AWS_ACCESS_KEY_ID": key["AccessKeyId"], "AWS_SECRET_ACCESS_KEY": key["SecretAccessKey"]}
    boto3.setup_default_session()


def _only_who_may() -> None:
    """From now on the false AWS checks every call against the caller's policies."""
    url = f"{os.environ['AWS_ENDPOINT_URL']}/moto-api/reset-auth"
    urllib.request.urlopen(urllib.request.Request(url, b"0", {"Content-Type": "text/plain"})).close()


def _sold_out(sign: Path) -> None:
    """While there is this file, the false AWS has no spot machines."""
    run_instances = InstanceBackend.run_instances

    def run(self: InstanceBackend, *arguments: Any, **options: Any) -> Any:
        if options.get("instance_market_options") and sign.exists():
            raise EC2ClientError("InsufficientInstanceCapacity", "There is no Spot capacity available.")
        return run_instances(self, *arguments, **options)

    InstanceBackend.run_instances = run  # type: ignore[method-assign]


def _filled(directory: Path) -> dict[str, Any]:
    text = (ROOT / "cluster.yaml").read_text().replace("FILL_IN_BUCKET", BUCKET)
    (directory / "cluster.yaml").write_text(text)
    subprocess.run([sys.executable, "-m", "ray.scripts.scripts", "get-auth-token", "--generate"], check=True)
    (Path.home() / ".ray" / "auth_token").chmod(0o600)
    loaded = yaml.safe_load(text)
    assert isinstance(loaded, dict)
    return loaded


def _access() -> list[Any]:
    """Run clusters/aws_access.py; what there is then."""
    sys.argv = ["aws_access.py", BUCKET]
    runpy.run_path(str(ROOT / "clusters" / "aws_access.py"), run_name="__main__")
    iam, s3 = boto3.client("iam"), boto3.client("s3")
    profiles = iam.list_instance_profiles()["InstanceProfiles"]
    closed = s3.get_public_access_block(Bucket=BUCKET)["PublicAccessBlockConfiguration"]
    return [
        {profile["InstanceProfileName"]: [role["RoleName"] for role in profile["Roles"]] for profile in profiles},
        {
            role["RoleName"]: iam.get_role_policy(RoleName=role["RoleName"], PolicyName="dray")["PolicyDocument"]
            for role in iam.list_roles()["Roles"]
        },
        closed,
        s3.get_bucket_location(Bucket=BUCKET)["LocationConstraint"],
    ]


# ------------------------------------------------------------------------------------------------------------- machines
def _of(role: str) -> dict[str, str]:
    """The environment of a machine that has this role: keys, where a real one asks the machine's metadata."""
    arn = boto3.client("iam").get_role(RoleName=role)["Role"]["Arn"]
    keys = boto3.client("sts").assume_role(RoleArn=arn, RoleSessionName=role)["Credentials"]
    names = {"AccessKeyId": "AWS_ACCESS_KEY_ID", "SecretAccessKey": "AWS_SECRET_ACCESS_KEY"}
    given = {variable: keys[name] for name, variable in (names | {"SessionToken": "AWS_SESSION_TOKEN"}).items()}
    return {**os.environ, **given}


def _as(keys: dict[str, str], what: str, directory: Path) -> dict[str, Any]:
    """What one of the functions below sees in a process with these keys."""
    program = (
        "import json, sys; from pathlib import Path; from tests.cluster import aws\n"
        f"print(json.dumps(aws.{what}(Path(sys.argv[1]))))"
    )
    ran = subprocess.run([sys.executable, "-c", program, str(directory)], env=keys, capture_output=True, text=True)
    assert ran.returncode == 0, f"{ran.stdout}\n{ran.stderr}"
    return dict(json.loads(ran.stdout.splitlines()[-1]))


def work(directory: Path) -> dict[str, Any]:
    """What a worker can do, and cannot."""
    endpoint = os.environ["AWS_ENDPOINT_URL"].removeprefix("http://")
    place = Location.of(f"s3://{BUCKET}/dray?region=us-west-2&scheme=http&endpoint_override={endpoint}")
    check_storage(place)
    store = store_at(place.child("trial_1"), directory / "scratch")
    staging = store.stage(352)
    (staging / "weights").write_bytes(b"x" * 100)
    found: dict[str, Any] = {"stored": store.commit(staging, 352), "bytes": len(store.read(352, "weights"))}
    store.delete(352)
    found["left"] = store.listed()
    for what, call in {
        "another bucket": lambda: boto3.client("s3").create_bucket(Bucket="more"),
        "a machine": lambda: boto3.client("ec2").run_instances(ImageId="ami-12345678", MinCount=1, MaxCount=1),
        "the end of one": lambda: boto3.client("ec2").terminate_instances(InstanceIds=["i-1234567890abcdef0"]),
    }.items():
        try:
            call()
            found[what] = "done"
        except ClientError as error:
            found[what] = error.response["Error"]["Code"]
    return found


def autoscale(directory: Path) -> dict[str, Any]:
    """A search of two slots at a time; then one of four, while there are no spot machines but those that boot."""
    text = (Path.home() / "ray_bootstrap_config.yaml").read_text()
    [head] = _machines("head")
    [command] = [each for each in json.loads(text)["head_start_ray_commands"] if "ray start" in each]
    given = {"RAY_enable_autoscaler_v2": "1", "RAY_CLOUD_INSTANCE_ID": head["id"], "RAY_NODE_TYPE_NAME": "head"}
    given |= {"RAY_OVERRIDE_RESOURCES": json.dumps({"CPU": 4, "GPU": 0}), "RAY_AUTH_MODE": "token"}
    os.environ |= given
    subprocess.run(["bash", "-c", command], check=True, capture_output=True)

    def search(slots: int, kind: str) -> float:
        (place := directory / f"search-{slots}").mkdir()
        file = write_config(place, config(place, trials=slots, at_once=slots, slots_per_trial=1))
        driver = Driver("create", file, TRIALS, "--path", place / "run", log=place / "log", RAY_ADDRESS="auto")
        start = time.monotonic()
        try:
            driver.wait_for(lambda: len(_machines(kind)) == 2, f"two machines {kind} for {slots} slots")
        finally:
            driver.process.kill()
            driver.close()
        return time.monotonic() - start

    spot_s = search(2, "gpu_spot")
    (directory / "sold-out").touch()
    on_demand_s = search(4, "gpu_on_demand")
    machines = _machines()
    subprocess.run(["ray", "stop", "--force"], check=True, capture_output=True)
    most = sum(node.get("GPU", 0) for node in limits_of(text).nodes())
    return {"spot_s": spot_s, "on_demand_s": on_demand_s, "machines": machines, "gpus_at_most": most}


def _set_up(resolved: dict[str, Any], provider: Any) -> None:
    """The head's files: what is mounted, the file for the autoscaler, and the key by which it goes to workers."""
    given, bootstrap = _set_up_config_for_head_node(resolved, provider, False)
    for remote, local in given["file_mounts"].items():
        there, here = Path(remote).expanduser(), ROOT / Path(local).expanduser()
        there.parent.mkdir(parents=True, exist_ok=True)
        if here.is_dir():
            there.symlink_to(here)
        elif not there.exists():
            there.write_bytes(here.read_bytes())
    bootstrap.close()
    file = Path.home() / "ray_bootstrap_config.yaml"
    bootstrapped = json.loads(file.read_text())
    bootstrapped["provider"]["disable_node_updaters"] = True  # no machine is there to go to
    file.write_text(json.dumps(bootstrapped))


def _machines(kind: str | None = None) -> list[dict[str, Any]]:
    """What runs on the false AWS."""
    found = []
    for reservation in boto3.client("ec2").describe_instances()["Reservations"]:
        for machine in reservation["Instances"]:
            tags = {tag["Key"]: tag["Value"] for tag in machine.get("Tags", [])}
            if machine["State"]["Name"] in ("pending", "running") and kind in (None, tags.get("ray-user-node-type")):
                found.append(
                    {
                        "id": machine["InstanceId"],
                        "type": machine["InstanceType"],
                        "is_spot": machine.get("InstanceLifecycle") == "spot",
                        "profile": machine.get("IamInstanceProfile", {}).get("Arn", "").rpartition("/")[2],
                        "kind": tags.get("ray-user-node-type"),
                        "cluster": tags.get("ray-cluster-name"),
                        "image": machine["ImageId"],
                    }
                )
    return found


if __name__ == "__main__":
    main(Path(sys.argv[1]))
