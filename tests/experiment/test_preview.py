"""What `dray preview` shows: by hand where nothing is left to chance, else expectations with a range."""

from __future__ import annotations

import io
import re
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from dray.config.load import load_config
from dray.config.schema import ExperimentConfig
from dray.errors import NoExperiment
from dray.experiment.preview import SearchPreview, measured_rates, preview_search
from dray.records.directory import ExperimentDirectory
from dray.records.result import Result
from dray.records.timeline import FILE
from searchers.previews import Rates
from tests.report.simulated import BEGAN, START_S, config_of, simulated

pytestmark = pytest.mark.usefixtures("few_simulations")

EXAMPLES = Path(__file__).parents[2] / "examples" / "digits"
SEARCHED = "searching hidden: 16 to 256, integer; lr: 0.0001 to 0.1, log\n"
"""The values of the space, not the exponents of the file."""


def shown(config: ExperimentConfig | SearchPreview) -> tuple[list[list[str]], str]:
    """The table's rows, and the lines below it."""
    file, found = io.StringIO(), config if isinstance(config, SearchPreview) else preview_search(config)
    found.show(Console(file=file, width=120))
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
    rows, below = shown(load_config(EXAMPLES / "adaptive.yaml"))
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
    assert total > 14 + 12 + 16 + 20 + 16
    assert low < total < high < 24 * 16


@pytest.mark.parametrize("most", [100, None])
def test_a_space_of_few_points_has_as_many_trials(most: int | None) -> None:
    searcher = {"name": "auto", "metric": "loss", "max_length": {"epochs": 9}, "max_trials": most}
    space = {"layers": {"type": "int", "minval": 1, "maxval": 6}}
    given = {"entrypoint": "m:T", "searcher": searcher, "hyperparameters": space, "budget": {"time": "1h"}}
    rows, below = shown(load_config(given))
    assert float(rows[0][3]) == 6
    assert "\nthe space has 6 points, each of which is tried once\n" in below


def test_a_population_trains_its_length_once() -> None:
    rows, below = shown(preview_search(load_config(EXAMPLES / "pbt.yaml"), rates=Rates(mean=3.0)))
    assert rows == [["1", "1", "16", "8", "8", "128"]]
    assert "8 trials, total 128 epochs" in below
    assert "every 2 epochs, the worst 2 of 8 are replaced: up to about 14 more trials" in below


def test_auto_explains_what_it_does() -> None:
    config = load_config(EXAMPLES / "auto.yaml")
    rows, below = shown(config)
    assert [row[2] for row in rows] == ["1", "3", "9", "27"]
    assert rows[0][3] == "64"
    assert "64 trials, expected total" in below
    assert "pauses after 1, 3, 9 epochs; the best 33% so far continue" in below
    assert re.search("about (5|6).% of the trials at a length continue in the end, since later trials", below)
    assert "random until there are 12 results, one for each rung that a trial reaches; then a model of all" in below
    prior = {"lr": {"around": 0.01, "within": 3}}
    fewer = config.searcher.model_copy(update={"prior": prior, "max_trials": 16})
    _, believed = shown(config.model_copy(update={"searcher": fewer}))
    assert "hyperparameters are random or from the prior until there are 12 results" in believed


def test_one_trial_is_described_in_the_singular() -> None:
    config = load_config(EXAMPLES / "grid.yaml", ["searcher.name=random", "searcher.max_trials=1"])
    assert "1 trial, total 8 epochs" in shown(config)[1].splitlines()


def test_grid_has_its_points() -> None:
    rows, below = shown(load_config(EXAMPLES / "grid.yaml"))
    assert rows == [["1", "1", "8", "8", "8", "64"]]
    assert below.endswith(
        "8 trials, total 64 epochs\nequivalent to 8.0 trials of 8 epochs, 100% of training all of them to the end"
    )


def test_search_of_a_program_without_a_length_has_trials_and_a_time() -> None:
    rows, below = shown(preview_search(load_config(EXAMPLES / "script.yaml"), rates=Rates(mean=1800), price=2))
    assert rows == [["1", "1", "set by fit()", "3", "3", ""]]
    trials, hours, slots, rate = below.removeprefix(SEARCHED).split("\n")
    assert (trials, rate) == ("3 trials", "at 1,800 s per trial")
    assert re.fullmatch(
        r"about \d+ min \(\d+ min to [\d hmin]+ in 9 of 10 simulated searches\) with 3 trials at a time", hours
    )
    assert re.fullmatch(r"about [\d.]+ slot-hours \([\d.]+ to [\d.]+\), \$[\d.]+ \(\$[\d.]+ to \$[\d.]+\)", slots)


EQUAL = Rates(mean=60, measured=10_000, start=600, boot=1200)
"""Rates without a spread: so many equal trials leave no doubt."""


