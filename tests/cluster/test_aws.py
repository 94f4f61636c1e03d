"""cluster.yaml on a false AWS, which checks each call against its caller's rights: what is made, and who may what."""

from __future__ import annotations

import json
import logging
import runpy
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from dray.checks.launcher_file import faults
from dray.cluster.autoscaler import limits_of
from dray.records.directory import check_storage
from dray.storage import Location, store_at
from tests.cluster.namespaces import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.long]

BUCKET = "results-of-ours"


class Aws:
    """Args:
    server: moto's, which is imported only here: that takes two seconds.
    patch: for the keys of who calls.
    """

    def __init__(self, server: Any, patch: pytest.MonkeyPatch) -> None:
        self.address, self._patch = "{}:{}".format(*server.get_host_and_port()), patch
        patch.setenv("AWS_ENDPOINT_URL", f"http://{self.address}")
        patch.setenv("AWS_DEFAULT_REGION", "us-west-2")
        self.log_in("us", "us")
        # An administrator, whom the false AWS lets do all when it checks.
        iam = self.client("iam")
        iam.create_user(UserName="us")
        everything = {"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Action": "*", "Resource": "*"}]}
        iam.put_user_policy(UserName="us", PolicyName="all", PolicyDocument=json.dumps(everything))
        key = iam.create_access_key(UserName="us")["AccessKey"]
        self.admin = key["AccessKeyId"], key["SecretAccessKey"]
        self.log_in(*self.admin)

    def client(self, service: str) -> Any:
        import boto3

        return boto3.client(service)

    def log_in(self, key: str, secret: str, session: str = "") -> None:
        import boto3
        from ray.autoscaler._private.aws.utils import client_cache, resource_cache

        self._patch.setenv("AWS_ACCESS_KEY_ID", key)
        self._patch.setenv("AWS_SECRET_ACCESS_KEY", secret)
        self._patch.setenv("AWS_SESSION_TOKEN", session) if session else self._patch.delenv("AWS_SESSION_TOKEN", False)
        boto3.setup_default_session()
        for cached in (client_cache, resource_cache):
            cached.cache_clear()

    def check_rights(self) -> None:
        """From now on."""
        url = f"http://{self.address}/moto-api/reset-auth"
        urllib.request.urlopen(urllib.request.Request(url, b"0", {"Content-Type": "text/plain"})).close()

    def keys_of(self, role: str) -> tuple[str, str, str]:
        """What a machine that has this role gets from its metadata."""
        arn = self.client("iam").get_role(RoleName=role)["Role"]["Arn"]
        keys = self.client("sts").assume_role(RoleArn=arn, RoleSessionName=role)["Credentials"]
        return keys["AccessKeyId"], keys["SecretAccessKey"], keys["SessionToken"]

    def machines(self) -> list[dict[str, Any]]:
        """What runs."""
        found = [
            each for group in self.client("ec2").describe_instances()["Reservations"] for each in group["Instances"]
        ]
        return [each for each in found if each["State"]["Name"] in ("pending", "running")]


@pytest.fixture
def aws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Aws]:
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    monkeypatch.chdir(ROOT)  # where `ray up cluster.yaml` is given
    monkeypatch.setenv("HOME", str(tmp_path))
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    yield Aws(server, monkeypatch)
    server.stop()


def ray(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "ray.scripts.scripts", *arguments], check=True, capture_output=True)


