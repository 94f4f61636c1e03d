"""docs/looking.md: its code runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import optuna
import pytest
from plotly.graph_objects import Figure

from tests.docs.pages import blocks
from tests.report.simulated import simulated


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_optuna_code_shows_the_study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = simulated(tmp_path / "experiment", 30)
    shown: list[Figure] = []
    monkeypatch.setattr(Figure, "show", lambda figure: shown.append(figure))
    [code] = blocks("python", page="looking.md")
    names: dict[str, Any] = {}
    exec(code.text.replace("digits-asha", str(directory.path)), names)
    assert isinstance(names["study"], optuna.Study)
    curves, importances = shown
    assert len(curves.data) == 30
    [bars] = importances.data
    assert set(bars.y) == {"lr", "hidden", "optimizer"}
    assert sum(bars.x) == pytest.approx(1)
