"""The loop's law, and what it does at each kind of boundary, with an executor that only keeps a log."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dray.training.loop import Command, Outcome, Publish, Train, Validate, drive
from dray.training.parallel.transport import use_interface_of
from dray.training.plan import Plan, Schedule, batches_of, schedule_of
from dray.training.progress import Progress
from dray.training.units import Batch, Epoch, Records, TrainUnit


def commands(
    plan: Plan, at: Progress | None = None, *, answer: Callable[[Command], Outcome] = lambda command: Outcome()
) -> tuple[list[Command], Progress]:
    """All commands of a run whose executor trains as far as it is told and otherwise answers by `answer`."""
    steps = drive(plan, at or Progress())
    log: list[Command] = []
    outcome = None
    while True:
        try:
            command = next(steps) if outcome is None else steps.send(outcome)
        except StopIteration as end:
            return log, end.value
        log.append(command)
        outcome = answer(command)
        if isinstance(command, Train) and not outcome.leave:
            outcome = replace(outcome, batches=command.until)


def shown(log: list[Command]) -> str:
    """T10 V P* : trained to 10, validated, published with a checkpoint."""
    words = []
    for command in log:
        match command:
            case Train():
                words.append(f"T{command.until}")
            case Validate():
                words.append("V")
            case Publish():
                words.append("P" + "*" * command.save + "!" * command.decides + "." * command.final)
    return " ".join(words)


schedules = st.one_of(
    st.none(),
    st.builds(Schedule, period=st.integers(1, 9)),
    st.builds(Schedule, period=st.integers(1, 4), numbers=st.frozensets(st.integers(0, 30), max_size=5)),
)
plans = st.builds(
    Plan,
    length=st.integers(1, 60),
    epoch_length=st.one_of(st.none(), st.integers(1, 20)),
    report=schedules,
    validate=schedules,
    checkpoint=schedules,
    rungs=st.frozensets(st.integers(1, 60), max_size=4).map(lambda rungs: tuple(sorted(rungs))),
    policy=st.sampled_from(["best", "all", "none"]),
    step_zero_validation=st.booleans(),
)


def best_at(good: frozenset[int]) -> Callable[[Command], Outcome]:
    """Answers whose validations are the best so far at these batches: a matter of the place alone, as it should be."""
    at = 0

    def answer(command: Command) -> Outcome:
        nonlocal at
        if isinstance(command, Train):
            at = command.until
        return Outcome(is_best=at in good)

    return answer


@pytest.mark.api("9.8")
@given(plan=plans, good=st.frozensets(st.integers(1, 60)))
@settings(max_examples=100, deadline=None)
def test_resuming_from_any_published_progress_yields_exactly_the_remaining_commands(
    plan: Plan, good: frozenset[int]
) -> None:
    whole, end = commands(plan, answer=best_at(good))
    assert end.batches == plan.length
    for index, command in enumerate(whole):
        if isinstance(command, Publish):
            rest, rest_end = commands(plan, command.at, answer=best_at(good))
            assert rest == whole[index + 1 :]
            assert rest_end == end


def test_a_stop_during_training_ends_the_run_at_the_report_before() -> None:
    plan = Plan(length=30, rungs=(10, 20))
    log, end = commands(plan, answer=lambda command: Outcome(stop=isinstance(command, Train) and command.until == 30))
    assert shown(log) == "T10 V P*! T20 V P*! T30"
    assert (end.batches, end.is_saved) == (20, True)


@given(plan=plans, good=st.frozensets(st.integers(1, 60)), stop_after=st.integers(1, 60))
@settings(max_examples=100, deadline=None)
def test_a_run_that_was_stopped_and_resumed_does_what_one_never_stopped_does(
    plan: Plan, good: frozenset[int], stop_after: int
) -> None:
    whole, _ = commands(plan, answer=best_at(good))
    best = best_at(good)

    def stopping(command: Command) -> Outcome:
        stop = isinstance(command, Publish) and command.at.batches >= stop_after
        return replace(best(command), stop=stop)

    first, at = commands(plan, answer=stopping)
    assert at.is_saved, "a stop must lose nothing"
    second, _ = commands(plan, at, answer=best_at(good))

    def work(log: list[Command]) -> list[Command]:
        return [command for command in log if not isinstance(command, Publish)]

    assert work(first) + work(second) == work(whole)


@given(plan=plans)
@settings(max_examples=100, deadline=None)
def test_each_train_command_ends_where_the_next_thing_is_due(plan: Plan) -> None:
    """An oracle that asks batch by batch."""
    log, _ = commands(plan)
    trained = [command.until for command in log if isinstance(command, Train)]
    parts = [s for s in (plan.report, plan.validate, plan.checkpoint) if s is not None]
    due = [b for b in range(1, plan.length + 1) if b in (plan.length, *plan.rungs) or any(s.due(b) for s in parts)]
    assert trained == due


@pytest.mark.api("8.5")
@given(plan=plans)
@settings(max_examples=100, deadline=None)
def test_the_end_is_validated_and_saved_once(plan: Plan) -> None:
    log, end = commands(plan)
    assert end == Progress(batches=plan.length, validated=plan.length, saved=plan.length)
    last_train = max(index for index, command in enumerate(log) if isinstance(command, Train))
    assert [type(command) for command in log[last_train:]] == [Train, Validate, Publish]
    assert isinstance(log[-1], Publish)
    assert log[-1].save
    assert log[-1].final
    assert log[-1].decides


ONE, TWO = Schedule(period=1), Schedule(period=2)


@pytest.mark.api("8.4", "8.5", "8.6", "8.7", "8.8")
@pytest.mark.parametrize(
    ("plan", "at", "expected"),
    [
        (Plan(length=7), Progress(), "T7 V P*!."),
        (Plan(length=5, report=TWO), Progress(), "T2 P T4 P T5 V P*!."),
        (Plan(length=3, validate=ONE), Progress(), "T1 V P* T2 V P* T3 V P*!."),
        (Plan(length=3, validate=ONE, policy="best"), Progress(), "T1 V P T2 V P* T3 V P*!."),
        (Plan(length=3, validate=ONE, policy="none"), Progress(), "T1 V P T2 V P T3 V P*!."),
        (Plan(length=4, validate=TWO, checkpoint=TWO, report=TWO), Progress(), "T2 V P* T4 V P*!."),
        (Plan(length=8, rungs=(2, 4, 8), policy="none"), Progress(), "T2 V P*! T4 V P*! T8 V P*!."),
        # A schedule names batches or epochs, counted from one.
        (
            Plan(length=10, policy="none", validate=Schedule(period=1, numbers=(1, 5))),
            Progress(),
            "T1 V P T5 V P T10 V P*!.",
        ),
        (
            Plan(length=10, policy="none", epoch_length=2, validate=Schedule(period=2, numbers=[1, 4])),
            Progress(),
            "T2 V P T8 V P T10 V P*!.",
        ),
        (Plan(length=2, step_zero_validation=True), Progress(), "V P T2 V P*!."),
        (Plan(length=2, step_zero_validation=True), Progress(batches=1, saved=1), "T2 V P*!."),
        (Plan(length=5), Progress(batches=5, validated=5, saved=5), ""),
    ],
)
def test_what_is_done_at_each_boundary(plan: Plan, at: Progress, expected: str) -> None:
    assert shown(commands(plan, at, answer=best_at(frozenset({2})))[0]) == expected


def stops(command: Command) -> Outcome:
    return Outcome(stop=isinstance(command, Publish))


@pytest.mark.api("2.12")
def test_a_stop_saves_what_is_unsaved_and_validates_no_more() -> None:
    log, at = commands(Plan(length=9, report=Schedule(period=3)), answer=stops)
    assert shown(log) == "T3 P P*."
    assert at == Progress(batches=3, saved=3)


def test_a_stop_at_a_checkpoint_saves_no_second_one() -> None:
    log, _ = commands(Plan(length=9, rungs=(3,)), answer=stops)
    assert shown(log) == "T3 V P*!"


@pytest.mark.api("8.11")
def test_leaving_between_reports_saves_unless_asked_not_to() -> None:
    leave = lambda command: Outcome(batches=2, leave=True)  # noqa: E731
    log, at = commands(Plan(length=9, validate=Schedule(period=4)), answer=leave)
    assert shown(log) == "T4 P*."
    assert at == Progress(batches=2, saved=2)
    leave = lambda command: Outcome(batches=2, leave=True, save_on_leave=False)  # noqa: E731
    assert shown(commands(Plan(length=9, validate=Schedule(period=4)), answer=leave)[0]) == "T4 P."


def test_a_run_that_is_asked_to_stop_says_so_with_its_checkpoint() -> None:
    leave = lambda command: Outcome(batches=2, leave=True, interrupted=True)  # noqa: E731
    log, at = commands(Plan(length=9), answer=leave)
    assert log[1:] == [Publish(at=at, save=True, final=True, interrupted=True)]
    # Asked again before its next batch, it has nothing more to save.
    log, _ = commands(Plan(length=9), at, answer=leave)
    assert log[1:] == [Publish(at=at, save=False, final=True, interrupted=True)]


def test_leaving_before_anything_is_trained_saves_nothing() -> None:
    leave = lambda command: Outcome(batches=0, leave=True)  # noqa: E731
    assert shown(commands(Plan(length=9), answer=leave)[0]) == "T9 P."


@given(plan=plans, decide=st.frozensets(st.integers(1, 60)), end=st.integers(1, 60))
@settings(max_examples=100, deadline=None)
def test_where_validations_say_that_a_search_decides_there_is_a_checkpoint_and_at_its_end_an_end(
    plan: Plan, decide: frozenset[int], end: int
) -> None:
    at = 0

    def answer(command: Command) -> Outcome:
        nonlocal at
        if isinstance(command, Train):
            at = command.until
        return Outcome(decides=at in decide, length_reached=at >= end) if isinstance(command, Validate) else Outcome()

    log, last = commands(plan, answer=answer)
    validated = [command.at.batches for command in log if isinstance(command, Publish) and command.at.batches and
                 command.at.validated == command.at.batches]  # fmt: skip
    published = [command for command in log if isinstance(command, Publish) and command.at.batches in validated]
    for publish in published:
        decides = publish.at.batches in {*decide, *plan.rungs, plan.length} or publish.at.batches >= end
        assert publish.decides == decides
        assert publish.save or not decides
        assert publish.final == (publish.at.batches >= min(end, plan.length))
    assert last.batches == next(batches for batches in validated if batches >= min(end, plan.length))
    assert last.is_saved


class Odd:
    """A container that can't be iterated."""

    def __contains__(self, number: object) -> bool:
        return isinstance(number, int) and number % 2 == 1


