"""A search: normalised values, reproducible draws, a view of each trial, and a log that restores its state."""

from __future__ import annotations

import json
import math
from collections import Counter
from random import Random
from typing import Any

import pytest

from searchers import (
    ASHA,
    Create,
    Done,
    Exited,
    IllegalEvent,
    JournalError,
    MethodError,
    Pause,
    PromotionASHA,
    RandomSearch,
    Reported,
    Resume,
    Search,
    Started,
    Stop,
    parse_space,
)
from searchers.events import Event
from searchers.search import Record
from searchers.testing import Extension, play
from searchers.views import TrainedShares, TrialView
from tests.searchers.helpers import Scripted, new_search, report, state

SPACE = parse_space({"lr": {"type": "log", "base": 10, "minval": -4, "maxval": -1}, "clip": math.inf})


def asha(max_trials: int = 8) -> ASHA:
    return ASHA(max_trials=max_trials, max_length=16, num_rungs=3, max_concurrent_trials=2)


def new(log: list[Record] | None = None, *, method: Any = None, **fields: Any) -> Search:
    return new_search(method or asha(), SPACE, log, **fields)


def begun(log: list[Record] | None = None, *, smaller_is_better: bool = True) -> Search:
    """Return a search with trials 0 and 1 running."""
    search = new(log, smaller_is_better=smaller_is_better)
    search.start()
    search.on(Started(trial=0))
    search.on(Started(trial=1))
    return search


def replayed(records: list[Record], log: list[Record] | None = None, *, method: Any = None) -> Search:
    return new(log, method=method).replay(json.loads(json.dumps(records, allow_nan=False)))


# -------------------------------------------------------------------------------------------------------------- the log


def test_one_record_per_event_with_its_actions() -> None:
    log: list[Record] = []
    search = begun(log)
    report(search, 0, 1, 0.25)
    report(search, 1, 1, 0.5)
    search.on(Exited(trial=1, reason="stopped"))
    lr = [search.params(trial)["lr"] for trial in (0, 1)]
    assert [json.dumps(record) for record in log] == [
        '{"event": "start", "seed": 7, "smaller_is_better": true, "rungs": [1, 4, 16], '
        '"actions": [{"action": "create", "trial": 0}, {"action": "create", "trial": 1}]}',
        f'{{"event": "started", "trial": 0, "hparams": {{"clip": {{"$float": "inf"}}, "lr": {lr[0]}}}, "actions": []}}',
        f'{{"event": "started", "trial": 1, "hparams": {{"clip": {{"$float": "inf"}}, "lr": {lr[1]}}}, "actions": []}}',
        '{"event": "reported", "trial": 0, "step": 1, "value": 0.25, "actions": []}',
        '{"event": "reported", "trial": 1, "step": 1, "value": 0.5, '
        '"actions": [{"action": "stop", "trial": 1}, {"action": "create", "trial": 2}]}',
        '{"event": "exited", "trial": 1, "reason": "stopped", "actions": []}',
    ]


@pytest.mark.parametrize("skips", [True, False])
def test_the_log_says_whether_rungs_were_passed_without_being_ranked_there(skips: bool) -> None:
    """Logs of versions that ranked a trial at all rungs that it had passed don't say so, and are replayed as before."""
    log: list[Record] = []
    report(begun(log), 0, 16, 0.25)
    expected = {"event": "reported", "trial": 0, "step": 16, "value": 0.25}
    assert log[-1] == {**expected, "skips": True, "actions": []}
    records = log if skips else [*log[:-1], {**expected, "actions": []}]
    method, rest = asha(), list[Record]()
    search = replayed(records, rest, method=method)
    assert [dict(values) for values in method.ranked] == ([{}, {}] if skips else [{0: 0.25}] * 2) + [{0: 0.25}]
    assert (report(search, 1, 4, 0.5) == []) is skips, "at rung 4 there is no trial yet, or a better one"
    assert rest[-1]["skips"] is True, "a search that is continued says so from then on"


def test_the_event_is_logged_before_its_actions_are_returned() -> None:
    def refuse(record: Record) -> None:
        raise OSError("disk full")

    search = new()
    search.log = refuse
    with pytest.raises(OSError, match="disk full"):
        search.start()


