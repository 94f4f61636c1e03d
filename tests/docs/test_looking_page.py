"""docs/looking.md: its code runs, and its tables name what there is."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import optuna
import pytest
from plotly.graph_objects import Figure

from dray.observers.observer import replay_to
from dray.observers.optuna_study import OptunaStudy
from tests.report.simulated import simulated

PAGE = (Path(__file__).parents[2] / "docs" / "looking.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_code_for_optuna_shows_the_study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = simulated(tmp_path / "experiment", 30)
    replay_to(directory, lambda: OptunaStudy(directory.study, directory.config()))
    shown: list[Figure] = []
    monkeypatch.setattr(Figure, "show", lambda figure: shown.append(figure))
    [code] = blocks("python")
    names: dict[str, Any] = {}
    exec(code.replace("PATH", str(directory.path)).replace("digits-asha", "simulated"), names)
    assert isinstance(names["study"], optuna.Study)
    curves, importances = shown
    assert len(curves.data) == 30
    [bars] = importances.data
    assert set(bars.y) == {"lr", "hidden", "optimizer"}
    assert sum(bars.x) == pytest.approx(1)
