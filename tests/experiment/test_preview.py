"""What `dray preview` shows, against numbers made by hand."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from dray.experiment.config import ExperimentConfig, load_config
from dray.experiment.preview import show_preview

EXAMPLES = Path(__file__).parents[2] / "examples" / "digits"


def shown(config: ExperimentConfig, trials_per_hour: float | None = None) -> tuple[list[list[str]], str]:
    """The table's rows, and the lines below it."""
    file = io.StringIO()
    show_preview(config, trials_per_hour=trials_per_hour, console=Console(file=file, width=120))
    lines = file.getvalue().splitlines()
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if line.startswith("│")]
    return rows, "\n".join(lines[[n for n, line in enumerate(lines) if line.startswith("└")][-1] + 1 :])


def test_adaptive_shows_each_bracket_with_its_rungs() -> None:
    # Two brackets: 4**2/3 and 4/2 are as 8 to 3; of 24 trials 17 and 6, and the one that is left to the first.
    rows, below = shown(load_config(EXAMPLES / "adaptive.yaml"), 6)
    assert rows == [
        ["1", "1", "1", "18", "14", "14"],
        ["", "2", "4", "4", "3", "12"],
        ["", "3", "16", "1", "1", "16"],
        ["2", "1", "4", "6", "5", "20"],
        ["", "2", "16", "1", "1", "16"],
    ]
    assert below == (
        "24 trials, 78 epochs in total: equivalent to 4.9 trials of 16 epochs, 20% of training all of them to the end\n"
        "about 49 min at 6 full-length trials per hour"
    )


def test_promotion_trains_as_much_as_stopping_is_expected_to() -> None:
    # 32, 8, 2.
    rows, below = shown(load_config(EXAMPLES / "promotion.yaml"))
    assert rows == [["1", "1", "1", "32", "24", "24"], ["", "2", "4", "8", "6", "24"], ["", "3", "16", "2", "2", "32"]]
    assert below.startswith("32 trials, 80 epochs in total: equivalent to 5.0 trials of 16 epochs")


def test_grid_has_its_points() -> None:
    rows, below = shown(load_config(EXAMPLES / "grid.yaml"), 0.1)
    assert rows == [["1", "1", "8", "8", "8", "64"]]
    assert below.endswith("about 3 days 8 h at 0.1 full-length trials per hour")


def test_search_of_a_program_without_a_length_has_trials_and_a_time() -> None:
    rows, below = shown(load_config(EXAMPLES / "script.yaml"), 2)
    assert rows == [["1", "1", "set by fit()", "3", "3", ""]]
    assert below == "3 trials\nabout 1 h 30 min at 2 full-length trials per hour"


@pytest.mark.parametrize(
    ("length", "unit"),
    [
        ({"max_length": {"batches": 4}}, "batches"),
        ({"max_length": {"records": 4}}, "records"),
        ({"max_time": 4, "time_metric": "seconds"}, "seconds"),
    ],
)
def test_lengths_are_in_the_searchs_unit(length: dict[str, Any], unit: str) -> None:
    searcher = {"name": "asha", "metric": "loss", "max_trials": 4, "num_rungs": 2, "divisor": 2, **length}
    made = {"min_validation_period": {"batches": 1}, "hyperparameters": {"global_batch_size": 1}, "searcher": searcher}
    rows, below = shown(load_config(made))
    assert rows == [["1", "1", "2", "4", "2", "4"], ["", "2", "4", "2", "2", "8"]]
    assert below.startswith(f"4 trials, 12 {unit} in total: equivalent to 3.0 trials of 4 {unit}")