# ------------------------------------------------------------------------------------------------------------- the edge


@pytest.mark.parametrize("smaller_is_better", [True, False])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, None])
def test_values_that_are_not_finite_are_the_worst_in_either_direction(
    bad: float | None, smaller_is_better: bool
) -> None:
    search = begun(smaller_is_better=smaller_is_better)
    assert report(search, 0, 1, bad) == [Stop(trial=0), Create(trial=2)]
    assert report(search, 1, 1, 1e300) == []


# ---------------------------------------------------------------------------------------------------------------- draws


def test_parameters_depend_on_the_seed_and_the_trial_number() -> None:
    search = new()
    search.start()
    assert search.params(1) == SPACE.sample(Random("7:1"))
    assert search.params(0) == SPACE.sample(Random("7:0"))
    assert search.params(0) != search.params(1)


def test_changing_returned_parameters_changes_nothing() -> None:
    search = begun()
    before = search.params(0)
    search.params(0)["lr"] = "changed"
    assert search.params(0) == before == search.trials[0].hparams


def test_trial_seeds_are_31_bits_and_differ() -> None:
    search = new()
    seeds = [search.seed_of(trial) for trial in range(1000)]
    assert len(set(seeds)) == 1000
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert seeds[:3] == [new().seed_of(trial) for trial in range(3)]


# ---------------------------------------------------------------------------------------------------------------- views


def test_the_view_of_a_trial_through_its_life() -> None:
    search = new()
    search.start()
    assert (search.trials[0].state, search.trials[0].hparams) == ("PENDING", None)
    search.on(Started(trial=0))
    assert (search.trials[0].state, search.trials[0].hparams) == ("RUNNING", search.params(0))
    for step, value in [(1, 0.5), (2, 0.3), (3, math.nan), (4, 0.4)]:
        report(search, 0, step, value)
    view = search.trials[0]
    assert (view.best, view.best_step, view.last, view.last_step, view.ended) == (0.3, 2, 0.4, 4, False)
    search.on(Exited(trial=0, reason="completed"))
    assert (search.trials[0].state, search.trials[0].ended) == ("COMPLETED", True)


@pytest.mark.parametrize("kind", [ASHA, PromotionASHA])
def test_states_and_live_trials_are_those_of_all_trials(kind: type[ASHA]) -> None:
    for seed in range(5):
        method = kind(max_trials=12, max_length=16, num_rungs=3, max_concurrent_trials=4)
        search = new(method=method)
        play(search, seed=seed, extensions=[Extension(max_trials=20, max_length=64)])
        assert search.states == Counter(view.state for view in search.trials.values())
        assert dict(search.live) == {trial: view for trial, view in search.trials.items() if not view.ended}


def test_stop_requested_stays_set_after_the_trial_stopped() -> None:
    search = begun()
    report(search, 0, 1, 0.1)
    report(search, 1, 1, 0.2)
    assert (search.trials[1].state, search.trials[1].stop_requested) == ("RUNNING", True)
    search.on(Exited(trial=1, reason="stopped"))
    assert (search.trials[1].state, search.trials[1].stop_requested) == ("PRUNED", True)
    assert not search.trials[0].stop_requested


def test_a_trial_can_start_again_with_the_same_parameters() -> None:
    search = begun()
    before = search.trials[0]
    assert search.on(Started(trial=0)) == []
    assert search.trials[0] == before


def test_a_method_can_pause_and_resume() -> None:
    pause, resume = Reported(trial=0, step=1, value=0.0), Reported(trial=1, step=1, value=0.0)
    search = new(method=Scripted(2, {pause: [Pause(trial=0)], resume: [Resume(trial=0)]}))
    search.start()
    search.on(Started(trial=1))
    states = []
    started = Started(trial=0)
    for event in (
        started,
        pause,
        started,
        resume,
        started,
    ):  # the trial stays paused if its restart coincided with the pause
        search.on(event)
        states.append(search.trials[0].state)
    assert states == ["RUNNING", "PAUSED", "PAUSED", "PENDING", "RUNNING"]


# ---------------------------------------------------------------------------------------------- late and illegal events