def due(schedule: Schedule | None, limit: int = 12) -> list[int]:
    assert schedule is not None
    return [batches for batches in range(limit + 1) if schedule.due(batches)]


@pytest.mark.api("8.4")
@pytest.mark.parametrize(
    ("unit", "expected"),
    [
        (Batch(5), [5, 10]),
        (Batch(0), list(range(1, 13))),
        (Batch(-3), list(range(1, 13))),
        (Batch([1, 5, 99]), [1, 5]),
        (Batch(range(2, 5)), [2, 3, 4]),
        (Batch(Odd()), [1, 3, 5, 7, 9, 11]),
        (Epoch(1), [4, 8, 12]),
        (Epoch(2), [8]),
        (Epoch(0), [4, 8, 12]),
        (Epoch((1, 3)), [4, 12]),
        (Epoch(Odd()), [4, 12]),
    ],
)
def test_a_period_or_a_schedule_is_due_at(unit: TrainUnit, expected: list[int]) -> None:
    schedule = schedule_of(unit, name="validation_period", epoch_length=4)
    assert due(schedule) == expected
    assert schedule is not None
    at, walked = 0, []
    while (at := schedule.next(at, 13)) < 13:
        walked.append(at)
    assert walked == expected


def test_lengths_are_counted_in_batches() -> None:
    assert batches_of(Batch(7), name="max_length", epoch_length=None) == 7
    assert batches_of(Epoch(3), name="max_length", epoch_length=4) == 12
    assert batches_of(Records(100), name="max_length", epoch_length=4, global_batch_size=32) == 4