@pytest.mark.parametrize(
    ("resources", "trials", "slots"),
    [
        ({}, 8, 1),
        ({"slots_per_trial": 4}, 8, 4),
        ({"slots_per_trial": 4, "max_slots": 9}, 2, 4),
        ({"slots_per_trial": 0.25}, 8, 0.25),
        ({"slots_per_trial": 0.25, "max_slots": 1}, 4, 0.25),
    ],
)
def test_hours_are_those_of_the_slots_and_of_as_many_trials_as_they_allow(
    resources: dict[str, float], trials: int, slots: float
) -> None:
    """A grid of 8 trials with 8 epochs: each group starts in 20 minutes, each trial in 10, and trains for 8."""
    config = load_config(EXAMPLES / "grid.yaml", [f"resources.{name}={value}" for name, value in resources.items()])
    found = preview_search(config, rates=EQUAL, price=3.0)
    assert found.workers == trials
    assert found.hours is not None
    assert found.slot_hours is not None
    rounds = 8 / trials
    assert found.hours == pytest.approx([(20 + rounds * 18) / 60] * 3, rel=0.02)
    assert found.slot_hours == pytest.approx([slots * (trials * 20 + 8 * 18) / 60] * 3, rel=0.02)
    assert found.usd == pytest.approx([3 * each for each in found.slot_hours])
    given = found.as_dict()
    assert given["likely_hours"] == found.hours[1:]
    assert given["likely_slot_hours"] == found.slot_hours[1:]


def test_a_trial_with_a_range_of_slots_has_the_most() -> None:
    one = ["searcher.max_concurrent_trials=1", "resources.slots_per_trial={min: 1, max: 4}", "resources.max_slots=3"]
    found = preview_search(load_config(EXAMPLES / "grid.yaml", one), rates=EQUAL)
    assert found.hours is not None
    assert found.slot_hours == pytest.approx([3 * each for each in found.hours])


def without_trials(name: str, searcher: dict[str, Any], **fields: Any) -> ExperimentConfig:
    """An example's config without `max_trials`."""
    config = yaml.safe_load((EXAMPLES / f"{name}.yaml").read_text())
    del config["searcher"]["max_trials"]
    return load_config({**config, "searcher": {**config["searcher"], **searcher}, **fields})


@pytest.mark.parametrize(
    ("budget", "hours"),
    [({"time": "2h", "usd": 1000}, 2), ({"slot_hours": 12}, 3), ({"usd": 12, "time": "9h"}, 1.5)],
)
def test_a_budget_decides_how_many_trials_a_search_has(budget: dict[str, Any], hours: float) -> None:
    """Four workers at $2 per slot-hour have trials of 8 minutes, one after another."""
    four = {"max_concurrent_trials": 4, "max_length": {"epochs": 8}}
    found = preview_search(
        without_trials("random", four, budget=budget, prices={"A100": 2.0, "L4": 0.5}), rates=Rates(mean=60)
    )
    trials = found.as_dict()["trials"]
    assert trials == pytest.approx(4 * hours * 60 / 8, rel=0.1)
    assert found.hours == pytest.approx([hours] * 3)
    low, high = found.as_dict()["likely_trials"]
    _, below = shown(found)
    assert below.startswith(f"{SEARCHED}expected {trials:.0f} trials ({low} to {high} in 9 of 10 simulated searches), ")
    assert f"\nabout {4 * hours:g} slot-hours, ${8 * hours:g}\n" in below.replace(".00", "")


def test_without_times_a_budget_decides_an_unknown_number_of_trials() -> None:
    found = preview_search(without_trials("asha", {}, budget={"time": "2h"}))
    rows, below = shown(found)
    assert [row[2:] for row in rows] == [["1", "", "", ""], ["4", "", "", ""], ["16", "", "", ""]]
    assert below == (
        f"{SEARCHED}the search creates trials until its budget, target or patience ends it\n"
        "to estimate their number, the time that training takes is needed: see dray preview --help"
    )
    assert (found.as_dict()["trials"], found.as_dict()["total"]) == (None, None)


def test_the_number_of_trials_until_a_target_is_unknown() -> None:
    found = preview_search(without_trials("asha", {}, until={"validation_loss": 0.1}), rates=Rates(mean=60))
    assert shown(found)[1] == f"{SEARCHED}the search creates trials until its budget, target or patience ends it"


def test_a_budget_that_ends_some_searches_early_is_named() -> None:
    """A search with stragglers uses fewer slot-hours than its duration times its slots."""
    few, rates = "searcher.max_trials=16", Rates(mean=60)
    free = preview_search(load_config(EXAMPLES / "asha.yaml", [few]), rates=rates)
    assert free.slot_hours is not None
    ample, scarce = (
        preview_search(
            load_config(EXAMPLES / "asha.yaml", [few, f"budget.slot_hours={factor * free.slot_hours.median}"]),
            rates=rates,
        )
        for factor in (9, 1)
    )
    assert (ample.hours, ample.seen.cut) == (free.hours, 0)
    assert 0.4 < scarce.seen.cut < 0.6
    assert scarce.slot_hours is not None
    assert scarce.slot_hours.high == pytest.approx(free.slot_hours.median, rel=0.02)
    assert shown(scarce)[1].endswith(f"\nthe budget ends {scarce.seen.cut:.0%} of the simulated searches early")