def access(aws: Aws, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Run clusters/aws_access.py; what there is then."""
    monkeypatch.setattr(sys, "argv", ["aws_access.py", BUCKET])
    runpy.run_path(str(ROOT / "clusters" / "aws_access.py"), run_name="__main__")
    iam, s3 = aws.client("iam"), aws.client("s3")
    profiles = iam.list_instance_profiles()["InstanceProfiles"]
    return [
        {profile["InstanceProfileName"]: [role["RoleName"] for role in profile["Roles"]] for profile in profiles},
        {
            role["RoleName"]: iam.get_role_policy(RoleName=role["RoleName"], PolicyName="dray")["PolicyDocument"]
            for role in iam.list_roles()["Roles"]
        },
        s3.get_public_access_block(Bucket=BUCKET)["PublicAccessBlockConfiguration"],
        s3.get_bucket_location(Bucket=BUCKET)["LocationConstraint"],
    ]


def start(provider: Any, types: dict[str, Any], name: str, kind: str) -> None:
    tags = {"ray-node-type": kind, "ray-node-name": f"ray-dray-{kind}", "ray-user-node-type": name}
    provider.create_node(types[name]["node_config"], {**tags, "ray-node-status": "up-to-date"}, 1)


def test_a_cluster_starts_with_the_rights_of_its_roles_and_ends(
    aws: Aws, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ray.autoscaler._private.commands import _bootstrap_config
    from ray.autoscaler._private.providers import _get_node_provider

    text = (ROOT / "cluster.yaml").read_text().replace("FILL_IN_BUCKET", BUCKET)
    (file := tmp_path / "cluster.yaml").write_text(text)
    ray("get-auth-token", "--generate")
    (tmp_path / ".ray" / "auth_token").chmod(0o600)
    assert faults(yaml.safe_load(text)) == []
    assert sum(node.get("GPU", 0) for node in limits_of(text).nodes()) == 0, "Ray asks AWS what the machines have"

    profiles, policies, closed, region = first = access(aws, monkeypatch)
    assert access(aws, monkeypatch) == first, "the second run changes nothing"
    assert profiles == {"dray-head": ["dray-head"], "dray-worker": ["dray-worker"]}
    assert set(closed.values()) == {True}
    assert region == "us-west-2"
    handed_on = [rule for rule in policies["dray-head"]["Statement"] if rule["Action"] == ["iam:PassRole"]]
    assert [rule["Resource"][0].rpartition("/")[2] for rule in handed_on] == ["dray-worker"]

    resolved = _bootstrap_config(yaml.safe_load(text), no_config_cache=True)
    types = resolved["available_node_types"]
    assert types["head"]["resources"] == {"CPU": 4, "GPU": 0}
    for kind in ("gpu_spot", "gpu_on_demand"):
        found = types[kind]["resources"]
        assert (found["CPU"], found["GPU"], found["accelerator_type:A10G"]) == (8, 1, 1)
    assert sum(node.get("GPU", 0) for node in limits_of(json.dumps(resolved)).nodes()) == 10, "8 spot ones and 2 others"

    def provider() -> Any:
        return _get_node_provider(resolved["provider"], resolved["cluster_name"], use_cache=False)

    start(provider(), types, "head", "head")
    head, worker = aws.keys_of("dray-head"), aws.keys_of("dray-worker")
    aws.check_rights()
    aws.log_in(*head)
    for kind in ("gpu_spot", "gpu_on_demand"):
        start(provider(), types, kind, "worker")
    machines = aws.machines()
    assert sorted(
        (
            each["InstanceType"] == "g5.2xlarge",
            each.get("InstanceLifecycle", ""),
            each["IamInstanceProfile"]["Arn"].rpartition("/")[2],
        )
        for each in machines
    ) == [(False, "", "dray-head"), (True, "", "dray-worker"), (True, "spot", "dray-worker")]

    aws.log_in(*worker)
    check_worker(aws, tmp_path)

    # `ray down`: all of the cluster, and nothing else of the account.
    aws.log_in(*aws.admin)
    [other] = aws.client("ec2").run_instances(ImageId="ami-12345678", MinCount=1, MaxCount=1)["Instances"]
    ray("down", "-y", str(file))
    assert [each["InstanceId"] for each in aws.machines()] == [other["InstanceId"]]


def check_worker(aws: Aws, directory: Path) -> None:
    """It keeps checkpoints in the bucket, and can do nothing else."""
    from botocore.exceptions import ClientError

    place = Location.of(f"s3://{BUCKET}/dray?region=us-west-2&scheme=http&endpoint_override={aws.address}")
    check_storage(place)
    store = store_at(place.child("trial_1"), directory / "scratch")
    staging = store.stage(352)
    (staging / "weights").write_bytes(b"x" * 100)
    assert store.commit(staging, 352).startswith("s3://results-of-ours/dray/trial_1/checkpoint_352?")
    assert len(store.read(352, "weights")) == 100
    store.delete(352)
    assert store.listed() == []
    for call in (
        lambda: aws.client("s3").create_bucket(Bucket="more"),
        lambda: aws.client("ec2").run_instances(ImageId="ami-12345678", MinCount=1, MaxCount=1),
        lambda: aws.client("ec2").terminate_instances(InstanceIds=["i-1234567890abcdef0"]),
    ):
        with pytest.raises(ClientError, match="AccessDenied"):
            call()
