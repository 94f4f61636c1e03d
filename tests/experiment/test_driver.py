"""What the driver of an experiment decides: reports, decisions, failures, leases; one rule at a time."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import pytest

from dray.config.load import load_config
from dray.config.notify import Watched
from dray.errors import ConfigError, ExperimentError, FoundInTraining
from dray.experiment.alerts import Alerts
from dray.experiment.driver import MAX_ERROR, ExperimentDriver, OpenSearch
from dray.experiment.effects import Answered, Append, Bind, Effect, EndRun, Examine, Fail, Prune, ShowFailure, ToDesk
from dray.experiment.limits import Limits
from dray.leases.effects import Reply
from dray.leases.failure import Failure
from dray.leases.messages import (
    CheckpointSaved,
    DeskReport,
    LeaseGranted,
    LeaseOutcome,
    LeaseOver,
    ReportReceived,
    TrialLeft,
    Unfit,
    WorkerUnfit,
)
from dray.records.spending import Usage
from dray.rpc.wire import Malformed
from searchers.asha import ASHA
from searchers.asha_promotion import PromotionASHA
from searchers.errors import IllegalEvent
from searchers.events import Requested, Source, TrialResult
from searchers.search import Search
from searchers.space import parse

SPACE = {"lr": {"type": "double", "minval": 0.0, "maxval": 1.0}}
RUNG, END = 4, 16
CONFIG = {
    "entrypoint": "model_def:Trial",
    "max_restarts": 1,
    "hyperparameters": {**SPACE, "global_batch_size": 2},
    "searcher": {"name": "asha", "metric": "loss", "max_length": {"batches": END}, "max_trials": 2, "num_rungs": 2},
}
M = TypeVar("M")


class Scene:
    """A driver of a search with two trials, and what it emitted. Tune passes results on when `decide` is called.

    Args:
        records: of an earlier run.
        promotion: trials pause at the first rung, and the best continue; otherwise the others stop.
        handle_waits: Tune's handle has asked for results before the run begins.
        fields: of the config.
    """

    def __init__(
        self,
        records: Sequence[Mapping[str, Any]] = (),
        *,
        promotion: bool = True,
        handle_waits: bool = False,
        **fields: Any,
    ) -> None:
        limits = {"max_trials": 2, "max_length": END, "num_rungs": 2, "divisor": 4, "max_concurrent_trials": 2}
        method = (PromotionASHA if promotion else ASHA)(**limits)  # type: ignore[arg-type]
        self.journal: list[Mapping[str, Any]] = [json.loads(json.dumps(each)) for each in records]
        given: Any = {"seed": 0, "smaller_is_better": True, "log": self.journal.append}
        search = Search(method, parse(SPACE), **given).replay(self.journal)
        if not search.started:
            search.start()
        self.effects: list[Effect] = []
        self.fetched: list[TrialResult] = []
        config, before = load_config({**CONFIG, **fields}), list(self.journal)
        limits = Limits(config, before)
        opened = OpenSearch(
            search=search, config=config, records=before, limits=limits, alerts=Alerts(Watched(), limits, before)
        )
        self.driver = ExperimentDriver(opened, self.effects.append, resume="resume it")
        if handle_waits:
            self.driver.fetch("early", 1)
        self.driver.begin(self.journal)

    def take(self, kind: type[M]) -> list[M]:
        """Take out the effects of this kind since the last call; records are kept in the journal, too."""
        found = [each for each in self.effects if isinstance(each, kind)]
        self.effects[:] = [each for each in self.effects if not isinstance(each, kind)]
        if kind is Append:
            self.journal += [each.record for each in found]  # type: ignore[attr-defined]
        return found

    def replies(self) -> dict[Any, Any]:
        return {reply.call: reply.value for reply in self.take(Reply)}

    def to_desk(self) -> list[tuple[Any, ...]]:
        return [(each.method, *each.args) for each in self.take(ToDesk)]

    def grant(self, lease: int, trial: int) -> None:
        self.driver.on(LeaseGranted(lease=lease, group="g", trial=trial))

    def report(self, lease: int, step: int = RUNG, value: float = 0.5, *, decides: bool = True) -> str:
        """Rank 0 reports; its call."""
        call = f"report of {lease} at {step}"
        rows = [{"batches": step, "kind": "validation", "name": "loss", "value": value, "epochs": 1.0, "time": 0.0}]
        report = DeskReport(rows=rows, step=step, value=value, final=step == END)
        self.driver.report(call, lease, report, decides)
        return call

    def fetch(self, process: int = 7) -> list[TrialResult] | None:
        """Tune's handle asks for results; what it gets at once."""
        self.driver.fetch("fetch", process)
        return self.replies().get("fetch")

    def decide(self) -> None:
        """The handle fetches, and Tune passes the results to the search."""
        if due := self.fetch():
            self.driver.decide(due)

    def leave(self, lease: int, trial: int, outcome: LeaseOutcome, **fields: Any) -> None:
        """A trial leaves its group, and the lease is over."""
        self.driver.on(TrialLeft(lease=lease, group="g", trial=trial, outcome=outcome, **fields))
        self.driver.on(LeaseOver(lease=lease, group="g", trial=trial))

    def die(self, lease: int, trial: int) -> None:
        """A trial's processes die."""
        self.leave(lease, trial, "errored", error="it died", failure=Failure(kind="died"), dead=(0,))

    def state(self, trial: int) -> str:
        return self.driver.search.trials[trial].state


