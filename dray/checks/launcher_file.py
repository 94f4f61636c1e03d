"""Checks a file for Ray's cluster launcher for the settings that dray needs and ``ray up`` does not check.

Names and types are checked by Ray's schema. The cloud checks the settings that machines are launched with.
"""

from __future__ import annotations

import json
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeAlias

from dray.cluster.view import NODE_TYPE
from dray.text import one_line

Faults: TypeAlias = Iterator[tuple[str, str]]

_TOKEN = ".ray/auth_token"
_ASSIGNED = re.compile(r"(?<![\w$])([A-Z][A-Z0-9_]*)=([^\s;'\"]+)")
_FILL_IN = re.compile(r"FILL_IN\w*")
_DASHBOARD_HOST = re.compile(r"--dashboard-host[= ]+['\"]?([^\s'\"]+)")


def faults(config: Mapping[str, Any]) -> list[tuple[str, str]]:
    """All faults of a cluster file, by field. As in Ray, its relative paths start at the working directory."""
    # The other checks rely on the types that Ray demands.
    return list(_ray(config)) or [
        fault for check in (_labels, _files, _token, _dashboard, _storage) for fault in check(config)
    ]


def provider(config: Mapping[str, Any]) -> str:
    return str(config["provider"].get("type"))


def _ray(config: Mapping[str, Any]) -> Faults:
    """Faults by Ray's schema of these files, which is also what ``ray up`` checks first."""
    from jsonschema import Draft7Validator

    ray = find_spec("ray")  # importing it would take a second
    assert ray is not None
    assert ray.origin is not None
    schema = json.loads((Path(ray.origin).parent / "autoscaler" / "ray-schema.json").read_text())
    for error in Draft7Validator(schema).iter_errors(config):
        if "'resources' is a required property" in error.message:  # on AWS, Ray fills them in first
            continue
        yield ".".join(map(str, error.absolute_path)) or "file", f"Ray refuses it: {one_line(error.message)}"


def _labels(config: Mapping[str, Any]) -> Faults:
    for name, node in config.get("available_node_types", {}).items():
        if (label := node.get("labels", {}).get(NODE_TYPE, name)) != name:
            why = "by this label searches avoid machines that the cloud does not have"
            yield (
                f"available_node_types.{name}.labels.{NODE_TYPE}",
                f"must be {name}, the type's name, got {label}: {why}",
            )


def _files(config: Mapping[str, Any]) -> Faults:
    for path, text in _texts(config):
        for name in dict.fromkeys(_FILL_IN.findall(text)):
            yield path, f"{name} must be replaced; the comment above it says by what"
    for remote, local in config.get("file_mounts", {}).items():
        if not remote.endswith(_TOKEN) and not _FILL_IN.search(local) and not Path(local).expanduser().exists():
            yield f"file_mounts.{remote}", f"no such file or directory: {local}, in {Path.cwd()}"


def _token(config: Mapping[str, Any]) -> Faults:
    mounts = config.get("file_mounts", {})
    local = next((local for remote, local in mounts.items() if remote.endswith(_TOKEN)), None)
    if local is None:
        why = "the nodes get no token: whoever can reach one of Ray's ports can run code on the node"
        yield "file_mounts", f"{why}; add ~/{_TOKEN}: ~/{_TOKEN}"
    elif not (path := Path(local).expanduser()).exists():
        make = "ray get-auth-token --generate && chmod 600 ~/.ray/auth_token"
        yield f"file_mounts.~/{_TOKEN}", f"no such file: {local}; {make}"
    elif stat.S_IMODE(path.stat().st_mode) & 0o077:
        yield f"file_mounts.~/{_TOKEN}", f"other users of this machine can read {local}; run chmod 600 {local}"
    if _environment(config).get("RAY_AUTH_MODE") != "token":
        why = "no command sets RAY_AUTH_MODE=token, without which Ray requires no token"
        yield "setup_commands", f"{why}; export it where ~/.bashrc sets PATH"


def _dashboard(config: Mapping[str, Any]) -> Faults:
    if "head_start_ray_commands" not in config and provider(config) != "local":
        why = "missing required field: by default Ray opens the dashboard, which can submit jobs, to every address"
        yield "head_start_ray_commands", f"{why}; write ray start --head ... without --dashboard-host"
    for path, command in _commands(config):
        for host in _DASHBOARD_HOST.findall(command):
            if host not in ("127.0.0.1", "localhost", "::1"):
                why = f"--dashboard-host={host} lets whoever can reach the port run jobs"
                yield path, f"{why}; remove it and use `ray dashboard`, which connects by ssh"


def _storage(config: Mapping[str, Any]) -> Faults:
    """Results must be where all nodes see them."""
    environment = _environment(config)
    place = environment.get("DRAY_STORAGE") or environment.get("DRAY_HOME")
    ways = "export DRAY_STORAGE=s3://BUCKET/PREFIX, or mount a file system on all nodes and export DRAY_HOME=/mnt/..."
    if place is None:
        yield "setup_commands", f"results need a place that all nodes see: {ways}"
        return
    scheme, _, path = place.rpartition("://")
    if scheme in ("", "file"):
        is_mounted = any("mount" in command and path.rstrip("/") in command for _, command in _commands(config))
        is_private = path.startswith(("~", "$HOME", "/tmp", "/home", "/root", "."))
        if is_private or (provider(config) in ("aws", "gcp") and not is_mounted):
            yield "setup_commands", f"{place} is on each node's own disk: {ways}"


def _commands(config: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [(path, text) for path, text in _texts(config) if "_commands" in path]


def _environment(config: Mapping[str, Any]) -> dict[str, str]:
    """Environment variables that commands and container options set."""
    texts = [*_commands(config), *_texts(config.get("docker", {}))]
    return dict(found for _, text in texts for found in _ASSIGNED.findall(text))


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