def test_events_after_a_trials_end_are_ignored_and_not_logged() -> None:
    log: list[Record] = []
    search = begun(log)
    search.on(Exited(trial=0, reason="errored"))
    count, view = len(log), search.trials[0]
    late: list[Event] = [
        Exited(trial=0, reason="errored"),
        Exited(trial=0, reason="completed"),
        Started(trial=0),
        Reported(trial=0, step=1, value=0.1),
    ]
    assert [search.on(event) for event in late] == [[]] * 4
    assert (len(log), search.trials[0]) == (count, view)


@pytest.mark.parametrize(
    ("event", "says"),
    [
        (Started(trial=9), "trial 9 was never created; 2 were so far"),
        (Reported(trial=-1, step=1, value=0.1), "trial -1 was never created"),
        (Exited(trial=2, reason="errored"), "trial 2 was never created"),
        (Reported(trial=0, step=math.nan, value=0.1), "must be a finite number >= 0"),
        (Reported(trial=0, step=-1, value=0.1), "reported at step -1"),
        (Reported(trial=0, step=1, value=0.1), "trial 0 reported at step 1 before it started"),
        (Exited(trial=0, reason="bored"), "must be one of completed, stopped"),  # type: ignore[arg-type]
    ],
    ids=str,
)
def test_illegal_events_raise_and_change_nothing(event: Event, says: str) -> None:
    log: list[Record] = []
    search = new(log)
    search.start()
    before = (state(search.method), dict(search.trials), len(log))
    with pytest.raises(IllegalEvent, match=says):
        search.on(event)
    assert (state(search.method), dict(search.trials), len(log)) == before


# --------------------------------------------------------------------------------------------------------------- replay


def test_live_trials_and_pending_stops_survive_a_crash() -> None:
    log: list[Record] = []
    search = begun(log)
    report(search, 0, 1, 0.1)
    report(search, 1, 1, 0.2)
    again = replayed(log)
    assert {t: (v.state, v.stop_requested) for t, v in again.trials.items()} == {
        0: ("RUNNING", False),
        1: ("RUNNING", True),
        2: ("PENDING", False),
    }
    assert again.params(0) == search.params(0)
    assert again.started
    assert again.on(Exited(trial=1, reason="stopped")) == []


def test_replay_uses_the_recorded_parameters() -> None:
    log: list[Record] = []
    begun(log)
    log[1]["hparams"] = {"lr": 0.05}
    assert replayed(log).params(0) == {"lr": 0.05}


def test_an_empty_journal_gives_a_search_that_has_not_started() -> None:
    search = replayed([])
    assert not search.started
    assert search.start() == [Create(trial=0), Create(trial=1)]


def test_records_of_unknown_events_are_skipped() -> None:
    log: list[Record] = [{"event": "opened", "version": 1}]
    begun(log)
    log.insert(3, {"event": "checkpoint", "trial": 0, "id": "x"})
    log.append({"note": "no event at all"})
    log.append({"event": ["started"]})
    assert len(replayed(log).trials) == 2


def test_a_different_decision_names_the_line() -> None:
    log: list[Record] = []
    search = begun(log)
    report(search, 0, 1, 0.1)
    report(search, 1, 1, 0.2)
    log[4]["actions"] = []
    with pytest.raises(
        JournalError, match=r"line 5: the recorded actions are \[\], but this search decides on .*'stop'"
    ):
        replayed(log)


@pytest.mark.parametrize(
    ("record", "says"),
    [
        ({"event": "started", "trial": 9, "actions": []}, "line 4: trial 9 was never created"),
        ({"event": "reported", "trial": 0, "actions": []}, "line 4: not an event"),
        ({"event": "reported", "trial": 0, "step": "x", "value": 1, "actions": []}, "line 4: must be a number"),
        ({"event": "start", "actions": []}, "line 4: the search is started a second time"),
        ({"event": "extended", "max_trials": "many", "max_length": None, "actions": []}, "line 4: .*max_trials"),
        ({"event": "started", "trial": 0, "hparams": [1], "actions": []}, "line 4: hparams must be a mapping"),
    ],
    ids=str,
)
def test_an_impossible_record_names_its_line(record: Record, says: str) -> None:
    log: list[Record] = []
    begun(log)
    with pytest.raises(JournalError, match=says):
        replayed([*log, record])


