"""The API's description is that of the routes. `tests.serve.conftest.Served.api` checks all answers by it."""

from __future__ import annotations

import pytest
from jsonschema import Draft202012Validator, ValidationError

from dray.serve.site import OPENAPI
from tests.docs.pages import DOCS
from tests.serve.conftest import COMPONENTS, DOCUMENT, Reply, Served, check


def test_the_description_is_generated_from_the_routes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(DOCS))
    import openapi

    assert OPENAPI.read_text() == openapi.as_text(openapi.document()) + "\n", "run: python docs/generate.py"
    for schema in COMPONENTS["schemas"].values():
        Draft202012Validator.check_schema(schema)


def test_the_description_is_served(served: Served) -> None:
    assert served.api("GET", "/openapi.json").json == DOCUMENT


@pytest.mark.parametrize(
    "body", [b'{"checkpoints": 1}', b'{"checkpoints": 1, "bytes": "2"}', b'{"checkpoints": 1, "bytes": 2, "x": 3}']
)
def test_an_answer_that_is_not_as_described_fails_its_test(body: bytes) -> None:
    with pytest.raises(ValidationError):
        check("GET", "/experiments/digits-1/checkpoints", Reply(200, {"Content-Type": "application/json"}, body))
