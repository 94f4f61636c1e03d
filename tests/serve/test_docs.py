"""The Python of docs/server-api.md, with a server whose experiments end at once; the API's description is that of the
routes, and `tests.serve.conftest.Served.api` checks all answers by it."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator, ValidationError

from dray.serve import address
from dray.serve.site import OPENAPI
from tests.docs.pages import DOCS, blocks
from tests.report.simulated import simulated
from tests.serve.conftest import COMPONENTS, DOCUMENT, TOKEN, Reply, Served, check
from tests.serve.test_api import CONFIG

MODEL = """
from dray.pytorch import PyTorchTrial


class DigitsTrial(PyTorchTrial):
    pass
"""


def test_the_python_of_the_page_runs(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "digits.yaml").write_text(CONFIG)
    (tmp_path / "model_def.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    address.write(served.results, served.url, TOKEN)
    over = threading.Event()

    def train() -> None:
        while not over.wait(0.1):
            for each in served.control.experiments():
                if each.state == "QUEUED":
                    simulated(served.results / each.name, 2)
                    served.control.put(each.name, "COMPLETED")

    driver = threading.Thread(target=train)
    driver.start()
    try:
        [block] = blocks("python", page="server-api.md")
        monkeypatch.setattr("dray.records.result.Result.best_trial", property(lambda self: BestTrial()))
        exec(compile(block.text.replace("http://127.0.0.1:8600", served.url), "server-api.md", "exec"), {})
    finally:
        over.set()
        driver.join()
    out = capsys.readouterr().out
    assert "digits-1 COMPLETED 0." in out
    assert out.count("search done (completed)") == 2
    again = served.control.experiments()[-1]
    assert (again.share.priority, again.tags) == (10, ("baseline",))


class BestTrial:
    """Stands in for the best trial of a simulated experiment, which has no checkpoints."""

    metric = 0.1


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
