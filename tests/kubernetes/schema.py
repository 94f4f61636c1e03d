"""A validator of Kubernetes manifests, also of KubeRay's objects: unknown fields are faults, as for `kubectl apply`.

KubeRay's own fields are in kuberay.yaml. kubernetes.json.gz has the types of Kubernetes 1.35: the strict definitions in
the package kubernetes-validate 1.37.0 (Apache License 2.0), without the descriptions.
"""

from __future__ import annotations

import gzip
import json
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import yaml

HERE = Path(__file__).parent
KUBERNETES = HERE / "kubernetes.json.gz"


def faults(manifest: dict[str, Any]) -> list[str]:
    """What is wrong with an object, each with the path of its field."""
    found = _validator(manifest["kind"]).iter_errors(manifest)
    return [f"{'.'.join(map(str, each.absolute_path))}: {each.message}" for each in found]


@cache
def _validator(kind: str) -> jsonschema.Draft202012Validator:
    known = _definitions()
    return jsonschema.Draft202012Validator({**_schema(kind if kind in known else f"k8s.{kind}"), "$defs": known})


def _definitions() -> dict[str, Any]:
    return {
        **json.loads(gzip.decompress(KUBERNETES.read_bytes())),
        **{
            name: {
                "type": "object",
                "properties": {field: _schema(kind) for field, kind in about["fields"].items()},
                "required": about.get("required", []),
                "additionalProperties": False,
            }
            for name, about in yaml.safe_load((HERE / "kuberay.yaml").read_text()).items()
        },
    }


def _schema(kind: str | dict[str, Any]) -> dict[str, Any]:
    """The schema of a type as kuberay.yaml has it."""
    match kind:
        case "string" | "integer" | "number" | "boolean":
            return {"type": kind}
        case str():
            return {"$ref": f"#/$defs/{kind}"}
        case {"map": of}:
            return {"type": "object", "additionalProperties": _schema(of)}
        case {"list": of, **others}:
            return {"type": "array", "items": _schema(of), **others}
        case _:
            return kind
