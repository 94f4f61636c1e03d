"""Faults of a file for Ray's cluster launcher that would show only once machines are paid for, or never.

Ray checks the names at the file's top level, and hands what a node is launched with to the cloud unchecked. Here every
name and type is checked by Ray's schema and EC2's model, as well as what lets strangers in and what loses results. It
needs no credentials and starts nothing.
"""

from __future__ import annotations

import copy
import json
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dray.cluster.checks import ec2_model
from dray.cluster.checks.ec2_model import Faults
from dray.cluster.view import NODE_TYPE
from dray.text import one_line

_CLOUDS = ("aws", "gcp")
_TOKEN = ".ray/auth_token"
_ASSIGNED = re.compile(r"(?<![\w$])([A-Z][A-Z0-9_]*)=([^\s;'\"]+)")
_FILL_IN = re.compile(r"FILL_IN\w*")


def faults(config: Mapping[str, Any]) -> list[tuple[str, str]]:
    """All faults of a cluster file. Relative paths in it start at the working directory, as for Ray.

    Args:
        config: as it was read.

    Returns:
        The path of each wrong field, with what is wrong and what to do.
    """
    found = list(_schema(config))
    if found:  # the other checks rely on the schema
        return found
    checks = [_ray, _labels, _files, _token, _ports, _head, _storage]
    if provider(config) == "aws":
        checks.append(ec2_model.check)
    return [fault for check in checks for fault in check(config)]


def provider(config: Mapping[str, Any]) -> str:
    """The provider's type: ``aws``, ``gcp``, ``local``."""
    return str(config["provider"].get("type"))


# ----------------------------------------------------------------------------------------------------------- Ray's own
def _schema(config: Mapping[str, Any]) -> Faults:
    """Names and types, by Ray's schema. Ray itself reports only the first fault."""
    import jsonschema
    import ray.autoscaler

    schema = json.loads((Path(ray.autoscaler.__file__).parent / "ray-schema.json").read_text())
    for error in sorted(jsonschema.Draft7Validator(schema).iter_errors(config), key=lambda error: list(error.path)):
        path = [str(part) for part in error.absolute_path]
        if error.validator == "additionalProperties":
            known = error.schema.get("properties", {})
            for name in sorted(set(error.instance) - set(known)):
                yield ".".join([*path, name]), ec2_model.unknown(name, known)
        elif error.validator == "required":
            for name in sorted(set(error.validator_value) - set(error.instance)):
                # On AWS Ray fills in a machine's resources before it checks the file.
                if (name, config.get("provider", {}).get("type")) != ("resources", "aws"):
                    yield ".".join([*path, name]), "missing required field"
        else:
            yield ".".join(path) or "file", error.message


def _ray(config: Mapping[str, Any]) -> Faults:
    from ray.autoscaler._private.util import prepare_config, validate_config

    # Without mounts: Ray would log on each call that mounted files are files.
    given = {**copy.deepcopy(dict(config)), "file_mounts": {}}
    for _, node_type in _node_types(given):
        node_type.setdefault("resources", {})
    try:
        validate_config(prepare_config(given))
    except Exception as error:  # Ray raises anything, even KeyError
        yield "file", f"Ray refuses it: {one_line(error) or type(error).__name__}"


def _labels(config: Mapping[str, Any]) -> Faults:
    for name, node in _node_types(config):
        if (label := node.get("labels", {}).get(NODE_TYPE, name)) != name:
            why = "by this label searches avoid machines that the cloud does not have"
            yield (
                f"available_node_types.{name}.labels.{NODE_TYPE}",
                f"must be {name}, the type's name, got {label}: {why}",
            )


# --------------------------------------------------------------------------------------------------- files and security
def _files(config: Mapping[str, Any]) -> Faults:
    for path, text in _texts(config):
        for name in dict.fromkeys(_FILL_IN.findall(text)):
            yield path, f"{name} must be replaced; the comment above it says by what"
    for remote, local in config.get("file_mounts", {}).items():
        if not _is_token(remote) and not _FILL_IN.search(str(local)) and not Path(str(local)).expanduser().exists():
            yield f"file_mounts.{remote}", f"no such file or directory: {local}, in {Path.cwd()}"


