"""Writes the API's description, OpenAPI 3.1, from the server's routes: each handler says what it takes and answers by
its types. The texts are those types' docstrings and comments, and the first lines of the handlers' docstrings."""

from __future__ import annotations

import dataclasses
import inspect
import io
import json
import re
import tempfile
import tokenize
import types
import typing
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import typing_extensions
from aiohttp import web
from pydantic import BaseModel

from dray.serve.answers import Encoded
from dray.serve.app import make_app
from dray.serve.auth import LOOPBACK
from dray.serve.control import API, KEY, Browsing
from dray.serve.figures import KINDS
from dray.serve.given import NewTrial
from dray.serve.tokens import Tokens
from dray.text import one_line

INTRODUCTION = """\
The queue of a dray server and the experiments in its results directory. Times are Unix times in seconds. Fields are
only ever added. Reading needs a token with any scope. Submitting and forking need the scope submit, and whatever
changes an experiment needs submit if the token has submitted it, else operate; otherwise the answer is 403. An
experiment's secrets are in no answer, and only forks by the token that has submitted it, or with the scope operate, get
them. An experiment for which a token's quota has no room is refused with 409. A number in an experiment's data that is
not finite is the text nan, inf or -inf."""
KEY_TEXT = """\
Any text. A request that is sent again with its key, because its answer was lost, is carried out once, also if the
server was killed meanwhile, and has the same answer. With another body it is refused with 422."""
COOKIE = "From /login?token=TOKEN. All methods but GET also need the header X-Dray: 1."
CODE = {"type": "string", "format": "binary", "description": "the code: .tar.gz, at most 96 MiB unpacked"}
CONFIG = {"type": "string", "description": "the experiment file: YAML, at most 1 MiB"}
TRIAL = {"type": "string", "description": "the JSON of the body, without patch"}
IN_PATHS: dict[str, dict[str, Any]] = {
    "name": {"type": "string", "description": "the name of the experiment's directory"},
    "trial": {"type": "integer", "minimum": 0},
    "POST trial": {"type": ["integer", "string"], "minimum": 0, "pattern": "^best$"},
    "variant": {"type": "string", "description": "the code of a trial"},
    "path": {"type": "string", "description": "the path of a file in the code, with /"},
    "kind": {"type": "string", "enum": list(KINDS)},
}
PLAIN = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null"}
ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {"type": "string", "description": "one line"},
        "faults": {
            "type": "array",
            "description": "the faults of a config: pairs of a field and a message",
            "items": {"type": "array", "items": {"type": "string"}, "minItems": 2, "maxItems": 2},
        },
    },
}


def document() -> dict[str, Any]:
    """The OpenAPI document."""
    with tempfile.TemporaryDirectory() as scratch:
        results = Path(scratch)
        app = make_app(Browsing(results), results, tokens=Tokens(results, "token"), hosts=LOOPBACK)
    schemas, paths = Schemas(), dict[str, dict[str, Any]]()
    for route in app.router.routes():
        if route.resource is not None and route.resource.canonical.startswith(API) and route.method != "HEAD":
            path = route.resource.canonical.removeprefix(API)
            operation = _operation(route.method, path, inspect.unwrap(route.handler), schemas)
            paths.setdefault(re.sub(r"\{(\w+):[^/]*\}", r"{\1}", path), {})[route.method.lower()] = operation
    cookie = {"type": "apiKey", "in": "cookie", "name": "dray-PORT", "description": COOKIE}
    error = {"description": "The error", "content": _json({"$ref": "#/components/schemas/Error"})}
    return {
        "openapi": "3.1.0",
        "info": {"title": "dray serve", "version": "1", "description": one_line(INTRODUCTION)},
        "servers": [{"url": "../v1"}],
        "security": [{"token": []}, {"cookie": []}],
        "paths": {path: paths[path] for path in sorted(paths)},
        "components": {
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}, "cookie": cookie},
            "responses": {"Error": error},
            "schemas": {"Error": ERROR, **dict(sorted(schemas.found.items()))},
        },
    }


def as_text(found: Any, depth: int = 2) -> str:
    """The document as JSON, with a path or a schema on each line."""
    if not depth or not isinstance(found, dict):
        return json.dumps(found)
    lines = [f"{json.dumps(name)}: {as_text(each, depth - (name != 'components'))}" for name, each in found.items()]
    return "{\n" + ",\n".join(lines) + "\n}"


def _json(schema: Any) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


def _operation(method: str, path: str, handler: Any, schemas: Schemas) -> dict[str, Any]:
    takes = typing.get_type_hints(handler, include_extras=True)
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": IN_PATHS.get(f"{method} {name}", IN_PATHS[name])}
        for name in re.findall(r"\{(\w+)\}", path)
    ]
    if query := takes.get("query"):
        schema = _of_model(query)
        parameters += [
            {"name": name, "in": "query", "required": name in schema.get("required", ()), "schema": each}
            for name, each in schema["properties"].items()
        ]
    if method == "POST":
        limits = {"type": "string", "minLength": 1, "maxLength": 200}
        parameters.append({"name": KEY, "in": "header", "schema": limits, "description": one_line(KEY_TEXT)})
    found: dict[str, Any] = {"summary": inspect.getdoc(handler), "parameters": parameters}
    if handler.__name__ in ("submit", "add_trial"):
        fields = {"config": CONFIG, "code": CODE} if handler.__name__ == "submit" else {"trial": TRIAL, "code": CODE}
        form = {"type": "object", "required": list(fields), "properties": fields}
        content = {"multipart/form-data": {"schema": form}}
        found["requestBody"] = {"content": content if "config" in fields else _json(_of_model(NewTrial)) | content}
    elif body := takes.get("body"):
        found["requestBody"] = {"content": _json(_of_model(body))}
    status = "201" if handler.__name__ in ("submit", "fork") else "204" if method == "DELETE" else "200"
    answer = {} if status == "204" else {"content": _json(schemas.of(takes["return"]))}
    responses = {status: {"description": "The answer", **answer}, "default": {"$ref": "#/components/responses/Error"}}
    return {**found, "responses": responses}