@pytest.mark.parametrize(
    ("resources", "usd"),
    [
        ({}, 3.0),
        ({"slot": "cpu"}, 0.05),
        ({"slot_type": ["L4", "T4"]}, 1.0),
        ({"slot_type": ["T4"]}, 0.5),
        ({"slot_type": ["H100"]}, 3.0),
    ],
)
def test_slots_have_the_highest_price_of_their_possible_types(resources: dict[str, Any], usd: float) -> None:
    config = without_trials(
        "random",
        {},
        budget={"slot_hours": 10},
        prices={"A100": 3.0, "L4": 1.0, "T4-spot": 0.5, "CPU": 0.05},
        resources=resources,
    )
    found = preview_search(config, rates=Rates(mean=60))
    assert found.usd == pytest.approx([10 * usd] * 3)
    assert preview_search(config, rates=Rates(mean=60), price=7.0).usd == pytest.approx([70] * 3)


def test_a_search_too_large_to_simulate_has_a_lower_bound() -> None:
    config = load_config(EXAMPLES / "random.yaml", ["searcher.max_trials=16_000", "searcher.max_length={epochs: 9}"])
    _, below = shown(preview_search(config, rates=Rates(mean=60)))
    assert below.endswith("\nat least 6 days 6 h with 16 trials at a time; there are too many trials to simulate")


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
    full = re.search(rf"\nequivalent to ([\d.]+) trials of 4 {unit}, ", below)
    assert full is not None
    assert float(full[1]) == pytest.approx(total / 4, abs=0.1)


ASHA = Path(__file__).parents[2] / "examples" / "digits" / "asha.yaml"


@pytest.fixture(scope="module")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> ExperimentDirectory:
    """A search on four groups whose epochs take a second each, and trials half a second to start."""
    directory = simulated(tmp_path_factory.mktemp("results") / "earlier-1", 32)
    file = directory.metrics / FILE
    # The groups began to start three seconds before.
    file.write_text(file.read_text().replace(f'"starts", "time": {BEGAN}', f'"starts", "time": {BEGAN - 3}'))
    return directory


def test_rates_are_those_of_the_trials(earlier: ExperimentDirectory) -> None:
    found = measured_rates(earlier.path, config_of(8).searcher)
    assert found.measured == 32
    assert (found.mean, found.start, found.boot) == pytest.approx((1.0, START_S, 3.0))
    assert found.spread == pytest.approx(0, abs=1e-6)


def test_workers_that_are_not_reused_start_with_each_trial(tmp_path: Path, earlier: ExperimentDirectory) -> None:
    shutil.copytree(earlier.path, tmp_path / "fresh-1")
    fresh = ExperimentDirectory.open(tmp_path / "fresh-1")
    config = yaml.safe_load(fresh.config_file.read_text())
    fresh.config_file.write_text(yaml.safe_dump({**config, "resources": {"reuse_workers": False}}))
    found = measured_rates(fresh.path, config_of(8).searcher)
    assert (found.start, found.boot) == pytest.approx((START_S + 3, 0))


def test_a_preview_by_an_experiment_holds_its_own_time(earlier: ExperimentDirectory) -> None:
    phases = Result(earlier.path).timeline
    wall_s = phases["end"].max() - phases["start"].min()
    used = phases[phases["phase"] != "idle"]
    slot_s = ((used["end"] - used["start"]) * used["slots"]).sum()
    given = config_of(32).to_dict()
    config = load_config({**given, "resources": {**given["resources"], "max_slots": 4}})
    found = preview_search(config, rates=measured_rates(earlier.path, config.searcher))
    assert found.hours is not None
    assert found.slot_hours is not None
    assert found.hours.low < wall_s / 3600 < found.hours.high < 2.5 * found.hours.low
    assert found.slot_hours.low < slot_s / 3600 < found.slot_hours.high < 2.5 * found.slot_hours.low


def test_lengths_in_another_unit_are_an_error(earlier: ExperimentDirectory) -> None:
    in_batches = load_config(ASHA, ["searcher.max_length={batches: 64}"]).searcher
    with pytest.raises(NoExperiment, match=r"length in batches, but earlier-1 has epochs; give another one"):
        measured_rates(earlier.path, in_batches)


def test_an_experiment_without_results_is_an_error(tmp_path: Path) -> None:
    nothing = ExperimentDirectory.create(tmp_path / "new-1", config_of(8), None)
    nothing.journal.touch()
    with pytest.raises(NoExperiment, match=r"trials that have trained; new-1 has none"):
        measured_rates(nothing.path, config_of(8).searcher)
