"""Checks ``node_config`` of AWS against EC2's own model in botocore, through which Ray sends these fields."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from typing import Any

Faults = Iterator[tuple[str, str]]


def check(config: Mapping[str, Any]) -> Faults:
    """Unknown fields, wrong types and unknown values, such as an instance type that AWS does not have."""
    try:
        instance, permissions = shapes()
    except ImportError:
        yield "provider.type", "aws needs boto3 on this machine, for `ray up` too: pip install boto3"
        return
    rules = config["provider"].get("security_group", {}).get("IpPermissions", [])
    yield from _fits(rules, permissions, "provider.security_group.IpPermissions")
    for name, node in config.get("available_node_types", {}).items():
        # Ray itself picks one of SubnetIds for each machine.
        given = {field: value for field, value in node["node_config"].items() if field != "SubnetIds"}
        yield from _fits(given, instance, f"available_node_types.{name}.node_config")


@cache
def shapes() -> tuple[Any, Any]:
    """EC2's models of the parameters that start machines, and of those that open ports."""
    import botocore.session

    ec2 = botocore.session.Session().get_service_model("ec2")
    rules = ec2.operation_model("AuthorizeSecurityGroupIngress").input_shape.members["IpPermissions"]
    return ec2.operation_model("RunInstances").input_shape, rules


def _fits(value: Any, shape: Any, path: str) -> Faults:
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
            yield path, f"AWS has no {shape.name} {value!r}{_nearest(value, shape.enum) or few}"
        case "integer" | "long" if isinstance(value, bool) or not isinstance(value, int):
            yield path, f"must be an integer, got {value!r:.60}"
        case "boolean" if not isinstance(value, bool):
            yield path, f"must be true or false, got {value!r:.60}"


def unknown(name: str, known: Collection[str]) -> str:
    """The message for an unknown field."""
    return f"unknown field{_nearest(name, known) or '; known fields are ' + ', '.join(sorted(known))}"


def _nearest(name: str, known: Collection[str]) -> str:
    lower = {each.lower(): each for each in known}
    near = difflib.get_close_matches(name.lower(), lower, n=1, cutoff=0.7)
    return f"; did you mean {lower[near[0]]}?" if near else ""
