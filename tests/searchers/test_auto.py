"""The recommended method: its choices by a fake model in closed form (rungs 1, 3, 9), its replay and its limits."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from random import Random

import pytest

from searchers import (
    Auto,
    Create,
    Exited,
    FirstPoints,
    JournalError,
    Pause,
    RandomSampler,
    Reported,
    Requested,
    Resume,
    Sampler,
    Source,
    Started,
    Stop,
)
from searchers.auto import THAWED_TRAININGS
from searchers.events import Action, Event
from searchers.search import Record, Search
from searchers.simulate import Curve, simulate
from searchers.testing import Extension, play, repeat
from tests.searchers.helpers import LINE, new_search, ranked, report, to_run


class Asked(RandomSampler):
    """Chooses by a list of answers, and notes the questions. `told` is the number of events that it was told."""

    def __init__(self, *answers: int | None) -> None:
        super().__init__(LINE, seed=7)
        self.answers, self.questions, self.told = list(answers), list[tuple[int, list[int], int]](), 0

    def tell(self, event: Event, hparams: Mapping[str, object]) -> None:
        self.told += isinstance(event, Reported)

    def choose(self, new: int, paused: Collection[int]) -> int | None:
        self.questions.append((new, sorted(paused), self.told))
        return self.answers.pop(0)


class Dice(RandomSampler):
    """Chooses at random; other seeds choose differently."""

    def choose(self, new: int, paused: Collection[int]) -> int | None:
        return Random(f"{self.seed}:{new}:{sorted(paused)}").choice([None, *sorted(paused)])


def auto(max_trials: int = 64, max_concurrent_trials: int = 1, max_length: int = 9) -> Auto:
    return Auto(max_trials=max_trials, max_length=max_length, max_concurrent_trials=max_concurrent_trials)


def started(sampler: Sampler, log: list[Record] | None = None, **fields: int) -> Search:
    """Start a search, and each of its trials as soon as it is created or resumed."""
    search = new_search(auto(**fields), log=log, sampler=sampler)
    for trial in to_run(search.start()):
        search.on(Started(trial=trial))
    return search


def reported(search: Search, trial: int, step: float, value: float) -> list[Action]:
    actions = report(search, trial, step, value)
    for each in to_run(actions):
        search.on(Started(trial=each))
    return actions


def test_the_sampler_chooses_after_it_learned_of_the_report() -> None:
    sampler = Asked(None, 1, 0, None)
    search = started(sampler)
    assert reported(search, 0, 1, 0.5) == [Pause(trial=0), Create(trial=1)]
    assert reported(search, 1, 1, 0.9) == [], "chosen at once, it is not paused, though it is the worse one"
    assert reported(search, 1, 3, 0.8) == [Pause(trial=1), Resume(trial=0)]
    assert reported(search, 0, 3, 0.4) == [Pause(trial=0), Create(trial=2)]
    assert sampler.questions == [(1, [0], 1), (2, [0, 1], 2), (2, [0, 1], 3), (2, [0, 1], 4)]
    assert ranked(search.method) == [[(0, 0.5), (1, 0.9)], [(0, 0.4), (1, 0.8)], []]


def test_a_choice_is_recorded_and_replayed_whatever_the_model_would_choose_now() -> None:
    log: list[Record] = []
    search = started(Asked(None, 0), log)
    reported(search, 0, 1, 0.5)
    reported(search, 1, 1, 0.9)
    assert [record["choices"] for record in log if "choices" in record] == [[None], [0]]
    asked = Asked(1)
    again = new_search(auto(), sampler=asked).replay(log)
    assert again.trials == search.trials
    assert asked.questions == []
    assert reported(again, 0, 3, 0.4) == [Pause(trial=0), Resume(trial=1)], "later choices are the model's again"


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        (None, r"line 3: it lacks the choice between a new trial and the paused ones \[0\]"),
        ([5], r"line 3: its choices must be null or a paused trial, one of \[0\], got 5"),
        ([None, None], r"line 3: this search does not ask for its choices \[None, None\]"),
    ],
)
def test_a_record_without_the_right_choices_is_an_error(choices: object, message: str) -> None:
    log: list[Record] = []
    reported(started(Asked(None), log), 0, 1, 0.5)
    record = {name: value for name, value in log[2].items() if name != "choices"}
    log[2] = record if choices is None else {**record, "choices": choices}
    with pytest.raises(JournalError, match=message):
        new_search(auto(), sampler=Asked()).replay(log)


@pytest.mark.parametrize("seed", range(5))
def test_random_histories_replay_with_another_model(seed: int) -> None:
    """With failures, late reports, requests and extensions, cut at a random place and continued by the same model."""
    log: list[Record] = []
    extensions = [Extension(max_trials=40), Extension(max_length=27)]
    search = new_search(auto(24, 4), log=log, sampler=Dice(LINE, seed))
    play(search, seed, extensions=extensions, requests=6)
    assert any("choices" in record for record in log)
    replayed = new_search(auto(24, 4), sampler=Dice(LINE, seed + 1)).replay(log)
    assert str(dict(replayed.trials)) == str(dict(search.trials))
    cut, rest = Random(seed).randrange(len(log)), list[Record]()
    again = new_search(auto(24, 4), log=rest, sampler=Dice(LINE, seed)).replay(log[:cut])
    for record in log[cut:]:
        repeat(again, record)
    assert rest == log[cut:]


def test_after_eight_full_trainings_the_rule_of_asha_applies() -> None:
    """Only new trials are chosen, so that none is promoted before."""
    sampler = Asked(*[None] * 1000)
    search = started(sampler, max_trials=1000)
    for trial in range(THAWED_TRAININGS * 9 - 1):
        assert reported(search, trial, 1, 1 - trial / 1000) == [Pause(trial=trial), Create(trial=trial + 1)]
    asked = len(sampler.questions)
    assert reported(search, THAWED_TRAININGS * 9 - 1, 1, 0) == [], "the best of all, it continues"
    assert len(sampler.questions) == asked


def test_with_more_than_three_rungs_the_rule_of_asha_applies_from_the_beginning() -> None:
    sampler = Asked()
    search = started(sampler, max_length=27)
    for trial in range(2):
        reported(search, trial, 1, trial)
    assert reported(search, 2, 1, 2) == [Pause(trial=2), Resume(trial=0)]
    assert sampler.questions == []


def test_when_no_trial_is_left_to_create_the_rule_of_asha_applies() -> None:
    sampler = Asked(None, None)
    search = started(sampler, max_trials=3)
    for trial in range(2):
        reported(search, trial, 1, trial)
    assert reported(search, 2, 1, 2) == [Resume(trial=0), Stop(trial=1), Stop(trial=2)]
    assert len(sampler.questions) == 2


def test_trials_with_given_hyperparameters_keep_their_numbers_outside() -> None:
    """The sampler numbers its own trials 0, 1, ...; a fork has a number of its own."""
    sampler = Asked(None)
    search = started(sampler)
    search.request(Requested(source=Source(trial=0, step=0.5)))
    search.on(Started(trial=1))
    assert reported(search, 0, 1, 0.5) == [Pause(trial=0), Create(trial=2)]
    assert reported(search, 1, 1, 0.4) == [Pause(trial=1)], "it held no slot of the search's own"
    assert sampler.questions[0][:2] == (1, [0])
    sampler.answers = [fork := 100_000_000 + 1, None]
    assert reported(search, 2, 1, 0.5) == [Pause(trial=2), Resume(trial=1), Create(trial=3)], "a fork takes no slot"
    assert [question[:2] for question in sampler.questions[-2:]] == [(2, [0, 1, fork]), (2, [0, 1])]


def test_given_points_come_before_thawed_trials() -> None:
    sampler = Asked(0)
    search = started(FirstPoints(LINE, [{"x": 0.1}, {"x": 0.2}], sampler))
    assert reported(search, 0, 1, 0.5) == [Pause(trial=0), Create(trial=1)]
    assert reported(search, 1, 1, 0.5) == [Pause(trial=1), Resume(trial=0)]
    assert len(sampler.questions) == 1


def test_the_model_need_not_exist() -> None:
    search = started(FirstPoints(LINE, [{"x": 0.1}], RandomSampler(LINE, seed=7)))
    for trial in range(2):
        reported(search, trial, 1, 0.5)
    assert reported(search, 2, 1, 0.4) == [], "the best of three"


def test_a_report_that_crosses_several_rungs_is_ranked_at_the_last_of_them() -> None:
    """Trials report at 9 and 27 only, so one in three continues from there."""
    method = auto(max_length=27)
    method.start()
    for trial in range(2):
        assert report(method, trial, 9, 1 - trial) == [Pause(trial=trial), Create(trial=trial + 1)]
    assert report(method, 2, 9, 2) == [Pause(trial=2), Resume(trial=1)]
    assert ranked(method) == [[], [], [(0, 1), (1, 0), (2, 2)], []]
    assert method.progress({}) == pytest.approx(3 / 1.2 / 64)


@pytest.mark.parametrize(("length", "rungs"), [(1, (1,)), (2, (2,)), (8, (2, 8)), (100, (1, 3, 11, 33, 100))])
def test_rungs_are_at_least_a_unit_long(length: int, rungs: tuple[int, ...]) -> None:
    assert auto(max_length=length).rungs == rungs


def test_many_slots_and_late_trials_end() -> None:
    search = new_search(auto(300, 100), sampler=Dice(LINE, 7))
    found = simulate(search, 100, lambda hparams: Curve(lambda step: float(hparams["x"]) / step), jitter=1.0, seed=3)  # type: ignore[arg-type]
    assert (found.done, found.trials) == ("completed", 300)
    assert search.method.progress({}) == 1


def test_a_failure_of_a_thawed_trial_frees_its_slot() -> None:
    search = started(Asked(0, 0), max_trials=4)
    assert reported(search, 0, 1, 0.5) == []
    assert search.on(Exited(trial=0, reason="errored")) == [Create(trial=1)]