@pytest.fixture
def scene() -> Scene:
    """Its trials 0 and 1 have the leases 1 and 2."""
    scene = Scene()
    assert scene.to_desk() == [("enqueue", [0, 1], False)]
    scene.grant(1, 0)
    scene.grant(2, 1)
    assert [(bind.lease, bind.trial, bind.last_step) for bind in scene.take(Bind)] == [(1, 0, None), (2, 1, None)]
    scene.take(Append)
    return scene


# ------------------------------------------------------------------------------------------------------------- reports
def test_a_decisive_report_is_recorded_then_decided_on_then_answered(scene: Scene) -> None:
    call = scene.report(1)
    assert isinstance(scene.effects[0], ReportReceived)
    assert not scene.replies()
    due = scene.fetch()
    assert due == [TrialResult(number=1, trial=0, step=RUNG, value=0.5, batches=RUNG)]
    scene.effects.clear()
    scene.driver.decide(due)
    assert [each.record["event"] for each in scene.effects if isinstance(each, Append)] == ["reported"]
    assert all(each.wait for each in scene.take(Append))
    assert scene.replies() == {call: "pause"}
    assert scene.to_desk() == [("withdraw", [0])]
    scene.driver.decide(due)
    assert not scene.effects, "Tune passes a result again if its handle was replaced"
    assert scene.driver.counts.decisions == {"pause": 1}


def test_a_report_that_nobody_waits_for_is_answered_at_once(scene: Scene) -> None:
    call = scene.report(1, decides=False)
    received, reply = [each for each in scene.effects if not isinstance(each, Append)]
    assert isinstance(received, ReportReceived)
    assert reply == Reply(call, "continue")
    scene.driver.close()
    call = scene.report(1, decides=False)
    assert scene.replies() == {call: "interrupt"}


def test_a_report_of_a_fenced_or_ended_lease_is_refused(scene: Scene) -> None:
    waiting = scene.report(1)
    scene.grant(3, 0)  # rank 0 has failed, the other ranks have not left yet
    assert scene.replies() == {waiting: "fenced"}
    refused = scene.report(1)
    unknown = scene.report(99)
    scene.driver.may_commit("commit", 1)
    scene.driver.improves("improves", 1, 0.0)
    scene.driver.may_commit("new commit", 3)
    assert scene.replies() == {
        refused: "fenced",
        unknown: "fenced",
        "commit": False,
        "improves": False,
        "new commit": True,
    }
    scene.driver.on(LeaseOver(lease=1, group="g", trial=0))
    scene.driver.may_commit("new commit", 3)
    assert scene.replies() == {"new commit": True}


