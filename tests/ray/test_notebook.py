"""In a notebook: a search with a method and a sampler from its cells, whose picture stays in its own.

Reports that nobody waits for travel together, and none is lost on the way, also of the trial that fails.
"""

from __future__ import annotations

import io
import sys
import types
from dataclasses import dataclass
from typing import Any

import pandas as pd
import pytest
from rich.console import Console

import dray
from dray.desk.messages import Message
from dray.display import display
from searchers import RandomSearch
from tests.ray.harness import TRIALS, journal, recorded

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.usefixtures("ray_is_up")]

BATCHES = 350


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


class HalfWay(RandomSearch):
    """Random search whose trials validate at half of their length too."""

    def __init__(self, **fields: Any) -> None:
        super().__init__(**fields)
        self.rungs = (self.rungs[0] // 2, self.rungs[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    cell: Cell
    result: dray.Result
    rows: list[int]  # how many rows of metrics were on the disk, at each message


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Story:
    class Tenths:
        def ask(self, trial: int) -> dict[str, object]:
            return {**constants, "lr": 0.01 + trial / 1000}

        def tell(self, event: object, hparams: object) -> None:
            """Nothing is learned."""

    directory = tmp_path_factory.mktemp("notebook")
    config = recorded(
        directory / "record",
        trials=1,
        batches=BATCHES,
        entrypoint="recorded:FailsLate",
        resources={"slot": "cpu", "max_slots": 1},
        min_validation_period=None,
        checkpoint_policy="none",
        max_restarts=0,
    )
    constants = {name: config["hyperparameters"][name] for name in ("global_batch_size", "record", "pause_s")}
    config["searcher"] = {"name": "custom", "metric": "error", "max_length": {"batches": BATCHES}}
    method = HalfWay(max_trials=3, max_length=BATCHES)
    path, rows = directory / "experiment", []

    def heard(message: Message) -> None:
        rows.append(sum(len(pd.read_parquet(part)) for part in (path / "metrics").glob("part-*.parquet")))

    cell, ipython = Cell(), types.ModuleType("IPython")
    ipython.get_ipython = lambda: None  # type: ignore[attr-defined]
    in_notebook: dict[str, Any] = {"file": io.StringIO(), "force_jupyter": True, "width": 80}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "IPython", ipython)
        patch.setitem(sys.modules, "IPython.display", cell)
        patch.setattr("ray.tune.progress_reporter.IS_NOTEBOOK", True)
        patch.setattr(display, "Console", lambda **given: Console(**in_notebook | given))
        experiment = dray.Experiment(config, model_dir=TRIALS, path=path, method=method, sampler=Tenths())
        result = experiment.run(on_message=heard)
    return Story(cell=cell, result=result, rows=rows)


def test_picture_stays_in_its_cell(story: Story) -> None:
    """Tune has one of its own there, which clears the cell."""
    assert [shown for shown in story.cell.outputs.values() if "of 3 trials ended" in shown], story.cell.outputs


def test_a_method_and_a_sampler_are_given_from_python(story: Story) -> None:
    assert story.result.trials["hparams.lr"].tolist() == [0.01, 0.011, 0.012]
    assert story.result.trials["batches"].tolist() == [BATCHES, 200, BATCHES]
    opened = journal(story.result.path)[0]
    assert (opened["method"], opened["constraint"]) == ("HalfWay", None)


def test_training_metrics_of_every_report_arrive_in_order_also_of_a_trial_that_fails(story: Story) -> None:
    assert story.rows[-1] > 0, "other tools see what has been reported while it runs"
    assert story.result.trials["state"].tolist() == ["COMPLETED", "ERRORED", "COMPLETED"]
    training = story.result.metrics[story.result.metrics["kind"] == "training"]
    reported = {trial: rows["batches"].tolist() for trial, rows in training.groupby("trial_id")}
    whole = [100, 175, 200, 300, BATCHES]
    assert reported == {0: whole, 1: [100, 175, 200], 2: whole}
