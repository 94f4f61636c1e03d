"""What AWS and Google Cloud accept for a machine: the fields of ``node_config``, their values, and GPUs.

AWS is checked by the model of EC2 in boto3, through which Ray sends these fields; Google Cloud, for which Ray checks
nothing, by its reference of compute instances (the discovery document, version 1) as of November 2026.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from typing import Any

Faults = Iterator[tuple[str, str]]
Nodes = Mapping[str, Mapping[str, Any]]

# Ray picks one of SubnetIds for each machine. The other two Ray sets itself.
_RAYS_OWN = {"SubnetIds"}
_NOT_YOURS = {"MinCount": "min_workers", "MaxCount": "max_workers"}
_IMAGE = re.compile(r"ami-[0-9a-f]{8}([0-9a-f]{9})?|resolve:ssm:[\w./:-]+")

_GCP_FIELDS = frozenset(
    """
    advancedMachineFeatures canIpForward confidentialInstanceConfig deletionProtection description disks displayDevice
    guestAccelerators hostname instanceEncryptionKey keyRevocationActionType labels localSsdEncryptionMode machineType
    metadata minCpuPlatform name networkInterfaces networkPerformanceConfig params privateIpv6GoogleAccess
    reservationAffinity resourcePolicies scheduling serviceAccounts shieldedInstanceConfig
    shieldedInstanceIntegrityPolicy sourceInstanceTemplate sourceMachineImage sourceMachineImageEncryptionKey tags
    workloadIdentityConfig
    acceleratorType acceleratorConfig runtimeVersion networkConfig schedulingConfig
    """.split()  # noqa: SIM905 - read as words, not as a column of quotes
)
"""Fields of an instance, and in the last line those of a TPU."""
_GCP_SCHEDULING = frozenset(
    """
    automaticRestart availabilityDomain exposeHostTopology gracefulShutdown hostErrorTimeoutSeconds
    instanceTerminationAction localSsdRecoveryTimeout locationHint maxRunDuration minNodeCpus nodeAffinities
    onHostMaintenance onInstanceStopAction preemptible preemptionNoticeDuration protectionTier provisioningModel
    skipGuestOsShutdown terminationTime
    """.split()  # noqa: SIM905
)
_GCP_GPUS = frozenset(
    """
    nvidia-tesla-t4 nvidia-tesla-p4 nvidia-tesla-p100 nvidia-tesla-v100 nvidia-tesla-a100 nvidia-a100-80gb nvidia-l4
    nvidia-h100-80gb nvidia-h100-mega-80gb nvidia-h200-141gb nvidia-b200 nvidia-rtx-pro-6000
    """.split()  # noqa: SIM905
)
#: GPUs of machine families that have them built in, by vCPUs. Names such as a2-highgpu-4g end with the number of GPUs.
_GCP_BUILT_IN = {
    "g2-standard": {4: 1, 8: 1, 12: 1, 16: 1, 24: 2, 32: 1, 48: 4, 96: 8},
    "g4-standard": {48: 1, 96: 2, 192: 4, 384: 8},
}


# ----------------------------------------------------------------------------------------------------------------- AWS
def aws(config: Mapping[str, Any], nodes: Nodes) -> Faults:
    """What EC2 would refuse, or what would cost a GPU for nothing."""
    try:
        regions, model, rules = _ec2()
    except ImportError:
        yield "provider.type", "aws needs boto3 on this machine, for `ray up` too: pip install boto3"
        return
    region = str(config["provider"].get("region", ""))
    if region not in regions:
        yield "provider.region", f"AWS has no region {region!r}{nearest(region, regions)}"
        region = ""  # its zones can't be judged then
    for zone in str(config["provider"].get("availability_zone", region)).split(","):
        if not zone.strip().startswith(region):
            yield "provider.availability_zone", f"{zone.strip()} is not a zone of {region}"
    group = config["provider"].get("security_group", {})
    yield from _fits(group.get("IpPermissions", []), rules, "provider.security_group.IpPermissions")
    for name, node in nodes.items():
        where = f"available_node_types.{name}.node_config"
        given = {field: value for field, value in node["node_config"].items() if field not in _RAYS_OWN}
        for field in _NOT_YOURS.keys() & given:
            yield f"{where}.{field}", f"Ray sets it, from {_NOT_YOURS[field]} of the node type; remove it"
        yield from _fits(given, model, where)
        if "LaunchTemplate" in given:  # may have all of it
            continue
        for field in ("InstanceType", "ImageId"):
            if field not in given:
                old = "; Ray's default is Ubuntu 18.04" if field == "ImageId" else ""
                yield f"{where}.{field}", f"required, got nothing{old}"
        image = given.get("ImageId")
        if isinstance(image, str) and not _IMAGE.fullmatch(image) and "FILL_IN" not in image:
            yield f"{where}.ImageId", f"must be ami-..., or resolve:ssm: with a parameter's name, got {image!r}"
        kind, gpus = str(given.get("InstanceType", "")), node.get("resources", {}).get("GPU")
        # AWS names machines with NVIDIA's GPUs g or p and a number.
        if gpus is not None and kind and (gpus > 0) != (has_gpus := bool(re.match(r"(gr?|p)\d", kind))):
            what = "has GPUs, which nothing could use" if has_gpus else "has none"
            yield (
                f"available_node_types.{name}.resources.GPU",
                f"got {gpus}, but {kind} {what}; remove it, and Ray fills it in",
            )


@cache
def _ec2() -> tuple[list[str], Any, Any]:
    """EC2's regions, and its models of the parameters that start machines and that open ports."""
    import botocore.session

    session = botocore.session.Session()
    ec2 = session.get_service_model("ec2")
    rules = ec2.operation_model("AuthorizeSecurityGroupIngress").input_shape.members["IpPermissions"]
    return session.get_available_regions("ec2"), ec2.operation_model("RunInstances").input_shape, rules