def test_the_best_score_is_strictly_better_or_was_lost_with_an_earlier_lease_of_its_trial(scene: Scene) -> None:
    def improves(lease: int, score: float) -> Any:
        scene.driver.improves("call", lease, score)
        return scene.replies()["call"]

    scene.driver.best("best")
    assert scene.replies() == {"best": None}
    assert [improves(1, score) for score in (0.5, 0.5, 0.6, 0.4)] == [True, False, False, True]
    assert not improves(2, 0.4)
    scene.driver.on(LeaseOver(lease=1, group="g", trial=0))
    scene.grant(3, 0)
    assert [improves(3, 0.4), improves(3, 0.4)] == [True, False]
    scene.driver.best("best")
    assert scene.replies()["best"] == 0.4


def test_a_checkpoint_of_an_ended_lease_counts(scene: Scene) -> None:
    scene.driver.on(LeaseOver(lease=1, group="g", trial=0))
    scene.driver.saved(None, 0, "id", 4, 0.5, 1.0)
    assert [each.record["event"] for each in scene.take(Append)] == ["saved"]


# ---------------------------------------------------------------------------------------------------------------- Tune
def test_the_handle_gets_each_result_once_and_those_of_a_trial_one_after_another(scene: Scene) -> None:
    assert scene.fetch() is None
    scene.report(1)
    [first] = scene.replies()["fetch"]
    scene.report(2, value=0.25)
    scene.driver.on(LeaseOver(lease=1, group="g", trial=0))
    scene.grant(3, 0)
    scene.report(3, value=0.5)  # again, after a restart
    [second] = scene.fetch() or []
    assert (first.trial, second.trial) == (0, 1)
    assert scene.fetch() is None
    scene.driver.decide([first])
    assert [result.number for result in scene.replies()["fetch"]] == [3]


def test_a_result_that_two_handles_pass_is_decided_on_once(scene: Scene) -> None:
    scene.report(1)
    first = scene.fetch() or []
    scene.driver.on(LeaseOver(lease=1, group="g", trial=0))
    scene.grant(3, 0)
    scene.report(3)  # waits behind the first
    for _ in range(2):
        scene.driver.decide(first)
    assert sum(scene.driver.counts.decisions.values()) == 1


def test_a_new_handle_gets_unanswered_results_again_and_the_call_of_the_dead_one_ends(scene: Scene) -> None:
    scene.report(1)
    first = scene.fetch(7)
    assert scene.fetch(7) is None
    scene.driver.fetch("new", 8)
    assert scene.replies() == {"fetch": [], "new": first}
    assert scene.driver.counts.handles_started == 2


def test_the_end_of_the_search_closes_the_desks_client_and_ends_the_handle() -> None:
    scene = Scene(promotion=False)
    for lease, trial in ((1, 0), (2, 1)):
        scene.grant(lease, trial)
        scene.report(lease, END, value=trial)
    scene.effects.clear()
    scene.decide()
    assert scene.driver.search.done is not None
    assert ("close",) in scene.to_desk()
    assert scene.fetch() is None
    scene.driver.fetch("late", 7)
    assert scene.replies() == {"late": None}
    assert scene.driver.counts.handles_started == 1


def test_a_method_that_fails_ends_the_run_and_trials_may_save() -> None:
    scene = Scene()
    scene.grant(1, 0)
    scene.driver.search.method.on = lambda event: 1 / 0  # type: ignore[method-assign]
    waiting = scene.report(1)
    scene.decide()
    [fail] = scene.take(Fail)
    assert isinstance(fail.error, ExperimentError)
    assert str(fail.error) == "the search failed: division by zero"
    scene.driver.close()
    assert scene.replies() == {waiting: "interrupt"}


# ------------------------------------------------------------------------------------------------------------ failures
def test_a_failed_trial_restarts_first_in_the_queue_and_is_recorded_before(scene: Scene) -> None:
    scene.die(1, 0)
    assert [type(each) for each in scene.effects] == [ShowFailure, Append, ToDesk]
    assert scene.take(Append)[0].record["event"] == "restarted"
    assert scene.to_desk() == [("enqueue", [0], True)]
    assert scene.driver.counts.restarts == {0: 1}


def test_a_handle_that_waits_before_the_run_begins_hears_of_the_trials_that_were_given_up() -> None:
    scene = Scene()
    for lease in (1, 2, 3):
        scene.grant(lease, 0)
        scene.die(lease, 0)
    scene.take(Append)
    assert scene.journal[-1]["event"] == "gave_up"
    [result] = Scene(scene.journal, handle_waits=True).replies()["early"]
    assert (result.trial, result.outcome) == (0, "errored")


