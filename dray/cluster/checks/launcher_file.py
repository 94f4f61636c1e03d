"""Faults of a file for Ray's cluster launcher that Ray finds only when machines are paid for, or never.

Ray checks names at the file's top level. It hands what a node is launched with to the cloud unchecked; it sees whether
mounted files exist when the head is up; and it accepts versions that are not pinned, open ports, a head that may be
taken away, and results that only one node can see. Everything here is found from the file and this machine: it needs no
credentials and starts nothing.
"""

from __future__ import annotations

import copy
import ipaddress
import json
import re
import shlex
import stat
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dray.cluster.checks import cloud_nodes

CLOUDS = {"aws": cloud_nodes.aws, "gcp": cloud_nodes.gcp}
"""The checks of each provider's machines; for other providers, only Ray's schema and the general checks apply."""

_TOKEN = ".ray/auth_token"
_MAKE_TOKEN = "ray get-auth-token --generate && chmod 600 ~/.ray/auth_token"
_COMMANDS = (
    "initialization_commands",
    "setup_commands",
    "head_setup_commands",
    "worker_setup_commands",
    "head_start_ray_commands",
    "worker_start_ray_commands",
)
_ASSIGNED = re.compile(r"(?<![\w$])([A-Z][A-Z0-9_]*)=([^\s;'\"]+)")
_FILL_IN = re.compile(r"FILL_IN\w*")
_NO_NODES_BUSINESS = {"pip", "setuptools", "wheel", "uv"}

Faults = Iterator[tuple[str, str]]


