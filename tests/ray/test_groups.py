"""Trials that share a worker group, on a real Ray: what one leaves behind, the next does not find."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import dray
from dray.leases.messages import GroupEnded, GroupRetired, Message
from tests.ray.harness import TRIALS, alive, lines, recorded
from tests.ray.trials.changes import CHANGES

pytestmark = [pytest.mark.ray, pytest.mark.slow]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    record: Path
    result: dray.Result
    messages: list[Message]

    @property
    def retired(self) -> dict[int, str]:
        """Trials after which a group's processes were replaced, and why."""
        return {message.trial: message.reason for message in self.messages if isinstance(message, GroupRetired)}

    def noted(self, what: str) -> list[Any]:
        """By trial."""
        found = {line["trial"]: line[what] for line in lines(self.record) if what in line}
        return [found[trial] for trial in sorted(found)]

    def weights(self, trial: int) -> dict[str, torch.Tensor]:
        state = torch.load(self.result.path / f"trial_{trial}/checkpoint_10/state-dict.pth", weights_only=True)
        return dict(state["models_state_dict"][0])


def search(directory: Path, *, trials: int, clean: bool, reuse: bool) -> Ran:
    config = recorded(
        directory / "record",
        trials=trials,
        batches=10,
        entrypoint="python3 groups.py",
        searcher={"name": "random", "metric": "error", "max_trials": trials},
        resources={"slot": "cpu", "max_slots": 1, "reuse_workers": reuse},
    )
    config["hyperparameters"] |= {"clean": clean, "elsewhere": str(directory)}
    messages: list[Message] = []
    experiment = dray.Experiment(config, model_dir=TRIALS, path=directory / "experiment")
    result = experiment.run(on_message=messages.append)
    assert result.trials["state"].tolist() == ["COMPLETED"] * trials
    assert result.trials["restarts"].eq(0).all()
    assert not [message for message in messages if isinstance(message, GroupEnded) and message.is_lost]
    return Ran(record=directory / "record", result=result, messages=messages)


@pytest.fixture(scope="module")
def shared(ray_is_up: None, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """Five trials, one after another, in one group."""
    return search(tmp_path_factory.mktemp("shared"), trials=5, clean=False, reuse=True)


@pytest.fixture(scope="module")
def alone(ray_is_up: None, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """The first two of them, each in processes of its own, and the first one does nothing to them."""
    return search(tmp_path_factory.mktemp("alone"), trials=2, clean=True, reuse=False)


def test_a_trial_after_any_changes_trains_as_in_a_fresh_process(shared: Ran, alone: Ran) -> None:
    for ran, processes in ((shared, 1), (alone, 2)):
        assert len({*ran.noted("pid")[:2]}) == processes
    assert shared.noted("seen")[1].keys() == CHANGES.keys()
    for what in ("seen", "draw"):
        assert shared.noted(what)[1] == alone.noted(what)[1]
    ours, theirs = shared.weights(1), alone.weights(1)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert not any(torch.equal(ours[name], other) for name, other in shared.weights(0).items())


def test_processes_are_reused_unless_something_is_left(shared: Ran) -> None:
    assert shared.retired.keys() == {1, 2, 3}
    assert shared.retired[1].startswith("thread prefetch is still running, at ")
    assert "groups.py" in shared.retired[1]
    reason = shared.retired[2].split()
    assert reason[0] == "process"
    assert reason[2:] == ["was", "still", "running:", "sleep", "1000"]
    assert not alive(int(reason[1]), "sleep")
    assert shared.retired[3] == "its collectives were aborted"
    first, second, *others = shared.noted("pid")
    assert first == second
    assert len({first, *others}) == 4
    assert shared.noted("left") == [True] * 5, "exit handlers of a trial are called at its end"