def test_a_restarted_trial_that_waits_for_a_decision_is_stopped_with_its_first_report() -> None:
    """Its second result is dropped: nobody else would answer."""
    scene = Scene(promotion=False)
    scene.grant(1, 0)
    scene.grant(2, 1)
    scene.report(1, value=0.1)
    scene.decide()
    scene.report(2, value=0.5)
    due = scene.fetch()
    scene.die(2, 1)
    scene.grant(3, 1)
    again = scene.report(3, value=0.5)
    scene.replies()
    scene.driver.decide(due or [])
    assert scene.replies() == {again: "stop"}


def test_an_error_that_is_fatal_ends_the_run_with_the_place_in_the_config(scene: Scene) -> None:
    scene.leave(1, 0, "errored", error="searcher.metric: there is no loss", fatal=True)
    [fail] = scene.take(Fail)
    assert isinstance(fail.error, FoundInTraining)
    assert str(fail.error) == "searcher.metric: there is no loss"
    assert not scene.take(ShowFailure), "which would say it again, once per trial"


def test_of_an_endless_error_the_ends_are_kept(scene: Scene) -> None:
    scene.leave(1, 0, "errored", error=f"ValueError: {'x' * 10 * MAX_ERROR}\n  model_def.py:7")
    [record] = [each.record for each in scene.take(Append) if each.record["event"] == "restarted"]
    error = record["error"]
    assert error.startswith("ValueError: xxx")
    assert error.endswith("x\n  model_def.py:7")
    assert len(error) < MAX_ERROR + 100


def test_a_variant_whose_error_would_be_fatal_ends_alone_and_for_good(scene: Scene) -> None:
    request(scene, hparams={}, code="c0de")
    scene.grant(3, 2)
    [bind] = [each for each in scene.take(Bind) if each.trial == 2]
    assert bind.code == "c0de"
    scene.leave(3, 2, "errored", error="searcher.metric: there is no loss", fatal=True)
    scene.decide()
    assert not scene.take(Fail)
    assert (scene.state(2), scene.state(0)) == ("ERRORED", "RUNNING")
    [gave_up] = [each.record for each in scene.take(Append) if each.record["event"] == "gave_up"]
    assert (gave_up["why"], gave_up["error"]) == (
        "a restart would not change its code",
        "searcher.metric: there is no loss",
    )


@pytest.mark.parametrize("trained", [False, True])
def test_workers_that_can_run_no_trial_end_the_run(scene: Scene, trained: bool) -> None:
    if trained:
        scene.report(1)
    why = Unfit(faults=[("entrypoint", "no class")], resumable=True)
    scene.driver.on(WorkerUnfit(group="g", why=why))
    [fail] = scene.take(Fail)
    assert type(fail.error) is (FoundInTraining if trained else ConfigError)
    assert "no class; then resume it" in str(fail.error)


# -------------------------------------------------------------------------------------------------------- stop, resume


ROW = {"batches": 4, "kind": "validation", "name": "loss", "value": 0.5, "epochs": 1.0, "time": 0.0}


@pytest.mark.parametrize(
    "rows",
    [
        ({**ROW, "batches": -1},),
        ({**ROW, "batches": True},),
        ({**ROW, "batches": 2**63},),
        ({**ROW, "name": 3},),
        ({**ROW, "name": "\ud800"},),
        ({**ROW, "value": "nan"},),
        ({**ROW, "trial_id": 1},),
        ({"batches": 4},),
    ],
)
def test_rows_that_can_not_be_kept_are_refused_before_anything_has_changed(scene: Scene, rows: Any) -> None:
    before = scene.driver.counts.reports
    with pytest.raises(Malformed):
        scene.driver.report("call", 1, DeskReport(rows=rows), False)
    assert (scene.effects, scene.driver.counts.reports) == ([], before)
    scene.driver.report("call", 1, DeskReport(rows=(ROW,)), False)
    assert scene.replies() == {"call": "continue"}