def faults(config: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Everything that is wrong with a cluster file. Relative paths in it start at the working directory, as for Ray.

    Args:
        config: as it was read.

    Returns:
        The path of each wrong field, with what is wrong and what to do; without duplicates.
    """
    found = list(_schema(config))
    if found:  # the other checks rely on the schema
        return found
    checks = (_placeholders, _semantics, _mounts, _token, _ports, _versions, _scaling, _head, _storage, _keys, _nodes)
    return list(dict.fromkeys(fault for check in checks for fault in check(config)))


def provider(config: Mapping[str, Any]) -> str:
    """The provider's type: ``aws``, ``gcp``, ``local``."""
    return str(config["provider"].get("type"))


# ----------------------------------------------------------------------------------------------------------- Ray's own
def _schema(config: Mapping[str, Any]) -> Faults:
    """Names and types, by Ray's schema. Ray itself tells only the first fault."""
    import jsonschema
    import ray.autoscaler

    schema = json.loads((Path(ray.autoscaler.__file__).parent / "ray-schema.json").read_text())
    for error in sorted(jsonschema.Draft7Validator(schema).iter_errors(config), key=lambda error: list(error.path)):
        path = [str(part) for part in error.absolute_path]
        if error.validator == "additionalProperties":
            known = error.schema.get("properties", {})
            for name in sorted(set(error.instance) - set(known)):
                yield ".".join([*path, name]), cloud_nodes.unknown(name, known)
        elif error.validator == "required":
            for name in sorted(set(error.validator_value) - set(error.instance)):
                # On AWS Ray fills in a machine's resources before it checks the file.
                if (name, config.get("provider", {}).get("type")) != ("resources", "aws"):
                    yield ".".join([*path, name]), "required, got nothing"
        else:
            yield ".".join(path) or "file", error.message


def _semantics(config: Mapping[str, Any]) -> Faults:
    from ray.autoscaler._private.util import prepare_config, validate_config

    # Without mounts: Ray would log on each call that mounted files are files.
    given = {**copy.deepcopy(dict(config)), "file_mounts": {}}
    for node_type in given.get("available_node_types", {}).values():
        node_type.setdefault("resources", {})
    try:
        validate_config(prepare_config(given))
    except Exception as error:  # Ray raises anything, even KeyError
        yield "file", f"Ray refuses it: {' '.join(str(error).split()) or type(error).__name__}"


# ------------------------------------------------------------------------------------------------- files and the token
def _placeholders(config: Mapping[str, Any]) -> Faults:
    for path, text in _texts(config):
        for name in dict.fromkeys(_FILL_IN.findall(text)):
            yield path, f"{name} must be replaced; the comment above it says by what"


def _mounts(config: Mapping[str, Any]) -> Faults:
    for remote, local in config.get("file_mounts", {}).items():
        if not _is_token(remote) and not _FILL_IN.search(str(local)) and not Path(str(local)).expanduser().exists():
            yield f"file_mounts.{remote}", f"no such file or directory: {local}, in {Path.cwd()}"


def _token(config: Mapping[str, Any]) -> Faults:
    local = next((local for remote, local in config.get("file_mounts", {}).items() if _is_token(remote)), None)
    open_to_all = "whoever can reach one of Ray's ports can run code on the node"
    if local is None:
        yield "file_mounts", f"the nodes get no token: {open_to_all}; add ~/{_TOKEN}: ~/{_TOKEN}"
    else:
        path = Path(str(local)).expanduser()
        if not path.exists():
            yield f"file_mounts.~/{_TOKEN}", f"no such file: {local}; {_MAKE_TOKEN}"
        elif stat.S_IMODE(path.stat().st_mode) & 0o077:
            yield f"file_mounts.~/{_TOKEN}", f"other users of this machine can read {local}; run chmod 600 {local}"
    if _environment(config).get("RAY_AUTH_MODE") != "token":
        told = "no command sets RAY_AUTH_MODE=token, without which Ray requires no token"
        yield "setup_commands", f"{told}; export it where ~/.bashrc sets PATH"


def _keys(config: Mapping[str, Any]) -> Faults:
    key = config.get("auth", {}).get("ssh_private_key")
    if key is None:
        return
    if not _FILL_IN.search(key) and not Path(key).expanduser().exists():
        yield "auth.ssh_private_key", f"no such file: {key}"
    if provider(config) == "aws":
        for name, node in _node_types(config):
            if not {"KeyName", "UserData"} & node["node_config"].keys():
                where = f"available_node_types.{name}.node_config.KeyName"
                yield where, "required with auth.ssh_private_key: the name of this key in AWS"


# --------------------------------------------------------------------------------------------------------------- ports
def _ports(config: Mapping[str, Any]) -> Faults:
    if "head_start_ray_commands" not in config and provider(config) != "local":
        told = "required: by default Ray opens the dashboard, which can submit jobs, to every address"
        yield "head_start_ray_commands", f"{told}; write ray start --head ... without --dashboard-host"
    for path, command in _commands(config):
        for host in re.findall(r"--dashboard-host[= ]+['\"]?([^\s'\"]+)", command):
            if host not in ("127.0.0.1", "localhost", "::1"):
                told = f"--dashboard-host={host} lets whoever can reach the port run jobs"
                yield path, f"{told}; remove it and use `ray dashboard`, which connects by ssh"
    permissions = config["provider"].get("security_group", {}).get("IpPermissions", [])
    for number, rule in enumerate(permissions):
        if not isinstance(rule, Mapping):
            continue  # the check against EC2's model tells it
        everybody = [text for _, text in _texts([rule.get("IpRanges"), rule.get("Ipv6Ranges")]) if _is_everybody(text)]
        if everybody and (rule.get("FromPort"), rule.get("ToPort")) != (22, 22):
            ports = f"{rule.get('FromPort', 'all')} to {rule.get('ToPort', 'all')}"
            told = f"opens ports {ports} to the world ({everybody[0]})"
            yield (
                f"provider.security_group.IpPermissions.{number}",
                f"{told}; give your own addresses, or connect by ssh",
            )


def _is_everybody(cidr: str) -> bool:
    try:
        return ipaddress.ip_network(cidr, strict=False).prefixlen == 0
    except ValueError:
        return False  # a description


# ------------------------------------------------------------------------------------------------------------ versions
def _versions(config: Mapping[str, Any]) -> Faults:
    image = config.get("docker", {})
    for field in ("image", "head_image", "worker_image"):
        name = image.get(field)
        if name and "@sha256:" not in name and re.search(r":(latest|nightly)[^/]*$|/[^:]*$|^[^:/]*$", name):
            yield f"docker.{field}", f"{name} can change at any time; give a release, or a digest"
    if "setup_commands" not in config and not image and provider(config) in CLOUDS:
        told = "required: by default Ray installs a development version of itself"
        yield "setup_commands", f"{told}; pip install with pinned versions, as dray's cluster.yaml does"
    for path, command in _commands(config):
        for loose in _loose(command):
            told = f"{loose} has no version: nodes that start later may get another one, and then can't join"
            yield path, f"{told}; write NAME==VERSION, or pip install -c constraints.txt"


def _loose(command: str) -> Iterator[str]:
    """Packages that a command installs without a fixed version."""
    for part in re.split(r"&&|\|\||[;()]", command):
        try:
            words = shlex.split(part)
        except ValueError:  # the split went through a quoted string
            words = part.split()
        if "install" not in words or not any(re.fullmatch(r"(.*/)?pip[\d.]*", word) for word in words):
            continue
        given = words[words.index("install") + 1 :]
        if any(re.match(r"-c|--constraint|-r|--requirement", word) for word in given):
            continue
        for word in given:
            url = re.search(r"://.*\.whl|://.*@[0-9a-f]{7}", word) and not re.search(r"latest|nightly", word)
            if not word.startswith("-") and "==" not in word and not url and word not in _NO_NODES_BUSINESS:
                yield word.partition("@")[0].strip()


# ------------------------------------------------------------------------------------------------------ nodes and bill
def _scaling(config: Mapping[str, Any]) -> Faults:
    if provider(config) == "local":
        return
    if "max_workers" not in config:
        told = "required: without it Ray starts at most 2 workers"
        yield "max_workers", f"{told}; give the most that you would pay for"
    if "idle_timeout_minutes" not in config:
        yield "idle_timeout_minutes", "required: how long an idle worker is kept, and paid for; for example 10"
    starts = config.get("head_start_ray_commands", [])
    if starts and not any("--autoscaling-config" in command for command in starts):
        told = "no --autoscaling-config=~/ray_bootstrap_config.yaml"
        yield "head_start_ray_commands", f"{told}: the head would neither start nor stop workers"
    if provider(config) == "aws" and config["provider"].get("cache_stopped_nodes", True):
        told = (
            "must be false (the default is true): the disk of a stopped node still costs money, and the node comes back"
        )
        yield "provider.cache_stopped_nodes", f"{told} with old processes and files"


def _head(config: Mapping[str, Any]) -> Faults:
    name = config.get("head_node_type")
    head = dict(_node_types(config)).get(str(name))
    if head is None:
        return
    where = f"available_node_types.{name}"
    if head.get("max_workers") != 0:
        told = f"must be 0, got {head.get('max_workers', 'nothing, which means as many as max_workers')}"
        yield f"{where}.max_workers", f"{told}: otherwise Ray starts workers of the head's type, without GPUs"
    spot = cloud_nodes.spot(head["node_config"])
    if spot is not None:
        told = "the cloud can reclaim a spot machine at any time, and with it the cluster and the driver"
        yield f"{where}.node_config.{spot}", f"{told}; remove it here (workers may be spot machines)"


def _nodes(config: Mapping[str, Any]) -> Faults:
    if provider(config) in CLOUDS:
        yield from CLOUDS[provider(config)](config, dict(_node_types(config)))
    names = cloud_nodes.accelerators()
    for name, node in _node_types(config):
        for resource in node.get("resources", {}):
            kind = resource.removeprefix("accelerator_type:")
            if kind != resource and kind not in names:
                where = f"available_node_types.{name}.resources.{resource}"
                yield where, f"Ray does not know the accelerator {kind}{cloud_nodes.nearest(kind, names)}"


# ------------------------------------------------------------------------------------------------------------- storage
def _storage(config: Mapping[str, Any]) -> Faults:
    """Results must be where all nodes see them, and the nodes must be allowed to write there."""
    environment = _environment(config)
    place = environment.get("DRAY_STORAGE") or environment.get("DRAY_HOME")
    ways = "export DRAY_STORAGE=s3://BUCKET/PREFIX, or mount a file system on all nodes and export DRAY_HOME=/mnt/..."
    if place is None:
        yield "setup_commands", f"results need a place that all nodes see: {ways}"
        return
    scheme = place.partition("://")[0] if "://" in place else None
    if scheme in (None, "file"):
        path = place.removeprefix("file://")
        mounts = any("mount" in command and path.rstrip("/") in command for _, command in _commands(config))
        private = path.startswith(("~", "$HOME", "/tmp", "/home", "/root", "."))
        if private or (provider(config) in CLOUDS and not mounts):
            yield "setup_commands", f"{place} is on each node's own disk: {ways}"
        return
    needed = {("aws", "s3"): "IamInstanceProfile", ("gcp", "gs"): "serviceAccounts"}.get((provider(config), scheme))
    if needed is None or any("ACCESS_KEY" in name or "CREDENTIALS" in name for name in environment):
        return
    lacking = [name for name, node in _node_types(config) if needed not in node["node_config"]]
    for name in lacking:
        # Ray gives the head an account of its own, which may write, but may not start workers that have one.
        if name != config.get("head_node_type"):
            where = f"available_node_types.{name}.node_config.{needed}"
            yield where, f"required, got nothing: without it these nodes may not write to {place}"
        elif provider(config) == "aws" and len(lacking) < len(dict(_node_types(config))):
            where = f"available_node_types.{name}.node_config.{needed}"
            yield where, "required, got nothing: Ray's own profile may not start workers that have one (iam:PassRole)"


# --------------------------------------------------------------------------------------------------------------- parts
def _node_types(config: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    yield from config.get("available_node_types", {}).items()


def _commands(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Each command with the path of its field."""
    for name in _COMMANDS:
        yield from ((f"{name}.{number}", command) for number, command in enumerate(config.get(name, [])))
    for kind, node in _node_types(config):
        for name in ("initialization_commands", "worker_setup_commands"):
            where = f"available_node_types.{kind}.{name}"
            yield from ((f"{where}.{number}", command) for number, command in enumerate(node.get(name, [])))


def _environment(config: Mapping[str, Any]) -> dict[str, str]:
    """Environment variables that commands and container options set."""
    docker = config.get("docker", {})
    options = [str(option) for field, value in docker.items() if "options" in field for option in value]
    return dict(found for text in [*(c for _, c in _commands(config)), *options] for found in _ASSIGNED.findall(text))


def _texts(value: object, *path: str) -> Iterator[tuple[str, str]]:
    match value:
        case str():
            yield ".".join(path), value
        case Mapping():
            for name, item in value.items():
                yield from _texts(item, *path, str(name))
        case Sequence():
            for number, item in enumerate(value):
                yield from _texts(item, *path, str(number))


def _is_token(remote: str) -> bool:
    return remote.endswith(_TOKEN)
