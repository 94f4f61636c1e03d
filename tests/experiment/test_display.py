"""What the table of the best trials shows."""

from __future__ import annotations

import io
from typing import Any

import pandas as pd
from rich.console import Console

from dray.experiment.display import best_trials


class FinishedSearch:
    """Two trials that differ in two hyperparameters, one of them a list."""

    def __init__(self) -> None:
        self.trials = pd.DataFrame(
            {
                "trial_id": [0, 1],
                "state": ["STOPPED", "COMPLETED"],
                "batches": [23, 368],
                "best_metric": [0.5, 0.25],
                "hparams.lr": [0.1, 0.1],
                "hparams.hidden": [16, 32],
                "hparams.layers": [[8, 8], [8, 16]],
                "hparams.always": [[1], [1]],
            }
        )
        self.metrics = pd.DataFrame(
            {"trial_id": [1], "batches": [368], "kind": ["validation"], "name": ["loss"], "value": [0.25]}
        )

    def best_batches(self) -> pd.Series[Any]:
        return pd.Series([23, 368], index=[0, 1])


def shown(sign: int) -> list[str]:
    console = Console(file=io.StringIO(), width=200)
    console.print(best_trials(FinishedSearch(), "loss", sign))  # type: ignore[arg-type]  # all that is looked at
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined]


def test_a_hyperparameter_that_is_a_list_is_shown_where_trials_differ_in_it() -> None:
    text = "\n".join(shown(1))
    assert "[8, 16]" in text
    assert "layers" in text
    assert "always" not in text
    assert "lr" not in text


def test_the_best_trial_comes_first_whichever_way_is_better() -> None:
    assert [line.split()[1] for line in shown(1) if "stopped" in line or "completed" in line] == ["1", "0"]
    assert [line.split()[1] for line in shown(-1) if "stopped" in line or "completed" in line] == ["0", "1"]