def _token(config: Mapping[str, Any]) -> Faults:
    local = next((local for remote, local in config.get("file_mounts", {}).items() if _is_token(remote)), None)
    if local is None:
        why = "the nodes get no token: whoever can reach one of Ray's ports can run code on the node"
        yield "file_mounts", f"{why}; add ~/{_TOKEN}: ~/{_TOKEN}"
    else:
        path = Path(str(local)).expanduser()
        if not path.exists():
            make = "ray get-auth-token --generate && chmod 600 ~/.ray/auth_token"
            yield f"file_mounts.~/{_TOKEN}", f"no such file: {local}; {make}"
        elif stat.S_IMODE(path.stat().st_mode) & 0o077:
            yield f"file_mounts.~/{_TOKEN}", f"other users of this machine can read {local}; run chmod 600 {local}"
    if _environment(config).get("RAY_AUTH_MODE") != "token":
        why = "no command sets RAY_AUTH_MODE=token, without which Ray requires no token"
        yield "setup_commands", f"{why}; export it where ~/.bashrc sets PATH"


def _ports(config: Mapping[str, Any]) -> Faults:
    if "head_start_ray_commands" not in config and provider(config) != "local":
        why = "missing required field: by default Ray opens the dashboard, which can submit jobs, to every address"
        yield "head_start_ray_commands", f"{why}; write ray start --head ... without --dashboard-host"
    for path, command in _commands(config):
        for host in re.findall(r"--dashboard-host[= ]+['\"]?([^\s'\"]+)", command):
            if host not in ("127.0.0.1", "localhost", "::1"):
                why = f"--dashboard-host={host} lets whoever can reach the port run jobs"
                yield path, f"{why}; remove it and use `ray dashboard`, which connects by ssh"
    for number, rule in enumerate(config["provider"].get("security_group", {}).get("IpPermissions", [])):
        everybody = [text for _, text in _texts(rule) if text.endswith("/0")]
        if isinstance(rule, Mapping) and everybody and (rule.get("FromPort"), rule.get("ToPort")) != (22, 22):
            ports = f"{rule.get('FromPort', 'all')} to {rule.get('ToPort', 'all')}"
            yield (
                f"provider.security_group.IpPermissions.{number}",
                f"opens ports {ports} to the world ({everybody[0]}); give your own addresses, or connect by ssh",
            )


# -------------------------------------------------------------------------------------------------------------- results
def _head(config: Mapping[str, Any]) -> Faults:
    name = str(config.get("head_node_type"))
    head = dict(_node_types(config)).get(name, {})
    if (field := spot_field(head.get("node_config", {}))) is not None:
        yield (
            f"available_node_types.{name}.node_config.{field}",
            "the cloud can reclaim a spot machine at any time, and with it the cluster and the driver; remove it here "
            "(workers may be spot machines)",
        )


def spot_field(node_config: Mapping[str, Any]) -> str | None:
    """The field that makes a machine of AWS or Google Cloud a spot machine; None if it is not one."""
    for field in ("InstanceMarketOptions", "scheduling"):  # the second may be a list of mappings
        if re.search(r"'spot'|'SPOT'|'preemptible': True", repr(node_config.get(field))):
            return field
    return None


def _storage(config: Mapping[str, Any]) -> Faults:
    """Results must be where all nodes see them, and the nodes must be allowed to write there."""
    environment = _environment(config)
    place = environment.get("DRAY_STORAGE") or environment.get("DRAY_HOME")
    ways = "export DRAY_STORAGE=s3://BUCKET/PREFIX, or mount a file system on all nodes and export DRAY_HOME=/mnt/..."
    if place is None:
        yield "setup_commands", f"results need a place that all nodes see: {ways}"
        return
    scheme, _, path = place.rpartition("://")
    if scheme in ("", "file"):
        mounts = any("mount" in command and path.rstrip("/") in command for _, command in _commands(config))
        private = path.startswith(("~", "$HOME", "/tmp", "/home", "/root", "."))
        if private or (provider(config) in _CLOUDS and not mounts):
            yield "setup_commands", f"{place} is on each node's own disk: {ways}"
        return
    needed = {("aws", "s3"): "IamInstanceProfile", ("gcp", "gs"): "serviceAccounts"}.get((provider(config), scheme))
    if needed is None or any("ACCESS_KEY" in name or "CREDENTIALS" in name for name in environment):
        return
    for name, node in _node_types(config):
        if name != config.get("head_node_type") and needed not in node["node_config"]:  # Ray gives the head an account
            where = f"available_node_types.{name}.node_config.{needed}"
            yield where, f"missing required field: without it these nodes may not write to {place}"


# --------------------------------------------------------------------------------------------------------------- parts
def _node_types(config: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    yield from config.get("available_node_types", {}).items()


def _commands(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Each command with the path of its field."""
    for path, text in _texts(config):
        if "_commands" in path:
            yield path, text


def _environment(config: Mapping[str, Any]) -> dict[str, str]:
    """Environment variables that commands and container options set."""
    options = _texts(config.get("docker", {}))
    return dict(found for _, text in [*_commands(config), *options] for found in _ASSIGNED.findall(text))


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
