"""Trials that share worker groups, on a real Ray: what they leave behind, and when a group's processes are replaced."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import dray
from dray.desk.messages import GroupEnded, GroupRetired, LeaseGranted, Message, TrialLeft
from tests.ray.harness import TRIALS, alive, ends, journal, lines, recorded
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

    @property
    def lost_groups(self) -> int:
        return sum(isinstance(message, GroupEnded) and message.is_lost for message in self.messages)

    def pids(self, trial: int) -> list[int]:
        """The processes of the trial's attempts, in order."""
        return [line["pid"] for line in lines(self.record) if line["trial"] == trial and "made" in line]

    def batches(self, trial: int) -> list[int]:
        """All that were trained, in order."""
        return [line["batch"] for line in lines(self.record) if line["trial"] == trial and "batch" in line]

    def start(self, trial: int) -> dict[str, Any]:
        """What the trial saw before its first line, which was its process's first or not."""
        [line] = [line for line in lines(self.record) if line["trial"] == trial and "made" in line]
        return {name: line[name] for name in ("seen", "draw")}

    def events(self, trial: int) -> list[dict[str, Any]]:
        return [each for each in journal(self.result.path) if each.get("trial") == trial and "error" in each]


def search(directory: Path, *, trials: int, clean: bool, reuse: bool, slots: int = 1, **fields: Any) -> Ran:
    config = recorded(
        directory / "record",
        trials=trials,
        batches=10,
        entrypoint="python3 groups.py",
        searcher={"name": "random", "metric": "error", "max_trials": trials},
        resources={"slot": "cpu", "slots_per_trial": slots, "max_slots": slots, "reuse_workers": reuse},
        **fields,
    )
    config["hyperparameters"] |= {"clean": clean, "elsewhere": str(directory)}
    messages: list[Message] = []
    experiment = dray.Experiment(config, model_dir=TRIALS, path=directory / "experiment")
    result = experiment.run(on_message=messages.append)
    return Ran(record=directory / "record", result=result, messages=messages)


HANG_S = 30  # longer than a trial that starts again takes to its first batch, where several tests share two cores


@pytest.fixture(scope="module")
def shared(ray_is_up: None, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """Six trials, one after another, in one group."""
    return search(tmp_path_factory.mktemp("shared"), trials=6, clean=False, reuse=True, hang_timeout_s=HANG_S)


@pytest.fixture(scope="module")
def alone(ray_is_up: None, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """The first two of them, each in processes of its own, and the first one does nothing to them."""
    return search(tmp_path_factory.mktemp("alone"), trials=2, clean=True, reuse=False)


def weights(ran: Ran, trial: int) -> dict[str, torch.Tensor]:
    state = torch.load(ran.result.path / f"trial_{trial}" / "checkpoint_10" / "state-dict.pth", weights_only=True)
    return dict(state["models_state_dict"][0])


def test_every_trial_has_one_end(shared: Ran) -> None:
    trials = shared.result.trials.set_index("trial_id")
    assert trials["state"].tolist() == ["COMPLETED"] * 4 + ["ERRORED", "COMPLETED"]
    assert trials["restarts"].tolist() == [0, 0, 0, 0, 1, 1]
    assert ends(shared.result.path) == dict.fromkeys(range(6), 1)


def test_there_is_one_group_at_a_time_where_all_trials_together_may_have_the_slots_of_one(shared: Ran) -> None:
    kinds = [type(each) for each in shared.messages if isinstance(each, LeaseGranted | TrialLeft)]
    assert set(kinds[::2]) == {LeaseGranted}
    assert set(kinds[1::2]) == {TrialLeft}
    assert shared.result.timeline["group"].nunique() == 1


# ------------------------------------------------------------------------------------------------------- nothing leaks
def test_trial_after_one_that_changed_everything_sees_what_it_sees_in_a_fresh_process(shared: Ran, alone: Ran) -> None:
    assert shared.pids(0) == shared.pids(1), "it has the same process"
    assert alone.pids(0) != alone.pids(1), "and this one its own"
    seen, expected = shared.start(1), alone.start(1)
    assert seen["seen"].keys() == CHANGES.keys()
    assert seen == expected


def test_it_trains_bit_for_bit_as_in_a_fresh_process(shared: Ran, alone: Ran) -> None:
    ours, theirs = weights(shared, 1), weights(alone, 1)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert not any(torch.equal(ours[name], other) for name, other in weights(shared, 0).items())


def test_exit_handlers_of_a_trial_are_called_at_its_end(shared: Ran) -> None:
    left = [line["trial"] for line in lines(shared.record) if "left" in line]
    assert left == [0, 1, 2, 3, 4, 4, 5], "not by the process that was ended as it hung"


# ------------------------------------------------------------------------------------------------- groups are replaced
def test_workers_are_reused_unless_something_is_left(shared: Ran) -> None:
    retired = shared.retired
    assert retired.keys() == {1, 2, 3, 4}
    assert retired[1] == "its collectives were aborted"
    assert retired[2].startswith("thread prefetch is still running, at ")
    assert "groups.py" in retired[2]
    assert retired[3].startswith("process ")
    assert retired[3].endswith(" was still running: sleep 1000")
    assert retired[4] == "out of memory"
    first, second, *others = (shared.pids(trial)[0] for trial in range(6))
    assert first == second
    assert len({first, *others}) == 5, "new processes after trials 1, 2, 3 and 4"


def test_child_process_that_a_trial_left_is_gone(shared: Ran) -> None:
    [reason] = [
        message.reason for message in shared.messages if isinstance(message, GroupRetired) and message.trial == 3
    ]
    assert not alive(int(reason.split()[1]), "sleep")


def test_replacing_is_no_loss_and_uses_up_no_start(shared: Ran, alone: Ran) -> None:
    assert alone.retired
    assert alone.lost_groups == 0
    # Only the process that hung was lost.
    assert shared.lost_groups == 1


# ------------------------------------------------------------------------------------------------ restarts, and hangs
def test_trial_that_runs_out_of_memory_has_one_more_try_in_new_processes(shared: Ran) -> None:
    first, second = shared.pids(4)
    assert first != second
    assert shared.batches(4) == [*range(8), *range(5, 8)]
    again, end = shared.events(4)
    assert (again["event"], end["event"]) == ("restarted", "gave_up")
    assert again["kind"] == end["kind"] == "host_oom"
    assert end["why"] == "out of memory twice"
    assert again["batches"] == 7


def test_trial_that_hangs_is_ended_told_and_goes_on_from_its_checkpoint(shared: Ran) -> None:
    first, second = shared.pids(5)
    assert first != second
    assert shared.batches(5) == [*range(8), *range(5, 10)]
    [hung] = shared.events(5)
    assert (hung["event"], hung["kind"], hung["batches"]) == ("restarted", "hung", 7)
    assert f"for {HANG_S} s (hang_timeout_s)" in hung["error"]


def test_stacks_of_a_trial_that_hung_are_in_its_log(shared: Ran) -> None:
    log = (shared.result.path / "trial_5" / "logs" / "rank_0.log").read_text()
    line = 1 + (TRIALS / "groups.py").read_text().splitlines().index("                time.sleep(1000)")
    assert f'groups.py", line {line} in train_batch' in log