def _fits(value: Any, shape: Any, path: str) -> Faults:
    """Compare a value with the model of EC2's interface."""
    match shape.type_name:
        case "structure":
            if not isinstance(value, Mapping):
                yield path, f"must be a mapping of {', '.join(list(shape.members)[:4])}, ..., got {value!r:.60}"
                return
            for field, inner in value.items():
                if field in shape.members:
                    yield from _fits(inner, shape.members[field], f"{path}.{field}")
                else:
                    yield f"{path}.{field}", unknown(field, shape.members)
        case "list":
            if not isinstance(value, list):
                yield path, f"must be a list, got {value!r:.60}"
                return
            for number, inner in enumerate(value):
                yield from _fits(inner, shape.member, f"{path}.{number}")
        case "string" if not isinstance(value, str):
            yield path, f"must be a string, got {value!r:.60}"
        case "string" if shape.enum and value not in shape.enum and "FILL_IN" not in value:
            few = f"; it has {', '.join(shape.enum)}" if len(shape.enum) < 12 else "; if it is new, update boto3"
            yield path, f"AWS has no {shape.name} {value!r}{nearest(value, shape.enum) or few}"
        case "integer" | "long" if isinstance(value, bool) or not isinstance(value, int):
            yield path, f"must be an integer, got {value!r:.60}"
        case "boolean" if not isinstance(value, bool):
            yield path, f"must be true or false, got {value!r:.60}"


# -------------------------------------------------------------------------------------------------------- Google Cloud
def gcp(config: Mapping[str, Any], nodes: Nodes) -> Faults:
    """What Compute Engine would refuse, or what would cost a GPU for nothing."""
    place = config["provider"]
    if not place.get("project_id"):
        yield "provider.project_id", "required, got nothing: the id of your project, not its name"
    if not str(place.get("availability_zone", "")).startswith(f"{place.get('region')}-"):
        yield "provider.availability_zone", f"{place.get('availability_zone')} is not a zone of {place.get('region')}"
    for name, node in nodes.items():
        where, given = f"available_node_types.{name}.node_config", node["node_config"]
        for field in given.keys() - _GCP_FIELDS:
            yield f"{where}.{field}", unknown(field, _GCP_FIELDS)
        if not isinstance(given.get("scheduling", {}), Mapping | list):
            yield f"{where}.scheduling", f"must be a mapping, got {given['scheduling']!r:.60}"
        for field in _scheduling(given).keys() - _GCP_SCHEDULING:
            yield f"{where}.scheduling.{field}", unknown(field, _GCP_SCHEDULING)
        if not {"machineType", "sourceInstanceTemplate", "acceleratorType", "acceleratorConfig"} & given.keys():
            yield f"{where}.machineType", "required, got nothing; for example g2-standard-8"
        yield from _gcp_gpus(given, node.get("resources", {}).get("GPU", 0), name)