def _of_model(model: type[BaseModel]) -> dict[str, Any]:
    """The schema of a query or a body, with its comments as descriptions."""
    schema, comments = model.model_json_schema(), described(model)
    for name, field in model.model_fields.items():
        form = schema["properties"][field.alias or name]
        form.pop("title", None)
        if name in comments:
            form["description"] = comments[name]
    return {key: each for key, each in schema.items() if key not in ("title", "description")}


class Schemas:
    """The schemas of types; those of classes by name in `found`."""

    def __init__(self) -> None:
        self.found: dict[str, Any] = {}

    def of(self, kind: Any) -> dict[str, Any]:
        """The schema of a type, or a reference to it."""
        origin, parts = typing.get_origin(kind), typing.get_args(kind)
        if kind in PLAIN:
            return {"type": PLAIN[kind]}
        if kind is Any or kind is web.StreamResponse:
            return {}
        if origin is Encoded or origin in (typing_extensions.NotRequired, typing_extensions.Required):
            return self.of(parts[0])
        if origin is typing.Literal:
            return {"enum": list(parts)}
        if origin in (typing.Union, types.UnionType):
            found = [self.of(each) for each in parts]
            if all(each.keys() == {"type"} for each in found):
                return {"type": [each["type"] for each in found]}
            return {"anyOf": found}
        if origin is tuple and parts[-1] is not ...:
            items = [self.of(each) for each in parts]
            return {"type": "array", "prefixItems": items, "minItems": len(items), "maxItems": len(items)}
        if origin in (list, tuple, Sequence):
            return {"type": "array", "items": self.of(parts[0])}
        if origin in (dict, Mapping):
            return {"type": "object", "additionalProperties": self.of(parts[1])}
        if kind.__name__ not in self.found:
            self.found[kind.__name__] = {}  # it may be in one of its own fields
            self.found[kind.__name__] = self._of_class(kind)
        return {"$ref": f"#/components/schemas/{kind.__name__}"}

    def _of_class(self, kind: type[Any]) -> dict[str, Any]:
        hints, comments = typing.get_type_hints(kind, include_extras=True), described(kind)
        if dataclasses.is_dataclass(kind):
            fields = {each.name: hints[each.name] for each in dataclasses.fields(kind)}
            also = getattr(kind, "ALSO", ())
            fields |= {name: typing.get_type_hints(getattr(kind, name).fget)["return"] for name in also}
            required = set(fields)
        else:
            optional = {
                name for name, each in hints.items() if typing.get_origin(each) is typing_extensions.NotRequired
            }
            fields, required = hints, kind.__required_keys__ - optional
        properties = {}
        for name, each in fields.items():
            text = {"description": comments[name]} if name in comments else {}
            properties[name] = {**self.of(each), **text}
        found = {"type": "object", "required": [name for name in fields if name in required], "properties": properties}
        text = _text(str(kind.__doc__).partition("\n\n")[0])
        return {**found, **({"description": text} if kind.__doc__ and kind.__doc__ != dict.__doc__ else {})}


def _text(text: str) -> str:
    """A text of the source for readers of JSON."""
    return re.sub(r"\bNone\b", "null", one_line(text).replace("`", "")).removesuffix(".")


@cache
def described(kind: type[Any]) -> dict[str, str]:
    """What is said of a class's fields: in its docstring, below "Attributes:", or in comments beside or above them."""
    found: dict[str, str] = {}
    for each in reversed(typing_extensions.get_original_bases(kind)):
        if getattr(each, "__module__", "").split(".")[0] in ("dray", "searchers"):
            found |= described(each)
    return found | _in_docstring(kind) | _in_comments(kind)


def _in_docstring(kind: type[Any]) -> dict[str, str]:
    text = inspect.cleandoc(kind.__doc__ or "").partition("Attributes:\n")[2]
    found = {}
    for entry in re.split(r"\n {4}(?=\S)", "\n" + text)[1:]:
        names, _, what = entry.partition(": ")
        found |= dict.fromkeys(re.findall(r"\w+", names), _text(what))
    return found


def _in_comments(kind: type[Any]) -> dict[str, str]:
    found, above = {}, list[str]()
    try:
        source = inspect.getsource(kind)
    except (OSError, TypeError):
        return {}
    for token in tokenize.generate_tokens(io.StringIO(inspect.cleandoc(source)).readline):
        if token.type == tokenize.COMMENT:
            text, code = token.string.removeprefix("# "), token.line[: token.start[1]].strip()
            if not code:
                above.append(text)
            elif name := re.match(r'"?(\w+)"?: ', code):
                found[name[1]] = _text(text)
        elif token.type == tokenize.NAME and above and (name := re.match(r'\s*"?(\w+)"?: ', token.line)):
            found[name[1]] = _text(" ".join(above))
            above = []
    return found
