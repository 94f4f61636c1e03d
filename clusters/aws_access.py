"""Creates what cluster.yaml needs on AWS: ``python clusters/aws_access.py BUCKET [--region us-west-2]``.

That is a private bucket for results, and the instance profiles of head and workers. Both may read and write the bucket;
the head may also start and end workers. Run again, it restores the permissions. It costs nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
from typing import Any

import boto3
from botocore.exceptions import ClientError

HEAD, WORKER = "dray-head", "dray-worker"


def _allow(actions: list[str], *resources: str, **condition: Any) -> dict[str, Any]:
    rule: dict[str, Any] = {"Effect": "Allow", "Action": actions, "Resource": list(resources)}
    return rule | {"Condition": condition} if condition else rule


def of_workers(bucket: str) -> list[dict[str, Any]]:
    """What a worker may do: read and write results."""
    arn = f"arn:aws:s3:::{bucket}"
    return [
        _allow(["s3:ListBucket", "s3:GetBucketLocation"], arn),
        _allow(["s3:GetObject", "s3:PutObject", "s3:DeleteObject", "s3:AbortMultipartUpload"], f"{arn}/*"),
    ]


def of_the_head(bucket: str, worker_role: str) -> list[dict[str, Any]]:
    """What the head may do: the same, and what its autoscaler needs."""
    return [
        *of_workers(bucket),
        _allow(["ec2:Describe*", "ec2:RunInstances", "ec2:CreateTags"], "*"),
        # Only machines that Ray has started, which it tags.
        _allow(["ec2:TerminateInstances"], "*", Null={"ec2:ResourceTag/ray-cluster-name": "false"}),
        # To look up an image by a parameter's name.
        _allow(["ssm:GetParameters"], "*"),
        # To start workers with a profile.
        _allow(["iam:PassRole"], worker_role),
        # Needed for the first spot machine of an account.
        _allow(["iam:CreateServiceLinkedRole"], "*", StringEquals={"iam:AWSServiceName": "spot.amazonaws.com"}),
    ]


def make_bucket(name: str, region: str) -> None:
    """Create a private bucket, or make an existing one private."""
    s3 = boto3.client("s3", region_name=region)
    # S3 refuses us-east-1 as a location: it is the default.
    where = {} if region == "us-east-1" else {"CreateBucketConfiguration": {"LocationConstraint": region}}
    try:
        s3.create_bucket(Bucket=name, **where)
    except ClientError as error:
        if error.response["Error"]["Code"] != "BucketAlreadyOwnedByYou":
            raise
    closed = ("BlockPublicAcls", "IgnorePublicAcls", "BlockPublicPolicy", "RestrictPublicBuckets")
    s3.put_public_access_block(Bucket=name, PublicAccessBlockConfiguration=dict.fromkeys(closed, True))


def make_profile(name: str) -> str:
    """Create a role for machines and its instance profile; returns the role's ARN."""
    iam = boto3.client("iam")
    machines = {"Effect": "Allow", "Principal": {"Service": "ec2.amazonaws.com"}, "Action": "sts:AssumeRole"}
    trust = json.dumps({"Version": "2012-10-17", "Statement": [machines]})
    try:
        iam.create_role(RoleName=name, AssumeRolePolicyDocument=trust, Description="dray: see clusters/aws_access.py")
    except iam.exceptions.EntityAlreadyExistsException:
        iam.update_assume_role_policy(RoleName=name, PolicyDocument=trust)
    with contextlib.suppress(iam.exceptions.EntityAlreadyExistsException):
        iam.create_instance_profile(InstanceProfileName=name)
    if not iam.get_instance_profile(InstanceProfileName=name)["InstanceProfile"]["Roles"]:
        iam.add_role_to_instance_profile(InstanceProfileName=name, RoleName=name)
    arn: str = iam.get_role(RoleName=name)["Role"]["Arn"]
    return arn


def may(role: str, rules: list[dict[str, Any]]) -> None:
    """Give a role these permissions, replacing those of an earlier run."""
    document = json.dumps({"Version": "2012-10-17", "Statement": rules})
    boto3.client("iam").put_role_policy(RoleName=role, PolicyName="dray", PolicyDocument=document)


def main() -> None:
    """Create the bucket, the roles and the profiles."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bucket", help="its name, unique in all of AWS")
    parser.add_argument("--region", default="us-west-2", help="region; traffic between regions costs money")
    given = parser.parse_args()
    make_bucket(given.bucket, given.region)
    worker_role = make_profile(WORKER)
    make_profile(HEAD)
    may(WORKER, of_workers(given.bucket))
    may(HEAD, of_the_head(given.bucket, worker_role))
    print(f"cluster.yaml, setup_commands: DRAY_STORAGE=s3://{given.bucket}/dray?region={given.region}")
    print(f"node_config: IamInstanceProfile: {{Name: {HEAD}}} for the head, {{Name: {WORKER}}} for workers")


if __name__ == "__main__":
    main()
