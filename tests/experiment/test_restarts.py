"""When a failed trial restarts, when an experiment is given up, and why processes have died."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dray.config.load import load_config
from dray.experiment.effects import Append, Effect, ShowFailure
from dray.experiment.limits import Limits
from dray.experiment.restarts import MAX_IN_VAIN, Restarts, failure_fields, why_given_up
from dray.experiment.run import with_last_lines
from dray.leases.effects import Say
from dray.leases.failure import Failure, FailureKind
from dray.leases.messages import TrialLeft
from dray.records.spending import Usage
from dray.worker.log.writer import ENDING
from searchers import Exited, Method, RandomSearch, Repeats, Reported, Search, Started
from searchers.objectives import of_names
from searchers.space import parse


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


SEARCHER: dict[str, Any] = {"name": "random", "metric": "loss", "max_length": {"batches": 8}, "max_trials": 9}


def limits(searcher: dict[str, Any] = SEARCHER, **fields: Any) -> Limits:
    space = {"global_batch_size": 1, "lr": {"type": "double", "minval": 0, "maxval": 1}}
    return Limits(load_config({"entrypoint": "m:T", "hyperparameters": space, "searcher": searcher, **fields}))


def searched(found: Limits, *trials: Any, method: Method | None = None, **search: Any) -> None:
    """Let a search log these values of its trials, one after another, and their ends."""
    given: dict[str, Any] = {"seed": 1, "smaller_is_better": True, "log": found.record, **search}
    space = parse({"lr": {"type": "double", "minval": 0, "maxval": 1}})
    running = Search(method or RandomSearch(max_trials=100), space, **given)
    running.start()
    for number, (reported, reason) in enumerate(trials):
        running.on(Started(trial=number))
        for step, value in enumerate(reported):
            values = {"metrics": value} if isinstance(value, tuple) else {"value": value}
            running.on(Reported(trial=number, step=step, **values))
        running.on(Exited(trial=number, reason=reason))


def test_patience_counts_trials_since_the_best_and_not_failures() -> None:
    nan = float("nan")
    done, stopped, failed = "completed", "stopped", "errored"
    trials = [([0.5], done), ([0.7], stopped), ([0.4], done), ([nan], stopped), ([0.9], failed), ([0.6], done)]
    for several, reason in ((trials[:-1], ""), (trials, "no better loss in 2 trials")):
        found = limits(patience=2)
        searched(found, *several)
        assert (found.reason, found.remedy) == (reason, "--patience 4" if reason else "")


def test_patience_does_not_count_repeats() -> None:
    found = limits(patience=3)
    trials = [([0.4], "completed"), *[([0.5], "completed")] * 5]
    searched(found, *trials, method=Repeats(RandomSearch(max_trials=2), seeds=2, top=2))
    assert found.reason == ""
    found = limits(patience=3)
    searched(found, *trials)
    assert found.reason == "no better loss in 3 trials"


def test_with_several_metrics_a_gain_is_one_of_the_first_objective_within_the_constraints() -> None:
    metrics = [{"name": "acc", "smaller_is_better": False}, {"name": "size"}, {"name": "size", "at_most": 10}]
    values = [(0.5, 5.0, 5.0), (0.9, 20.0, 20.0), ()]  # better but too large, and without metrics
    for several, reason in ((values[:2], ""), (values, "no better acc in 2 trials")):
        found = limits({**SEARCHER, "metric": None, "metrics": metrics}, patience=2)
        searched(found, *(([each], "completed") for each in several), objectives=of_names(metrics))
        assert found.reason == reason


TWO = {"metric": None, "metrics": [{"name": "loss"}, {"name": "acc", "at_least": 0.5}]}


@pytest.mark.parametrize(
    ("searcher", "until", "misses", "reaches"),
    [
        ({}, {"loss": 0.5}, [0.51], [0.5]),
        ({"metric": "acc", "smaller_is_better": False}, {"acc": 0.9}, [0.8], [0.95]),
        ({}, {"loss": 0.5}, [float("nan")], [float("-inf")]),
        (TWO, {"acc": 0.9}, [0.1, 0.8], [0.9, 0.91]),
        (TWO, {"loss": 0.5, "acc": 0.9}, [0.4, 0.8], [0.4, 0.91]),
    ],
)
def test_a_target_is_reached_in_the_direction_of_its_metric(
    searcher: dict[str, Any], until: dict[str, float], misses: list[float], reaches: list[float]
) -> None:
    found = limits({**SEARCHER, **searcher}, until=until)
    for values, is_reached in ((misses, False), (reaches, True)):
        found.record({"event": "reported", "trial": 3, "step": 1, "value": values[0], "metrics": values})
        assert (f"of trial 3 reaches {next(iter(until.values())):g}" in found.reason) == is_reached


def test_a_target_that_the_search_has_reached_before_counts() -> None:
    found = limits(until={"loss": 0.3})
    searched(found, ([0.2], "completed"))
    assert found.reason == "loss 0.2 of trial 0 reaches 0.3"
    assert found.remedy == "--until loss=VALUE"


def test_the_limit_that_is_spent_most_counts() -> None:
    found = limits(budget={"time": "2h", "slot_hours": 40})
    rates = {"time": 1.0, "slot_hours": 4 / 3600, "usd": 0.0}
    found.spend(Usage(spent={"time": 3600, "slot_hours": 30.0, "usd": 0.0}, per_s=rates))
    assert (found.usage, found.share, found.reason) == ("1 of 2 h, 30 of 40 slot-hours", 0.75, "")
    found.spend(Usage(spent={"time": 4800, "slot_hours": 40.0, "usd": 0.0}, per_s=rates))
    assert found.reason == "budget.slot_hours is spent"
    assert found.remedy == "--budget slot_hours=80"


@pytest.mark.parametrize(
    ("time", "spent", "more"),
    [("2h", 7200, "4h"), ("40s", 40, "2m"), ("90m", 5400, "3h"), ("500h1s", 1800001, "1001h"), ("5s", 6, "10s")],
)
def test_the_time_that_is_proposed_is_a_round_one(time: str, spent: float, more: str) -> None:
    found = limits(budget={"time": time})
    found.spend(Usage(spent={"time": spent}, per_s={"time": 1.0}))
    assert found.remedy == f"--budget time={more}"


def test_at_the_end_no_trial_begins_that_would_not_reach_its_next_rung() -> None:
    found = limits(budget={"slot_hours": 10})
    rates = {"time": 1.0, "slot_hours": 2 / 3600, "usd": 0.0}
    for step in (0, 1):  # 60 s for a unit
        found.trained(0, step, 60.0 * step)
    found.leaves(0)
    found.spend(Usage(spent={"time": 0.0, "slot_hours": 5.0, "usd": 0.0}, per_s=rates))
    assert found.may_begin(1000)
    found.spend(Usage(spent={"time": 0.0, "slot_hours": 9.899, "usd": 0.0}, per_s=rates))  # 182 s are left
    assert (found.may_begin(3), found.may_begin(4)) == (True, False)


TRACE = [f"frame #{n}: c10d::ProcessGroupNCCL::watchdogHandler() + 0x{n} (0x7f libtorch_cuda.so)" for n in range(60)]
STACKS = ["Fatal Python error: Aborted", "", *(f'  File "/site/lib.py", line {n} in run' for n in range(200))]


def aborted(what: str) -> list[str]:
    """The output of a process that the watchdog of torch 2.x has aborted."""
    says = f"Process group watchdog thread terminated with exception: CUDA error: {what}"
    first = f"[rank1]:[E1128 05:00:00.1 ProcessGroupNCCL.cpp:2093] [PG ID 2 PG GUID 3 Rank 1] {says}"
    about = ["CUDA kernel errors might be asynchronously reported at some other API call.", *TRACE, ""]
    again = ["terminate called after throwing an instance of 'c10::DistBackendError'", f"  what():  [PG ID 2] {says}"]
    return ["loss 0.5", first, *about, *again, *about, *STACKS]


def printed(directory: Path, rank: int, *lines: str) -> None:
    text = "".join(f"2026-11-21T19:02:02.123Z {line}\n" for line in lines)
    (directory / f"rank_{rank}.log").write_text(text)


def death(*dead: int, kind: str = "died") -> TrialLeft:
    failure = Failure(kind=kind, batches=7)  # type: ignore[arg-type]
    nodes = [f"node-{rank}" for rank in dead]
    return TrialLeft(
        lease=1, group="g", trial=3, outcome="errored", error="it died", failure=failure, dead=dead, nodes=nodes
    )


@pytest.mark.parametrize(
    ("what", "node"),
    [
        ("uncorrectable ECC error encountered", "node-1"),
        ("unspecified launch failure", "node-1"),
        ("Invalid access of peer GPU memory over nvlink or a hardware error", "node-1"),
        ("an illegal memory access was encountered", ""),
        ("device-side assert triggered", ""),
    ],
)
def test_the_gpu_error_of_a_dead_rank_is_the_failure_with_its_node_if_it_may_be_broken(
    what: str, node: str, tmp_path: Path
) -> None:
    printed(tmp_path, 0, "loss 0.5")
    printed(tmp_path, 1, *aborted(what))
    left = with_last_lines(death(0, 1), tmp_path)
    assert left.failure is not None
    assert (left.failure.kind, left.failure.node, left.failure.batches) == ("device", node, 7)
    assert left.failure.where == f"CUDA error: {what}"
    assert left.error.startswith(f"it died: rank 1: CUDA error: {what}: Aborted\n  lib.py:0, in run\n\n")
    assert f"({tmp_path}/rank_1.log)" in left.error


def test_a_lack_of_gpu_memory_is_one(tmp_path: Path) -> None:
    printed(tmp_path, 1, *aborted("out of memory"))
    left = with_last_lines(death(1), tmp_path)
    assert left.failure == Failure(kind="oom", where="CUDA error: out of memory", batches=7)


def test_what_another_process_or_a_program_has_printed_is_not_the_cause(tmp_path: Path) -> None:
    ecc = "uncorrectable ECC error encountered"
    of_earlier = [*aborted(ecc), f"{ENDING}killed by SIGABRT", "loss 0.4"]
    of_program = ["caught RuntimeError: CUDA error: unknown error; trying again", "loss 0.4"]
    for lines in (of_earlier, of_program, []):
        printed(tmp_path, 1, *lines)
        assert with_last_lines(death(1), tmp_path).failure == Failure(kind="died", batches=7)
    printed(tmp_path, 1, *aborted(ecc))
    assert with_last_lines(death(1, kind="host_oom"), tmp_path).failure == Failure(kind="host_oom", batches=7)


def test_logs_of_other_machines_are_not_read(tmp_path: Path) -> None:
    printed(tmp_path, 1, *aborted("unknown error"))
    left = with_last_lines(death(1), tmp_path, can_read=False)
    assert (left.failure, left.error) == (Failure(kind="died", batches=7), f"it died; what it printed is in {tmp_path}")
