"""What `dray preview` shows: by hand where nothing is left to chance, else expectations with a range."""

from __future__ import annotations

import io
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from dray.config.load import load_config
from dray.config.schema import ExperimentConfig
from dray.experiment.preview import show_preview

EXAMPLES = Path(__file__).parents[2] / "examples" / "digits"
SEARCHED = "searching hidden: 16 to 256, integer; lr: 0.0001 to 0.1, log\n"
"""The values of the space, not the exponents of the file."""


def shown(config: ExperimentConfig, trials_per_hour: float | None = None) -> tuple[list[list[str]], str]:
    """The table's rows, and the lines below it."""
    file = io.StringIO()
    show_preview(config, trials_per_hour=trials_per_hour, console=Console(file=file, width=120))
    lines = file.getvalue().splitlines()
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if line.startswith("│")]
    return rows, "\n".join(lines[[n for n, line in enumerate(lines) if line.startswith("└")][-1] + 1 :])


def added_up(rows: list[list[str]]) -> float:
    """The total of all rows, each of which is the number of trials that end there times its length."""
    for row, after in pairwise(rows):
        if after[0] == "":
            assert float(row[3]) - float(row[4]) == pytest.approx(float(after[3]), abs=0.11), (
                "what does not end goes on"
            )
    assert [float(row[5]) for row in rows] == pytest.approx([float(row[4]) * int(row[2]) for row in rows], abs=0.9)
    return sum(float(row[5]) for row in rows)


def test_adaptive_shows_each_bracket_with_its_rungs_and_a_range() -> None:
    # Two brackets: 4**2/3 and 4/2 are as 8 to 3; of 24 trials 17 and 6, and the one that is left to the first.
    rows, below = shown(load_config(EXAMPLES / "adaptive.yaml"), 6)
    assert [row[:3] for row in rows] == [
        ["1", "1", "1"],
        ["", "2", "4"],
        ["", "3", "16"],
        ["2", "1", "4"],
        ["", "2", "16"],
    ]
    assert (rows[0][3], rows[3][3]) == ("18", "6")
    found = re.match(
        SEARCHED + r"24 trials, expected total (\d+) epochs \((\d+) to (\d+) in 9 of 10 simulated searches\)\n", below
    )
    assert found is not None, below
    total, low, high = map(int, found.groups())
    assert total == pytest.approx(added_up(rows), abs=1)
    # More than by Determined's rule, by which 4 and 1 of 18 go on, and 1 of 6.
    assert 14 + 12 + 16 + 20 + 16 < low < total < high < 24 * 16
    minutes = [round(10 * length / 16) for length in (total, high)]
    times = [f"{each // 60} h {each % 60 // 10 * 10} min" for each in minutes]
    assert below.endswith(f"\nabout {times[0]} (58 min to {times[1]}) at 6 full-length trials per hour"), below


def test_a_population_trains_its_length_once() -> None:
    rows, below = shown(load_config(EXAMPLES / "pbt.yaml"), 6)
    assert rows == [["1", "1", "16", "8", "8", "128"]]
    assert "8 trials, total 128 epochs" in below
    assert "every 2 epochs, the worst 2 of 8 are replaced: up to about 14 more trials" in below


def test_grid_has_its_points() -> None:
    rows, below = shown(load_config(EXAMPLES / "grid.yaml"), 0.1)
    assert rows == [["1", "1", "8", "8", "8", "64"]]
    assert below.endswith("about 3 days 8 h at 0.1 full-length trials per hour")


def test_search_of_a_program_without_a_length_has_trials_and_a_time() -> None:
    rows, below = shown(load_config(EXAMPLES / "script.yaml"), 2)
    assert rows == [["1", "1", "set by fit()", "3", "3", ""]]
    assert below == f"{SEARCHED}3 trials\nabout 1 h 30 min at 2 full-length trials per hour"


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
    assert (rows[0][:4], rows[1][:3]) == (["1", "1", "2", "4"], ["", "2", "4"])
    total = added_up(rows)
    assert below.startswith(f"4 trials, expected total {total:.0f} {unit} (")
    assert f"\nequivalent to {total / 4:.1f} trials of 4 {unit}, " in below
