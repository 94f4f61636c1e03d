"""In a notebook, the picture of a search stays in its cell; Tune has one of its own there, which clears the cell."""

from __future__ import annotations

import io
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import dray
from dray.display import display
from tests.ray.harness import TRIALS, recorded

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.usefixtures("ray_is_up")]


class Cell(types.ModuleType):
    """``IPython.display``, as far as it is used, and what is below the one cell."""

    HTML = str

    def __init__(self) -> None:
        super().__init__("IPython.display")
        self.outputs: dict[int, str] = {}
        self._number = 0

    def display(self, shown: Any, display_id: bool = False) -> Any:
        self._number += 1
        number = self._number
        self.outputs[number] = str(shown)

        def update(changed: Any) -> None:
            if number in self.outputs:
                self.outputs[number] = str(changed)

        return types.SimpleNamespace(update=update)

    def clear_output(self, wait: bool = False) -> None:
        self.outputs.clear()


@pytest.mark.long
def test_the_picture_stays_in_its_cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cell, ipython = Cell(), types.ModuleType("IPython")
    ipython.get_ipython = lambda: None  # type: ignore[attr-defined]
    in_notebook: dict[str, Any] = {"file": io.StringIO(), "force_jupyter": True, "width": 80}
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", cell)
    monkeypatch.setattr("ray.tune.progress_reporter.IS_NOTEBOOK", True)
    monkeypatch.setattr(display, "Console", lambda **given: Console(**in_notebook | given))
    config = recorded(tmp_path / "record", trials=2, batches=10)
    dray.Experiment(config, model_dir=TRIALS, path=tmp_path / "experiment").run()
    assert [shown for shown in cell.outputs.values() if "of 2 trials ended" in shown], cell.outputs