def test_a_journal_with_a_late_event_or_an_early_extension_is_refused() -> None:
    log: list[Record] = []
    begun(log).on(Exited(trial=0, reason="completed"))
    with pytest.raises(JournalError, match=r"line 5: .*comes after the trial's end"):
        replayed([*log, log[-1]])
    with pytest.raises(JournalError, match="line 1: the search is extended before it starts"):
        replayed([{"event": "extended", "max_trials": 9, "max_length": None, "actions": []}])


# ---------------------------------------------------------------------------------------------- extensions and progress


def ended_search(log: list[Record]) -> Search:
    """Return a search with two completed trials of length 4."""
    search = new(log, method=RandomSearch(max_trials=2, max_length=4))
    search.start()
    for trial in (0, 1):
        search.on(Started(trial=trial))
        report(search, trial, 4, 0.5 - trial)
        search.on(Exited(trial=trial, reason="completed"))
    return search


def test_a_finished_search_continues_with_more_trials() -> None:
    log: list[Record] = []
    search = ended_search(log)
    assert search.done == Done(reason="completed")
    assert search.extend(max_trials=3) == [Create(trial=2)]
    assert (search.done, search.trials[2].state) == (None, "PENDING")
    assert log[-1] == {
        "event": "extended",
        "max_trials": 3,
        "max_length": None,
        "rungs": [4],
        "actions": [{"action": "create", "trial": 2}],
    }
    search.on(Started(trial=2))
    assert search.on(Exited(trial=2, reason="completed")) == [Done(reason="completed")]


def test_a_greater_length_resumes_completed_trials() -> None:
    log: list[Record] = []
    search = ended_search(log)
    before = search.params(0)
    assert search.extend(max_length=8) == [Resume(trial=0), Resume(trial=1)]
    assert [search.trials[trial].state for trial in (0, 1)] == ["PENDING", "PENDING"]
    search.on(Started(trial=0))
    report(search, 0, 8, 0.25)
    assert (search.params(0), search.trials[0].best, search.trials[0].state) == (before, 0.25, "RUNNING")


def test_who_completed_before_a_greater_length_has_not_reached_it() -> None:
    log: list[Record] = []
    search = ended_search(log)
    assert [search.num_reached(trial) for trial in (0, 1)] == [1, 1]
    search.extend(max_length=8)
    search.on(Started(trial=0))
    report(search, 0, 8, 0.25)
    assert [search.num_reached(trial) for trial in (0, 1)] == [1, 0]  # the one rung is now at 8
    assert new(method=RandomSearch(max_trials=2, max_length=4)).replay(log).num_reached(1) == 0


def test_a_refused_extension_changes_nothing() -> None:
    log: list[Record] = []
    search = ended_search(log)
    before = (state(search.method), dict(search.trials), search.done, list(log))
    with pytest.raises(MethodError, match="max_trials"):
        search.extend(max_trials=1)
    assert (state(search.method), dict(search.trials), search.done, log) == before


def test_progress_is_the_share_that_was_trained() -> None:
    search = new(method=RandomSearch(max_trials=2, max_length=4))
    search.start()
    shares = [search.progress()]
    for trial in (0, 1):
        search.on(Started(trial=trial))
        for step in (1, 3, 2):  # the trial was restarted from an earlier step
            report(search, trial, step, 0.5)
            shares.append(search.progress())
        search.on(Exited(trial=trial, reason="completed"))
        shares.append(search.progress())
    assert shares == [0, 1 / 8, 3 / 8, 3 / 8, 1 / 2, 5 / 8, 7 / 8, 7 / 8, 1]


def test_progress_looks_only_at_running_trials() -> None:
    class Counted(dict[int, TrialView]):
        looked = 0

        def __getitem__(self, trial: int) -> TrialView:
            self.looked += 1
            return super().__getitem__(trial)

    views = Counted({trial: TrialView(id=trial, last_step=2) for trial in range(1000)})
    method = RandomSearch(max_trials=1000, max_length=4, max_concurrent_trials=3)
    method.start()
    assert method.progress(TrainedShares(views, 4)) == pytest.approx(3 * 0.5 / 1000)
    assert views.looked == 3