@pytest.mark.parametrize(
    ("length", "says"),
    [
        (Batch(0), "at least 1"),
        (Batch([1, 2]), "a schedule"),
        (Epoch(1), "needs a sized training loader"),
        (Records(9), "global_batch_size"),
    ],
)
def test_a_length_that_can_not_be_counted_says_why(length: TrainUnit, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        batches_of(length, name="max_length", epoch_length=None)


def test_an_epoch_period_without_epochs_says_what_to_use() -> None:
    with pytest.raises(ValueError, match=r"validation_period=Epoch\(1\) needs a sized training loader.*Batch\(n\)"):
        schedule_of(Epoch(1), name="validation_period", epoch_length=None)


@pytest.mark.api("8.3")
@pytest.mark.parametrize("value", [None, 1.5, "3", True, object()])
def test_a_unit_takes_an_int_or_a_container(value: object) -> None:
    with pytest.raises(TypeError, match="Batch takes an int"):
        Batch(value)  # type: ignore[arg-type]


def test_units_are_equal_by_value_and_kind() -> None:
    assert Batch(3) == Batch(3)
    assert Batch(3) != Epoch(3)
    assert len({Batch(3), Batch(3), Epoch(3)}) == 2


INTERFACES = {"lo": ["127.0.0.1", "::1"], "docker0": ["172.17.0.1"], "eth0": ["10.0.0.7", "fe80::1%eth0"]}


@pytest.mark.parametrize(
    ("address", "interface"),
    [("10.0.0.7", "eth0"), ("127.0.0.1", "lo"), ("127.0.0.2", "lo"), ("::1", "lo"), ("203.0.113.9", None)],
)
def test_the_interface_is_the_one_with_the_nodes_address(
    monkeypatch: pytest.MonkeyPatch, address: str, interface: str | None
) -> None:
    found = {name: [SimpleNamespace(address=each) for each in addresses] for name, addresses in INTERFACES.items()}
    monkeypatch.setattr("psutil.net_if_addrs", lambda: found)
    monkeypatch.setattr(os, "environ", {})
    use_interface_of(address)
    assert os.environ.get("GLOO_SOCKET_IFNAME") == interface


def test_an_interface_that_is_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "bond0")
    use_interface_of("127.0.0.1")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "bond0"


@pytest.mark.parametrize("module", ["dray.training.loop", "dray.training.plan", "dray.training.host"])
def test_the_pure_floor_imports_neither_torch_nor_ray_nor_optuna(module: str) -> None:
    code = f"import sys, {module}; print(*sorted({{'torch', 'ray', 'optuna', 'numpy', 'pydantic'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