@pytest.mark.parametrize("trial", [-1, 2, 10**12])
def test_checkpoints_of_trials_that_do_not_exist_are_refused(scene: Scene, trial: int) -> None:
    with pytest.raises(Malformed):
        scene.driver.saved(None, trial, "checkpoint_4", 4, 0.5, None)
    with pytest.raises(Malformed):
        scene.driver.damaged(None, trial, "checkpoint_4", "it is empty")
    assert scene.effects == []


# ------------------------------------------------------------------------------------------------------------ requests
def exists(request: Requested) -> None:
    """The source's checkpoint exists."""


def request(scene: Scene, check: Callable[[Requested], None] = exists, **fields: Any) -> Mapping[str, Any]:
    """Carry out a request, and return the answer's record."""
    scene.driver.request(Requested(**{"id": "a", **fields}), check)
    kinds = [type(effect) for effect in scene.effects]
    assert kinds.index(Append) < kinds.index(Answered), "its file is removed once the answer is recorded"
    [answer] = [each.record for each in scene.take(Append) if each.record.get("id") == fields.get("id", "a")]
    assert scene.take(Answered) == [Answered(answer["id"])]
    return answer


def test_a_fork_is_queued_and_begins_from_its_sources_checkpoint_with_its_own_hyperparameters(scene: Scene) -> None:
    source = Source(trial=1, step=RUNG, batches=RUNG)
    answer = request(scene, source=source, hparams={"lr": 7.0})
    assert (answer["event"], [each["trial"] for each in answer["actions"]]) == ("requested", [2])
    assert scene.to_desk() == [("enqueue", [2], True)]
    scene.grant(3, 2)
    [bind] = scene.take(Bind)
    assert (bind.source, bind.last_step, bind.is_changed, bind.hparams["lr"]) == (source, RUNG, True, 7.0)
    assert bind.seed == scene.driver.search.seed_of(1)
    request(scene, id="b", source=source)
    scene.grant(4, 3)
    [bind] = scene.take(Bind)
    assert (bind.is_changed, bind.hparams) == (False, scene.driver.search.params(1))


def test_a_new_trial_has_the_given_hyperparameters(scene: Scene) -> None:
    request(scene, hparams={"lr": 7.0})
    assert scene.to_desk() == [("enqueue", [2], True)]
    scene.grant(3, 2)
    [bind] = scene.take(Bind)
    assert (bind.source, bind.last_step, bind.hparams["lr"]) == (None, None, 7.0)


def test_a_running_trial_that_is_stopped_is_canceled_at_once_and_leaves(scene: Scene) -> None:
    call = scene.report(1)
    due = scene.fetch()
    scene.driver.request(Requested(id="a", trial=0), exists)
    assert scene.state(0) == "CANCELED"
    assert scene.replies() == {call: "stop"}
    assert scene.to_desk() == [("cancel", 0), ("withdraw", [0])]
    scene.driver.decide(due or [])
    scene.leave(1, 0, "interrupted")
    scene.die(2, 1)
    assert [each for each in scene.to_desk() if each[0] == "enqueue"] == [("enqueue", [1], True)]
    ends = [(each.record["trial"], each.record["reason"]) for each in scene.take(Append) if "reason" in each.record]
    assert ends == [(0, "canceled")]


def test_a_pending_trial_that_is_stopped_gets_no_workers() -> None:
    scene = Scene()
    request(scene, trial=1)
    assert ("cancel", 1) in scene.to_desk()
    scene.grant(1, 1)  # granted before the desk heard of its end
    assert (scene.to_desk(), scene.take(Bind), scene.state(1)) == ([("drop", 1)], [], "CANCELED")


def test_a_paused_trial_that_is_stopped_is_not_resumed(scene: Scene) -> None:
    scene.report(1, value=0.1)
    scene.decide()
    assert scene.state(0) == "PAUSED"
    request(scene, trial=0)
    assert scene.state(0) == "CANCELED"
    scene.to_desk()
    scene.report(2, value=0.5)
    scene.decide()
    assert not [each for each in scene.to_desk() if each[0] == "enqueue"]
    assert scene.driver.search.done


