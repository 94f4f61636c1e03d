"""Two trials that are run again, bit by bit: the first batch at which they part, and what parts first."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from dray.config.load import load_config
from dray.config.search import build_search
from dray.errors import ConfigError, ExperimentError
from dray.exact.parting import Parting, find_parting
from dray.exact.replay import Replay
from dray.experiment.local import run_local
from dray.records.difference import Side
from dray.records.directory import ExperimentDirectory
from dray.records.metrics import MetricsLog
from dray.records.reader import ExperimentReader
from searchers.answers import carry_out
from searchers.events import Requested, Source, Started
from searchers.journal import Journal
from tests.experiment.test_local import TRIAL
from tests.model_code import imports_undone

BATCHES = 8
LR = 0.125  # in powers of two, so that the expected numbers are exact
CONFIG: dict[str, Any] = {
    "entrypoint": "my_weight:OneWeight",
    "hyperparameters": {"global_batch_size": 2, "lr": LR},
    "searcher": {"name": "grid", "metric": "error", "max_length": {"batches": BATCHES}},
    "reproducibility": {"experiment_seed": 7},
}
BACKWARD = "        self.context.backward(loss)\n"


@pytest.fixture(autouse=True)
def imports() -> Iterator[None]:
    with imports_undone():
        yield


def experiment(path: Path, *changes: tuple[str, str], fork: Requested | None = None) -> ExperimentDirectory:
    """An experiment whose trials have trained, with one weight that is drawn to 1; and the fork of trial 0, if any.

    Args:
        changes: replacements in the model's code.
    """
    text = TRIAL
    for old, new in changes:
        assert text.count(old) == 1
        text = text.replace(old, new)
    code = path.with_name(f"{path.name}-code")
    code.mkdir()
    (code / "my_weight.py").write_text(text)
    config = load_config(CONFIG)
    directory = ExperimentDirectory.create(path, config, code)
    metrics = MetricsLog(directory.metrics)
    with Journal(directory.journal) as journal:
        search = build_search(config, lambda record: journal.append({**record, "time": time.time()}))
        search.start()
        search.on(Started(trial=0))
        if fork is not None:
            carry_out(search, fork)
            search.on(Started(trial=1))
        for trial in search.trials:
            row = {"batches": BATCHES, "epochs": 2.0, "kind": "training", "name": "loss", "value": 0.0, "time": 0.0}
            metrics.append(trial, [row])
    metrics.close()
    return directory


def side(directory: ExperimentDirectory, trial: int = 0) -> Side:
    reader = ExperimentReader(directory)
    reader.refresh()
    reader.close()
    return Side(reader, reader.trials[trial])


def parting(a: Side, b: Side, batches: int | None = None) -> Parting:
    return find_parting(a, b, batches, perform=Replay.perform)


@pytest.fixture
def first(tmp_path: Path) -> Side:
    return side(experiment(tmp_path / "first"))


def test_equal_trials_are_the_same_in_all_batches(first: Side, tmp_path: Path) -> None:
    again = side(experiment(tmp_path / "again", ("zero_()", "zero_().add_(0.0)")))
    found = parting(first, again)
    assert (found.begin, found.batches, found.at, found.stages) == (0, BATCHES, None, {})
    assert parting(first, again, 3).batches == 3


def test_a_change_of_gradients_is_found_at_its_batch_with_its_size(first: Side, tmp_path: Path) -> None:
    """The gradient is -2 (1 - w), and 1 - w is (1 - 2 lr) ** 5 after five batches; half of it is added."""
    change = (BACKWARD, "        self.context.backward(loss * (1.5 if batch_idx == 5 else 1))\n")
    found = parting(first, side(experiment(tmp_path / "second", change)))
    assert (found.at, found.batches) == (5, 6)
    assert list(found.stages) == ["gradients", "parameters"]  # SGD without momentum has no state
    assert found.stages["gradients"] == ["weight"]
    assert found.differences == {"weight": (1 - 2 * LR) ** 5}


def test_a_change_of_the_loss_is_first_seen_in_the_metrics(first: Side, tmp_path: Path) -> None:
    change = (
        "        loss = self.loss(batch)\n        self",
        "        loss = self.loss(batch) + (batch_idx == 2)\n        self",
    )
    found = parting(first, side(experiment(tmp_path / "second", change)))
    assert (found.at, list(found.stages), found.differences) == (2, ["metrics"], {"loss": 1.0})


def test_other_data_are_seen_in_the_inputs(first: Side, tmp_path: Path) -> None:
    change = ("ones = torch.ones(8, 1)", "ones = torch.ones(8, 1)\n        ones[7] = 3.0")
    found = parting(first, side(experiment(tmp_path / "second", change)))
    assert (found.at, next(iter(found.stages))) == (3, "inputs")
    assert found.differences == {"0": 2.0, "1": 2.0}


def test_random_numbers_that_one_draws_more_are_seen(first: Side, tmp_path: Path) -> None:
    change = (BACKWARD, f"        if batch_idx == 3:\n            torch.rand(1)\n{BACKWARD}")
    found = parting(first, side(experiment(tmp_path / "second", change)))
    assert (found.at, found.stages) == (4, {"random numbers": ["torch"]})


def test_settings_of_the_optimizer_are_shown(first: Side, tmp_path: Path) -> None:
    change = ('lr=context.get_hparam("lr")', 'lr=context.get_hparam("lr") / 2')
    found = parting(first, side(experiment(tmp_path / "second", change)))
    assert (found.at, list(found.stages)) == (0, ["optimizer settings", "parameters"])
    assert found.texts == {"optimizer 0.0.lr": ("0.125", "0.0625")}


def forked(tmp_path: Path, **hparams: float) -> tuple[Side, Side]:
    """A trial, and its fork at batch 4."""
    source = Source(trial=0, step=4, batches=4)
    directory = experiment(tmp_path / "first", fork=Requested(id="1", source=source, hparams=hparams))
    trained = run_local(
        load_config({**CONFIG, "min_checkpoint_period": {"batches": 4}}), directory.code, path=tmp_path / "run"
    )
    shutil.copytree(trained / "checkpoint_4", directory.trial(0) / "checkpoint_4")
    return side(directory, 0), side(directory, 1)


def test_a_fork_and_its_source_are_run_from_their_common_checkpoint(tmp_path: Path) -> None:
    a, b = forked(tmp_path, lr=0.25)
    for one, other in ((a, b), (b, a)):
        found = parting(one, other)
        assert (found.begin, found.at, next(iter(found.stages))) == (4, 4, "optimizer settings")
    assert found.texts == {"optimizer 0.0.lr": ("0.25", "0.125")}


def test_a_fork_with_the_same_hyperparameters_goes_on_as_its_source(tmp_path: Path) -> None:
    found = parting(*forked(tmp_path))
    assert (found.begin, found.batches, found.at) == (4, BATCHES - 4, None)


def test_what_can_not_be_compared_is_an_error(first: Side, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    a, b = forked(tmp_path / "other")
    with pytest.raises(ExperimentError, match="they begin at different batches"):
        parting(first, b)
    shutil.rmtree(a.directory.trial(0) / "checkpoint_4")
    with pytest.raises(ExperimentError, match="the checkpoint of trial 0 at batch 4 does not exist any more"):
        parting(a, b)
    with pytest.raises(ExperimentError, match="no trial of first has trained"):
        parting(Side(first.reader, None), first)


def test_code_that_runs_in_a_sandbox_is_not_run_outside_of_one(first: Side, tmp_path: Path) -> None:
    file = first.directory.config_file
    file.write_text(yaml.safe_dump({**yaml.safe_load(file.read_text()), "isolation": "sandbox"}))
    with pytest.raises(ConfigError, match="isolation: --exact has no sandbox"):
        parting(side(first.directory), first)


@pytest.mark.slow
@pytest.mark.long
def test_each_is_run_in_a_process_of_its_own_and_an_error_is_named(first: Side, tmp_path: Path) -> None:
    assert find_parting(first, first, 2).batches == 2
    code = first.directory.code / "my_weight.py"
    code.write_text("import nowhere_at_all\n" + code.read_text())
    with pytest.raises(ExperimentError, match=r"trial 0 of .*first can't be run again: .*nowhere_at_all"):
        find_parting(first, first, 2)
