"""The Python of docs/serve.md, with a server whose experiments end at once."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from dray.serve import address
from tests.docs.pages import blocks
from tests.report.simulated import simulated
from tests.serve.conftest import TOKEN, Served
from tests.serve.test_api import CONFIG

MODEL = """
from dray.pytorch import PyTorchTrial


class DigitsTrial(PyTorchTrial):
    pass
"""


def test_the_python_of_serve_md_runs(
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
        [block] = blocks("python", page="serve.md")
        monkeypatch.setattr("dray.records.result.Result.best_trial", property(lambda self: BestTrial()))
        exec(compile(block.text.replace("http://127.0.0.1:8600", served.url), "serve.md", "exec"), {})
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