def test_a_search_is_done_when_its_last_trial_is_stopped(scene: Scene) -> None:
    request(scene, trial=0)
    request(scene, id="b", trial=1)
    assert scene.to_desk()[-1] == ("close",)
    assert scene.fetch() is None
    scene.driver.request(Requested(id="c"), exists)
    assert not scene.effects, "the next run carries it out"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"trial": 9}, "trial 9"),
        ({"hparams": {"lx": 1}}, "hyperparameters.lx: is not a hyperparameter of the space"),
        ({"source": Source(trial=9, step=1, batches=1)}, "trial 9"),
        ({"source": Source(trial=0, step=END, batches=END)}, "can't begin from step 16 of trial 0"),
    ],
)
def test_an_impossible_request_is_rejected_and_changes_nothing(
    scene: Scene, fields: dict[str, Any], message: str
) -> None:
    answer = request(scene, **fields)
    assert answer["event"] == "rejected"
    assert message in answer["error"]
    assert not scene.effects
    assert list(scene.driver.search.trials) == [0, 1]


def test_a_fork_of_a_checkpoint_that_does_not_exist_or_is_being_deleted_is_rejected(scene: Scene) -> None:
    def gone(request: Requested) -> None:
        raise IllegalEvent("it is gone")

    source = Source(trial=0, step=2, batches=2)
    assert request(scene, gone, source=source)["error"] == "it is gone"
    scene.driver.saved(None, 0, "2", 2, 0.5, None)
    scene.driver.retention.examined(scene.take(Examine)[0])
    for batches in (6, 8, 10):
        scene.driver.saved(None, 0, str(batches), batches, batches / 10, None)
    assert [each.batches for each in scene.take(Prune)[-1].delete] == [6]
    scene.take(CheckpointSaved)
    assert request(scene, id="b", source=source)["event"] == "requested"
    source = Source(trial=0, step=6, batches=6)
    assert "being deleted" in request(scene, id="c", source=source)["error"]


def test_a_request_waits_while_the_store_can_not_be_used(scene: Scene) -> None:
    def away(request: Requested) -> None:
        raise OSError("away")

    with pytest.raises(OSError, match="away"):
        scene.driver.request(Requested(id="a"), away)
    assert not scene.effects
    assert request(scene)["event"] == "requested"


def test_a_request_that_is_read_twice_is_carried_out_once(scene: Scene) -> None:
    request(scene)
    scene.effects.clear()
    scene.driver.request(Requested(id="a"), exists)
    assert not scene.effects


def test_a_closing_run_leaves_requests_to_the_next_one(scene: Scene) -> None:
    scene.driver.close()
    scene.effects.clear()
    scene.driver.request(Requested(id="a"), exists)
    assert not scene.effects


@pytest.mark.parametrize("ends", ["it has saved", "it is stopped", "it has failed", "not yet"])
def test_a_forks_source_is_kept_until_the_fork_needs_it_no_more_also_by_the_next_run(scene: Scene, ends: str) -> None:
    for batches in (2, 4, 6):
        scene.driver.saved(None, 0, str(batches), batches, batches / 10, None)
    request(scene, source=Source(trial=0, step=4, batches=4))
    scene = Scene(scene.journal)
    scene.take(Append)
    for examine in scene.take(Examine):
        scene.driver.retention.examined(examine)
    scene.driver.saved(None, 0, "8", 8, 0.8, None)
    match ends:
        case "it has saved":
            scene.grant(3, 2)
            scene.driver.saved(None, 2, "own", 6, 0.5, None)
            scene.driver.retention.examined(scene.take(Examine)[0])
            [*_, prune] = scene.take(Prune)
            assert [each.checkpoint for each in prune.keep][-1] == "own"
            assert not prune.delete
            scene.driver.retention.pruned(prune, [], [], failed=False)
        case "it is stopped":
            request(scene, id="b", trial=2)
        case "it has failed":
            scene.grant(3, 2)
            scene.leave(3, 2, "invalid_hp")
            scene.decide()
    deleted = {each.batches for prune in scene.take(Prune) for each in prune.delete}
    assert deleted == (set() if ends == "not yet" else {4})


# -------------------------------------------------------------------------------------------------------------- limits
def spent(share: float, *, slots: int = 2) -> Usage:
    """What is spent of ten slot-hours and of an hour, while this many slots are in use."""
    return Usage(
        spent={"time": 3600 * share, "slot_hours": 10 * share, "usd": 0.0},
        per_s={"time": 1.0, "slot_hours": slots / 3600, "usd": 0.0},
    )


