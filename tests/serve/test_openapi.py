"""The OpenAPI document has every route, and what the server answers is as it says."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from dray.code.archive import pack
from dray.serve.app import make_app
from dray.serve.auth import LOOPBACK
from dray.serve.control import API
from dray.serve.site import openapi
from dray.serve.tokens import Tokens
from tests.records.repeated import repeated
from tests.report.simulated import simulated
from tests.serve.conftest import TOKEN, Reply, Served
from tests.serve.fake import FakeControl
from tests.serve.test_api import CONFIG, model, submit

__all__ = ["model"]


def strict(schema: Any) -> Any:
    """The schema without room for fields that it does not name: they are to be documented."""
    if isinstance(schema, list):
        return [strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {name: strict(each) for name, each in schema.items()}
    if "properties" in found and found.get("type") == "object":
        found.setdefault("unevaluatedProperties", False)
    return found


DOCUMENT = openapi()


def documented() -> set[tuple[str, str]]:
    methods = ("get", "post", "patch", "delete", "put")
    return {(method.upper(), path) for path, item in DOCUMENT["paths"].items() for method in item if method in methods}


def schema_of(method: str, path: str, status: int) -> Any:
    response = DOCUMENT["paths"][path][method.lower()]["responses"][str(status)]
    if "$ref" in response:
        response = DOCUMENT["components"]["responses"][response["$ref"].rpartition("/")[2]]
    return response["content"]["application/json"]["schema"]


def check(reply: Reply, method: str, path: str, status: int = 200) -> Any:
    """That an answer is as the document says."""
    assert reply.status == status, reply.body
    schema = copy.deepcopy(schema_of(method, path, status))
    # Only at the place where it is used: an experiment in full has all fields of one in the list, and more.
    components = copy.deepcopy(DOCUMENT["components"])
    for name in ("Submitted", "Status", "Share", "Error", "ExperimentInFull", "TrialInFull"):
        components["schemas"][name] = strict(components["schemas"][name])
    Draft202012Validator({**strict(schema), "components": components}).validate(reply.json)
    return reply.json


def test_every_route_is_documented_and_nothing_else(tmp_path: Path) -> None:
    app = make_app(FakeControl(tmp_path), tmp_path, tokens=Tokens(tmp_path, TOKEN), hosts=LOOPBACK)
    routes = {
        (route.method, re.sub(r"\{(\w+):[^/]*\}", r"{\1}", route.resource.canonical.removeprefix(API)))
        for route in app.router.routes()
        if route.resource is not None and route.resource.canonical.startswith(API) and route.method != "HEAD"
    }
    assert routes == documented()


def test_all_references_lead_somewhere() -> None:
    def references(value: Any) -> set[str]:
        if isinstance(value, list):
            return set().union(*map(references, value))
        if not isinstance(value, dict):
            return set()
        return {value["$ref"]} if "$ref" in value else set().union(*map(references, value.values()))

    found = references(DOCUMENT)
    assert len(found) > 8
    for reference in found:
        place: Any = DOCUMENT
        for part in reference.removeprefix("#/").split("/"):
            place = place[part]
    unused = {f"#/components/schemas/{name}" for name in DOCUMENT["components"]["schemas"]} - found
    assert unused == set()
    for schema in DOCUMENT["components"]["schemas"].values():
        Draft202012Validator.check_schema(schema)


def test_the_document_is_served(served: Served) -> None:
    assert served.api("GET", "/openapi.json").json == DOCUMENT


def test_answers_are_as_documented(served: Served, model: Path) -> None:
    submitted = check(submit(served, CONFIG, pack(model)), "POST", "/experiments", 201)
    name, one = submitted["name"], "/experiments/{name}"
    check(submit(served, "searcher: {}", pack(model)), "POST", "/experiments", 400)
    check(served.api("GET", "/status"), "GET", "/status")
    check(served.api("GET", "/experiments"), "GET", "/experiments")
    check(served.api("GET", f"/experiments/{name}"), "GET", one)
    check(served.api("GET", "/experiments/none"), "GET", one, 404)
    check(served.api("PATCH", f"/experiments/{name}", {"tags": ["a"]}), "PATCH", one)
    check(served.api("PATCH", f"/experiments/{name}", {"tags": "a"}), "PATCH", one, 400)
    for verb in ("pause", "activate", "stop", "activate", "kill"):
        check(served.api("POST", f"/experiments/{name}/{verb}"), "POST", f"{one}/{verb}")
    served.control.put(name, "COMPLETED")
    check(served.api("POST", f"/experiments/{name}/kill"), "POST", f"{one}/kill", 409)
    check(served.api("POST", f"/experiments/{name}/extend", {"max_trials": 2}), "POST", f"{one}/extend")
    check(served.api("POST", f"/experiments/{name}/fork", {}), "POST", f"{one}/fork", 201)
    check(served.api("POST", f"/experiments/{name}/fork", {"config": {"a": 1}}), "POST", f"{one}/fork", 400)
    check(served.api("GET", "/queue"), "GET", "/queue")
    check(served.api("GET", "/queue?seconds=x"), "GET", "/queue", 400)
    check(served.api("GET", f"/queue/preview?name={name}&priority=1"), "GET", "/queue/preview")
    check(served.api("GET", f"/queue/preview?name={name}&priority=0"), "GET", "/queue/preview", 400)
    check(served.api("GET", "/queue/preview?name=none"), "GET", "/queue/preview", 404)
    check(served.api("DELETE", f"/experiments/{name}"), "DELETE", one, 409)


def test_answers_about_trials_are_as_documented(served: Served) -> None:
    directory = simulated(served.results / "digits-1", 12, failures=0.02)
    logs = directory.trial(0) / "logs"
    logs.mkdir(parents=True)
    (logs / "rank_0.log").write_text("one\ntwo\n")
    one = "/experiments/{name}"
    check(served.api("GET", "/experiments"), "GET", "/experiments")
    for what in (
        "",
        "/events",
        "/config",
        "/trials",
        "/curves",
        "/trials/0",
        "/trials/0/metrics",
        "/curves?show=bands&along=slot-time",
        "/trials/0/logs",
        "/trials/0/system",
        "/checkpoints",
    ):
        path = one + re.sub(r"/\d+", "/{trial}", what.partition("?")[0])
        check(served.api("GET", f"/experiments/digits-1{what}"), "GET", path)
    for what, path in (
        ("/logs", "/logs"),
        ("/logs?search=trial", "/logs"),
        ("/failures", "/failures"),
        ("/code", "/code"),
        ("/difference?a_trial=0&b_trial=1", "/difference"),
        ("/trials/0/logs?rank=0", "/trials/{trial}/logs"),
        ("/trials/0/logs?search=one", "/trials/{trial}/logs"),
    ):
        check(served.api("GET", f"/experiments/digits-1{what}"), "GET", one + path)
    directory.code.mkdir()
    (directory.code / "model_def.py").write_text("x = 1\n")
    check(served.api("GET", "/experiments/digits-1/code/model_def.py"), "GET", f"{one}/code/{{path}}")
    for query in ("facets=1&metric=training.loss", "ids=1"):
        check(served.api("GET", f"/experiments/digits-1/trials?{query}"), "GET", f"{one}/trials")
    for bad, path in (("/trials?limit=x", "/trials"), ("/curves?metric=x", "/curves"), ("/events?after=x", "/events")):
        check(served.api("GET", f"/experiments/digits-1{bad}"), "GET", one + path, 400)
    for name in ("again-1", "again-2"):
        repeated(served.results / name, (0.5, 0.1, 0.2), {(1, 1): 0.1, (2, 1): 0.2, (1, 2): 0.4, (2, 2): 0.3})
    check(served.api("GET", "/experiments/again-1"), "GET", one)
    check(served.api("GET", "/experiments/again-1/comparison?a=1&b=2"), "GET", f"{one}/comparison")
    check(served.api("GET", "/experiments/again-1/comparison?a=1&b=2&with=again-2"), "GET", f"{one}/comparison")
    check(served.api("GET", "/experiments/again-1/comparison?a=1&b=99"), "GET", f"{one}/comparison", 400)
    check(served.api("GET", "/experiments/digits-1/trials/99"), "GET", f"{one}/trials/{{trial}}", 404)
    variant = directory.variant("0" * 12)
    variant.mkdir(parents=True)
    (variant / "change.diff").write_text("a difference")
    check(served.api("GET", f"/experiments/digits-1/variants/{variant.name}"), "GET", f"{one}/variants/{{variant}}")


@pytest.mark.parametrize("kind", ["history", "slots"])
def test_figures_are_as_documented(served: Served, kind: str) -> None:
    simulated(served.results / "digits-1", 12)
    check(served.api("GET", f"/experiments/digits-1/figures/{kind}"), "GET", "/experiments/{name}/figures/{kind}")