def _gcp_gpus(given: Mapping[str, Any], gpus: int, name: str) -> Faults:
    where = f"available_node_types.{name}"
    added = 0
    accelerators = given.get("guestAccelerators", [])
    if not isinstance(accelerators, list) or not all(isinstance(each, Mapping) for each in accelerators):
        yield f"{where}.node_config.guestAccelerators", f"must be a list of mappings, got {accelerators!r:.60}"
        return
    for number, each in enumerate(accelerators):
        count = each.get("acceleratorCount")
        if not isinstance(count, int):
            path = f"{where}.node_config.guestAccelerators.{number}.acceleratorCount"
            yield path, f"must be an integer, got {count!r:.60}"
            return
        added += count
        kind = str(each.get("acceleratorType", "")).rpartition("/")[2]
        if kind not in _GCP_GPUS:
            path = f"{where}.node_config.guestAccelerators.{number}.acceleratorType"
            yield path, f"Google Cloud has no GPU {kind!r}{nearest(kind, _GCP_GPUS)}"
    machine = str(given.get("machineType", "")).rpartition("/")[2]
    has = added or _built_in(machine)
    if machine and gpus != has:
        yield f"{where}.resources.GPU", f"got {gpus}, but {machine} has {has} GPUs here"
    if has and _scheduling(given).get("onHostMaintenance") != "TERMINATE" and spot(given) is None:
        told = "must be TERMINATE for a machine with GPUs: Google can't move it to another host"
        yield f"{where}.node_config.scheduling.onHostMaintenance", told


def _built_in(machine: str) -> int:
    named = re.fullmatch(r"a\d-\w+-(\d+)g", machine)
    family, _, cpus = machine.rpartition("-")
    return int(named[1]) if named else _GCP_BUILT_IN.get(family, {}).get(int(cpus) if cpus.isdigit() else 0, 0)


def _scheduling(node_config: Mapping[str, Any]) -> dict[str, Any]:
    given = node_config.get("scheduling", {})
    # Ray's own examples have a list of mappings.
    each = given if isinstance(given, list) else [given]
    return {field: value for mapping in each if isinstance(mapping, Mapping) for field, value in mapping.items()}


# --------------------------------------------------------------------------------------------------------------- both
def spot(node_config: Mapping[str, Any]) -> str | None:
    """The field that makes a machine a spot machine; None if it is none."""
    market = node_config.get("InstanceMarketOptions")
    if isinstance(market, Mapping) and market.get("MarketType") == "spot":
        return "InstanceMarketOptions"
    planned = _scheduling(node_config)
    return "scheduling" if planned.get("preemptible") or planned.get("provisioningModel") == "SPOT" else None


@cache
def accelerators() -> frozenset[str]:
    """The names of accelerators that Ray knows, as in ``accelerator_type:A10G``."""
    from ray.util import accelerators as known

    # Not from __all__, which lists names that don't exist.
    return frozenset(value for name, value in vars(known).items() if name.isupper() and isinstance(value, str))


def unknown(name: str, known: Collection[str]) -> str:
    """The message for an unknown field."""
    return f"unknown field{nearest(name, known) or '; the fields here are ' + ', '.join(sorted(known))}"


def nearest(name: str, known: Collection[str]) -> str:
    """``; did you mean ...?`` with a similar name, or ""."""
    lower = {each.lower(): each for each in known}
    near = difflib.get_close_matches(name.lower(), lower, n=1, cutoff=0.7)
    return f"; did you mean {lower[near[0]]}?" if near else ""