def running(**fields: Any) -> Scene:
    """A scene whose trials 0 and 1 have the leases 1 and 2."""
    scene = Scene(promotion=False, **fields)
    scene.grant(1, 0)
    scene.grant(2, 1)
    scene.effects.clear()
    return scene


def test_when_the_budget_is_spent_trials_save_and_leave_and_the_search_is_as_if_interrupted() -> None:
    scene = running(budget={"time": "1h"})
    scene.driver.tick(spent(0.999), 10.0)
    assert not scene.effects
    scene.driver.tick(spent(1.0), 13.6)
    assert [each.record for each in scene.take(Append)] == [{"event": "ended", "reason": "budget.time is spent"}]
    assert (scene.to_desk(), len(scene.take(EndRun))) == ([("close",)], 1)
    call = scene.report(1)
    assert scene.replies() == {call: "interrupt"}
    assert (scene.state(0), scene.state(1), scene.driver.search.done) == ("RUNNING", "RUNNING", None)
    scene.driver.tick(spent(1.1), 20.0)
    assert not scene.take(EndRun), "once"


def test_the_search_decides_on_the_last_report_before_an_early_end() -> None:
    scene = running(budget={"slot_hours": 10})
    scene.fetch()
    scene.report(1, END, 0.2)
    scene.driver.tick(spent(1.0), 1.0)
    reason = "budget.slot_hours is spent"
    assert [each.record["reason"] for each in scene.take(Append) if each.record["event"] == "ended"] == [reason]
    scene.leave(1, 0, "completed")
    scene.leave(2, 1, "interrupted")
    assert not scene.driver.is_drained
    scene.decide()
    assert (scene.state(0), scene.driver.is_drained) == ("COMPLETED", True)


def test_with_little_left_of_the_slot_hours_a_trial_that_is_late_leaves_for_another() -> None:
    scene = running(budget={"slot_hours": 10})
    for now, step in ((0.0, 5), (100.0, 6)):  # 100 s a batch: 1000 s to the end
        scene.driver.tick(spent(0.5), now)
        scene.report(1, step, decides=False)
        scene.report(2, 14 + (step == 6), decides=False)  # 100 s to the end
    scene.effects.clear()
    scene.driver.tick(spent(0.98), 100.0)  # 0.2 slot-hours: 360 s for two slots
    assert scene.to_desk() == [("cancel", 0)]
    call = scene.report(1, 7, decides=False)
    assert scene.replies() == {call: "interrupt"}
    scene.leave(1, 0, "interrupted")
    assert (scene.state(0), scene.take(EndRun)) == ("RUNNING", [])
    scene.grant(3, 0)  # a node was lost at the same time, say
    assert ("drop", 3) in scene.to_desk()
    scene.driver.on(LeaseOver(lease=3, group="g", trial=0))
    scene.report(2, END)
    scene.leave(2, 1, "completed")
    scene.decide()
    scene.driver.tick(spent(0.99, slots=0), 200.0)
    assert len(scene.take(EndRun)) == 1, "nothing else runs"
    assert "the rest of budget.slot_hours takes no trial to its next rung" in scene.driver.limits.reason


def test_with_little_time_left_a_trial_that_is_late_trains_on() -> None:
    scene = running(budget={"time": "1h"})
    for now, step in ((0.0, 5), (100.0, 6)):
        scene.driver.tick(spent(0.95), now)
        scene.report(1, step, decides=False)
    scene.effects.clear()
    scene.driver.tick(spent(0.98), 100.0)
    assert not scene.effects


def test_what_the_clock_reports_does_not_make_deaths_at_one_place_look_like_progress() -> None:
    scene, lease = Scene(max_restarts=9), 1
    scene.grant(lease, 0)
    for batches in (3, 5, 7):
        row = {"batches": batches, "kind": "system", "name": "batches_per_second", "value": 1.0}
        scene.driver.report(None, lease, DeskReport(rows=[{**row, "epochs": None, "time": 0.0}]), False)
        scene.die(lease, 0)
        lease += 10
        scene.grant(lease, 0)
    scene.decide()
    assert scene.state(0) == "ERRORED"
