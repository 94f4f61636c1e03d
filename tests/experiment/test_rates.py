"""Rates that are measured in an experiment whose times are known."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import yaml

from dray.config.load import load_config
from dray.errors import NoExperiment
from dray.experiment.preview import preview_search
from dray.experiment.rates import measured_rates
from dray.records.directory import ExperimentDirectory
from dray.records.result import Result
from dray.records.timeline import FILE
from tests.report.simulated import BEGAN, START_S, config_of, simulated

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


@pytest.mark.usefixtures("few_simulations")
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
