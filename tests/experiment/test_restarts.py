"""When a failed trial restarts, and when it is given up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from dray.desk.effects import Say
from dray.desk.failure import Failure, FailureKind
from dray.desk.messages import TrialLeft
from dray.experiment.effects import Append, Effect, ShowFailure
from dray.experiment.restarts import MAX_IN_VAIN, Restarts, failure_fields, why_given_up


def error(batches: int, where: str = "ValueError at model.py:3 in train_batch", kind: FailureKind = "error") -> Failure:
    return Failure(kind=kind, where=where, batches=batches)


HUNG, OOM = Failure(kind="hung", batches=7), error(4, "OutOfMemoryError", "oom")


def died(batches: int = -1) -> Failure:
    """A process died; the trial never came further than to this batch."""
    return Failure(kind="died", batches=batches)


def lost(batches: int = -1) -> Failure:
    """Its node was lost; its last checkpoint was saved after so many batches."""
    return Failure(kind="node", batches=batches)


# The failures of a trial that may be started again five times; whether it is after the last one.
CASES: dict[str, tuple[list[Failure], bool]] = {
    "any first failure": ([error(4)], True),
    "the same error at the same batch": ([error(4), error(4)], False),
    "the same error before the first batch": ([error(0), error(0)], False),
    "the same error later: it got further": ([error(4), error(9)], True),
    "the same error earlier: another one": ([error(9), error(4)], True),
    "another line": ([error(4), error(4, "ValueError at model.py:9 in loss")], True),
    "another failure between": ([error(4), died(), error(4)], True),
    "the same error of a GPU": ([error(4, kind="device"), error(4, kind="device")], False),
    "of one that may be broken": ([replace(error(4, kind="device"), node="node-7")] * 2, True),
    "a first time out of memory": ([OOM], True),
    "out of memory, then another error": ([OOM, error(4)], True),
    "out of memory twice": ([OOM, OOM], False),
    "out of memory twice, whatever came between": (
        [OOM, error(4), died(), error(900, "MemoryError", "host_oom")],
        False,
    ),
    "processes that die are not the trial's fault": ([died(n) for n in range(5)], True),
    "nor are they at the same batch, twice": ([died(4), died(4), died(9), died(9)], True),
    "three times, it will happen again": ([died(4), died(9), died(9), died(9)], False),
    "also before the first report": ([died()] * 3, False),
    "with a lost node between, who knows": ([died(4), died(4), lost(), died(4)], True),
    "nor is another rank's": ([error(4, kind="collective")] * 5, True),
    "nor is a hang the same each time": ([HUNG] * 5, True),
    "but there is an end": ([died(n) for n in range(6)], False),
    "nodes that are lost do not count": ([lost(n) for n in range(100)], True),
    "nor do they before the first checkpoint, once": ([lost(), *map(died, range(5))], True),
    "without a checkpoint between they do": ([lost()] * 7, False),
    "but not the first": ([lost(4)] * 6, True),
    "others count beside them": ([lost(1), *map(died, range(3)), lost(2), *map(died, range(3, 6))], False),
    "ever other errors, until the end": ([error(n) for n in range(6)], False),
}


@pytest.mark.parametrize("case", CASES)
def test_trial_restarts(case: str) -> None:
    failures, again = CASES[case]
    assert (why_given_up(failures, max_restarts=5) == "") == again


@pytest.mark.parametrize("most", [0, 1, 3])
def test_trial_restarts_at_most_max_restarts_times(most: int) -> None:
    answers = [why_given_up([HUNG] * count, most) for count in range(1, 6)]
    assert [answer == "" for answer in answers] == [count <= most for count in range(1, 6)]
    assert answers[-1] == f"5 failures, max_restarts is {most}"
    assert why_given_up([HUNG], 0) == "1 failure, max_restarts is 0"


def test_the_reason_names_the_place() -> None:
    told = why_given_up([error(4), error(4)], 5)
    assert told == "the same error twice, after 4 batches: ValueError at model.py:3 in train_batch"
    assert why_given_up([OOM, OOM], 5) == "out of memory twice"
    assert why_given_up([died(9)] * 3, 5) == "its processes died 3 times without progress since batch 9"
    assert why_given_up([died()] * 3, 5) == "its processes died 3 times without progress before its first report"


class Run:
    """One run of an experiment, with the records of earlier ones."""

    def __init__(self, *records: Mapping[str, Any], max_restarts: int = 5) -> None:
        self.effects: list[Effect] = []
        self.restarts = Restarts(
            records, max_restarts=max_restarts, code_of={9: "variant"}.get, emit=self.effects.append
        )

    @property
    def records(self) -> list[Mapping[str, Any]]:
        return [each.record for each in self.effects if isinstance(each, Append)]

    def fail(self, failure: Failure, error: str = "it died", **fields: Any) -> str | None:
        """How trial 3 ends, if it does not restart."""
        left = TrialLeft(lease=1, group="g", trial=3, outcome="errored", error=error, failure=failure, **fields)
        return self.restarts.end_of(left)


def test_a_lost_node_is_recorded_with_the_last_checkpoint_before_it() -> None:
    run = Run(max_restarts=0)
    ends = [run.fail(lost())]
    for batches in (8, 16, 16):
        run.restarts.saved(3, batches)
        ends.append(run.fail(lost()))
    assert ends == [None, None, None, "errored"]
    assert [record["batches"] for record in run.records] == [-1, 8, 16, 16]
    assert run.restarts.counted == {3: 3}


@pytest.mark.parametrize(
    ("error_text", "fields", "why"),
    [
        (
            "Traceback ...\nRuntimeError: the slots train different models: the gradients of these parameters ...",
            {},
            "a restart would not change that",
        ),
        (
            "Traceback ...\nValueError: model 0 of the checkpoint does not fit the trial's: size mismatch for bias ...",
            {},
            "a restart would not change that",
        ),
        ("disk quota exceeded", {"no_restart": "log_policies forbid it"}, "log_policies forbid it"),
    ],
)
def test_a_trial_that_would_fail_again_is_not_restarted(error_text: str, fields: dict[str, str], why: str) -> None:
    run = Run()
    assert run.fail(error(100), error_text, **fields) == "errored"
    assert run.records[0]["why"] == why
    assert run.effects[0] == ShowFailure(trial=3, error=error_text, ended=why)


def test_progress_between_deaths_is_the_furthest_batch_that_was_reported_or_saved() -> None:
    run = Run()
    run.restarts.saved(3, 8)
    ends = [run.fail(died())]
    run.restarts.reached(3, 12)
    ends.append(run.fail(died()))
    # Another driver: the trial resumes from its checkpoint, and reports once more what it did before.
    again = Run(*run.records)
    again.restarts.saved(3, 8)
    ends.append(again.fail(died()))
    again.restarts.reached(3, 11)
    ends.append(again.fail(died()))
    assert ends == [None, None, None, "errored"]
    assert [record["batches"] for record in (*run.records, *again.records)] == [8, 12, 12, 12]


def test_a_failed_extension_is_recorded_with_the_end_that_the_trial_keeps() -> None:
    run = Run({"event": "exited", "trial": 3, "reason": "completed"})
    assert [run.fail(error(16)), run.fail(error(16), "over")] == [None, "completed"]
    again, end = run.records
    assert (again["event"], end["event"]) == ("restarted", "gave_up")
    assert "kept" not in again
    assert end["kept"] == "completed"
    shown = [each for each in run.effects if isinstance(each, ShowFailure)]
    why = "the same error twice, after 16 batches: ValueError at model.py:3 in train_batch"
    assert shown[1] == ShowFailure(trial=3, error="over", ended=why, kept="completed")


@pytest.mark.parametrize("outcome", ["diverged", "invalid_hp"])
def test_a_trial_that_diverges_or_refuses_its_hyperparameters_ends_at_once(outcome: Any) -> None:
    run = Run()
    left = TrialLeft(lease=1, group="g", trial=3, outcome=outcome, error="the loss is nan")
    assert run.restarts.end_of(left) == outcome
    assert run.records == []


def test_failures_are_recovered_from_the_journal() -> None:
    failures = {3: [error(4), OOM], 1: [died()]}
    records = [
        {"event": "restarted", "trial": trial, "error": "...", **failure_fields(each)}
        for trial, mine in failures.items()
        for each in mine
    ]
    run = Run({"event": "reported", "trial": 3}, *records)
    assert run.restarts.counted == {3: 2, 1: 1}
    assert run.fail(OOM) == "out_of_memory"
    assert run.records[0]["why"] == "out of memory twice"
    assert Run(run.records[0]).restarts.given_up == {3: "out_of_memory"}


def test_a_trial_that_lacks_host_memory_twice_has_failed_and_teaches_the_search_nothing() -> None:
    run = Run()
    killed = Failure(kind="host_oom", batches=4)  # by Ray, perhaps because of another process
    assert run.fail(killed) is None
    assert run.fail(killed) == "errored"
    assert run.records[-1]["why"] == "out of memory twice"


def test_a_failure_that_only_used_processes_cause_is_neither_counted_nor_listed_and_one_line_says_so() -> None:
    run = Run(max_restarts=0)
    assert run.fail(error(0), "ValueError: Duplicated\n...", reused=True) is None
    assert run.restarts.reuse.needs_new(3)
    assert not run.restarts.reuse.needs_new(4)
    assert run.restarts.reached(3, 0) is False
    assert run.restarts.reached(3, 1) is True
    assert run.restarts.reuse.needs_new(4)
    assert not run.restarts.reuse.needs_new(9)
    assert [record["event"] for record in run.records] == ["withheld", "new_processes"]
    assert not run.restarts.counted
    assert not [each for each in run.effects if isinstance(each, ShowFailure)]
    [line] = [each.line for each in run.effects if isinstance(each, Say)]
    assert line.endswith("not in a new process (ValueError: Duplicated)")
    assert Run(*run.records).restarts.reuse.needs_new(4)


def test_another_driver_tries_a_withheld_failure_in_new_processes_too() -> None:
    run = Run()
    run.fail(error(0), reused=True)
    later = Run(*run.records)
    assert later.restarts.reuse.needs_new(3)
    assert later.restarts.reuse.succeeded(3)


@pytest.mark.parametrize(("max_restarts", "events"), [(0, ["gave_up"]), (1, ["restarted", "gave_up"])])
def test_a_failure_in_new_processes_too_counts_as_if_none_were_withheld_and_is_not_tried_again_for_others(
    max_restarts: int, events: list[str]
) -> None:
    run = Run(max_restarts=max_restarts)
    assert run.fail(error(0), reused=True) is None
    assert run.fail(error(0)) == "errored"
    assert [record["event"] for record in run.records] == ["withheld", *events]
    assert not run.restarts.reuse.needs_new(3)
    run.fail(error(0), reused=True)
    assert len([record for record in run.records if record["event"] == "withheld"]) == 1


def test_a_death_in_new_processes_says_nothing_about_the_error_that_was_withheld() -> None:
    run = Run()
    run.fail(error(0), reused=True)
    assert run.fail(died()) is None
    assert run.restarts.reuse.needs_new(3)


def test_errors_of_the_same_code_are_tried_in_new_processes_a_few_times_in_vain() -> None:
    run = Run()
    for number in range(MAX_IN_VAIN + 1):
        run.fail(error(0, f"line {number}"), reused=True)
        run.fail(error(0, f"line {number}"))
    assert [record["event"] for record in run.records].count("withheld") == MAX_IN_VAIN
